"""One engine that reads one request: a pull on each of its ranks, and what must be true of how each ends."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from kvflow.errors import DeadlineExceeded, KvflowError, WorkerClosed
from kvflow.layout.groups import window_blocks
from kvflow.leases.tickets import Ticket
from tests.fakes.world import World
from tests.simulation.engines import PULLS_MAX, Engine, Rank
from tests.simulation.faces import Face
from tests.simulation.oracle import LOST, Circumstances, explains

if TYPE_CHECKING:
    from tests.simulation.requests import Request

ROOM_S = 0.05
"""Time from one attempt to claim blocks for a ticket that is kept to the next."""

SOUGHT_S = 0.3
"""How long a reader waits for an offer of some content."""

ROOM_S_MAX = 5.0
"""How long a ticket is kept for want of blocks; then it is given back unread."""


class Reading:
    """One engine that reads one request: a pull on each of its ranks, into the same blocks.

    Attributes:
        name: its own.
        engine: that reads.
        found: whether it has asked for the content, and got the ticket.
        released_at: when every rank had read it, or given it back, in peace; None before.
        unread: whether it gives back what it does not read.
    """

    def __init__(self, world: World, request: "Request", engine: Engine, params: dict[str, Any], reading: int) -> None:
        self.name = f"{request.name}.{engine.name}.{reading}"
        self.engine = engine
        self.found = False
        self.released_at: float | None = None
        self._world = world
        self._request = request
        self._params = params
        self._number = next(engine.setting.pulls)
        self._block_ids: list[list[int]] = []
        self._blocks: list[int] = []
        self._occupied: list[int] = []
        self._kept = False
        self.unread = request.plan.unread and not (request.plan.sought and reading)
        # The second and third of three that begin together share what is read; one goes on when the other is cancelled.
        self._cancel_s = request.plan.cancel_s if reading == max(0, request.plan.readings - 2) else None
        self._left = len(engine.ranks)
        self._released = 0
        self._neglected = False
        self._renewing = 0  # ranks that keep the ticket, or pull
        self._started = False  # to pull

    @property
    def over(self) -> bool:
        """Whether every rank knows how its pull ended."""
        return not self._left

    def note_expiry(self) -> None:
        """Note that a lease has run out, although all ranks kept the ticket or pulled, and nothing else was wrong.

        A rank of the source whose bytes have been delivered is no longer needed. So it shows by the end of the pull.
        """
        self._neglected |= self._renewing == len(self.engine.ranks)

    def begin(self) -> None:
        """Keep the ticket for a while, if the plan is so; then claim blocks, and pull on every rank."""
        self.engine.call_when_killed(self._on_kill)
        for _ in self.engine.ranks:
            self._request.begun()
        source = self._request.source
        if self._request.plan.sought and (source.minted or len(source.ranks) == 1):  # else it finds one rank's ticket
            rank = self.engine.ranks[0]
            rank.process.create_task(self._seek(rank), name=f"drive seeking {self.name}")
        else:
            self._hold_and_claim()

    async def _seek(self, rank: Rank) -> None:
        """Ask a rank of the source for the content, and read what it keeps."""
        request, source = self._request, self._world.chance.choice(self._request.source.ranks)
        digests = request.digests()[0]
        before = source.held.get(request.name)
        try:
            if rank.face is None:
                raise WorkerClosed("not open")
            ticket, count = await rank.face.find(source.endpoint, digests, SOUGHT_S if request.plan.part_s else 0.0)
        except asyncio.CancelledError:
            return
        except KvflowError as error:
            if rank.face is not None:
                self._judge(rank, error)
            self._leave(error.code)
            return
        if ticket is not None and ticket.request_id != request.name and ticket.request_id in source.held:
            source.held[ticket.request_id][0].taken = True
        if ticket is None or count < len(digests):
            # Its successor may answer at its address. An open lease is its first finder's until all ranks of that have
            # given it back, or until it runs out: a release is lost with its connection.
            found = (each for each in request.readings if each.found)
            lost = any(each.released_at is None or each.may_lose_releases(source) for each in found)
            taken = request.plan.part_s and (request.taken or lost)
            is_there = before is not None and source.held.get(request.name) is before
            if is_there and source.engine.alive and not taken:
                self._world.fail(f"{source.name} keeps {request.name}, and {self.name} was told of {count} blocks")
            self._leave("not held")
        elif ticket.request_id != request.name:  # of the same tokens, and more
            self._leave("another is held")
        else:
            self.found = True
            self._params = json.loads(json.dumps(ticket.to_params()))
            self._hold_and_claim()

    def may_lose_releases(self, source: Rank) -> bool:
        """Tell whether a connection between this engine and a rank of the source may have ended."""
        hosts = [rank.process.host for rank in self.engine.ranks]
        return bool(self.engine.setting.troubles.between(source.process.host, hosts) & LOST)

    def _leave(self, outcome: str) -> None:
        """Read nothing."""
        for _ in range(self._left):
            self._request.closed(outcome)
        self._left = 0

    def _hold_and_claim(self) -> None:
        if self._request.plan.kept_s:
            self._keep()
        self._world.after(self._request.plan.kept_s, self._claim, self._world.now + ROOM_S_MAX)

    def _keep(self) -> None:
        self._kept = True
        self._world.after(self.engine.setting.settings.compute_s, self._keep_no_more)
        for rank in self.engine.ranks:
            rank.process.create_task(self._keep_on(rank), name=f"drive keeping {self.name}")

    def _keep_no_more(self) -> None:
        """A worker holds a ticket that is not pulled for so long only: its lease may run out from now on."""
        if not self._started:
            self._kept, self._renewing = False, -len(self.engine.ranks)

    async def _keep_on(self, rank: Rank) -> None:
        if rank.face is None:
            return
        try:
            await rank.face.hold(Ticket.from_params(self._params), name=self.name)
            self._renewing += 1
        except asyncio.CancelledError:
            return
        except KvflowError as error:
            self._judge(rank, error)

    def _claim(self, until: float) -> None:
        """Claim blocks, and pull; where there are none, keep the ticket and try again, and give it back in the end."""
        plan, engine = self._request.plan, self.engine
        if not engine.alive:
            return
        counts = [window_blocks(group, plan.num_tokens) for group in engine.groups]
        counts[0] = max(1, counts[0] - plan.skipped)
        claimed = None if self.unread else engine.claim(sum(counts))
        if claimed is None and not self.unread and self._world.now < until:
            if not self._kept:
                self._keep()
            self._world.after(ROOM_S, self._claim, until)
            return
        self.unread = claimed is None
        self._blocks = list(claimed or ())
        if claimed and plan.occupied and (on_offer := engine.on_offer()):
            self._occupied = [self._world.chance.choice(on_offer)]
            engine.give_back(self._blocks[:1])
            engine.claim_also(self._occupied)
            self._blocks[:1] = self._occupied
        blocks = list(self._blocks)
        self._block_ids = [[blocks.pop(0) for _ in range(number)] for number in counts] if blocks else []
        self._started = True
        for rank in engine.ranks:
            self._start(rank)

    def _start(self, rank: Rank) -> None:
        rank.own(self._blocks[len(self._occupied) :], self._number)
        for block in self._occupied:
            rank.inherit(block, self._number)
        task = rank.process.create_task(self._drive(rank), name=f"drive {self.name}")
        if self._cancel_s is not None:
            self._world.after(self._cancel_s, rank.process.call_soon, self._cancel, task)

    def _cancel(self, task: "asyncio.Task[None]") -> None:
        if not task.done():
            self._renewing = -len(self.engine.ranks)  # what is cancelled renews nothing
            task.cancel()

    def _on_kill(self) -> None:
        self._leave("reader killed")

    async def _drive(self, rank: Rank) -> None:
        """Pull on one rank, look at the bytes, use them for a while, and give the blocks back."""
        try:
            outcome = await self._read(rank)
        except asyncio.CancelledError:  # before it had begun to pull, or while it used the bytes
            outcome = "cancelled"
        except BaseException as error:  # noqa: BLE001 - a scenario ends with the first defect
            self._world.fail(error)
            return
        if not self.engine.alive:
            return
        rank.disown(self._blocks)
        self._renewing = -len(self.engine.ranks)
        self._left -= 1
        if not self._left:
            self.engine.give_back(self._blocks)
        self._world.note(rank.name, "ended", self.name, outcome)
        self._request.closed(outcome)

    async def _read(self, rank: Rank) -> str:
        face = rank.face
        if face is None:
            return "not open"
        try:
            ticket = Ticket.from_params(self._params)
            if self.unread:
                self._request.gave_back(rank)
                await face.release(ticket, name=self.name)
                self._note_released()
                return "given back"
            await self._pull(rank, face, ticket)
        except asyncio.CancelledError:
            return "cancelled"
        except KvflowError as error:
            self._judge(rank, error)
            return error.code
        if self._request.plan.forged:
            self._world.fail(f"{rank.name}: a forged ticket of {self._request.name} was read")
        if not any(map(self._request.is_computed, self._request.source.ranks)):
            self._world.fail(f"{rank.name}: {self._request.name} was delivered before it was computed")
        if any(block in rank.heirs for block in self._occupied):
            self._world.fail(f"{rank.name}: {self._request.name} was delivered into blocks on offer: {self._occupied}")
        self._note_released()
        self._look(rank, "was delivered")
        await asyncio.sleep(self._world.delay(self._request.plan.keep_s))
        self._look(rank, "was changed after its delivery")
        return "completed"

    async def _pull(self, rank: Rank, face: Face, ticket: Ticket) -> None:
        """Pull on one rank, and check that the blocks are free again in time."""
        process = rank.process
        began, stopped_s = process.time(), process.stopped_s
        rank.pulls += 1
        rank.reads[self._request.name] = self._request
        if not self._kept:
            self._renewing += 1
        try:
            await face.pull(ticket, self._block_ids, priority=self._request.plan.priority, name=self.name)
        finally:
            rank.pulls -= 1
            lasted_s = process.time() - began - (process.stopped_s - stopped_s)
            if lasted_s > self.engine.setting.pull_s_max:
                self._world.fail(f"{rank.name}: the blocks of {self.name} were kept for {lasted_s:.3f} s")

    def _note_released(self) -> None:
        """Note that the source is told, by this rank too, that the lease is no longer needed."""
        self._released += 1
        if self._released == len(self.engine.ranks):
            self.released_at = self._world.now

    def _look(self, rank: Rank, when: str) -> None:
        wrong = rank.cache.wrong(self._block_ids, self._request.written)
        if wrong:
            self._world.fail(f"{rank.name}: {self._request.name} {when} wrong: {wrong}")

    def _judge(self, rank: Rank, error: KvflowError) -> None:
        """Check that what was done explains an error."""
        self._world.note(rank.name, "error", self.name, error)
        request, setting = self._request, self.engine.setting
        hosts = [each.process.host for each in request.source.ranks]
        troubles = setting.troubles.between(rank.process.host, hosts)
        if request.waited_for():
            troubles.add("waited")
        if request.plan.stuck and isinstance(error, DeadlineExceeded) and error.phase == "compute":
            troubles.add("unsealed")
        circumstances = Circumstances(
            forged=request.plan.forged,
            occupied=bool(self._occupied),
            crowded=rank.pulls >= PULLS_MAX,
            draining=rank.stage != "open",
            closing=rank.stage == "closing",
            over=request.over(neglected=self._neglected),
            troubles=troubles,
        )
        if not explains(circumstances, error):
            self._world.fail(f"{rank.name}: {self.name} ended with {error!r}, which nothing explains: {circumstances}")
