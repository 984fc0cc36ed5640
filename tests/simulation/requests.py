"""The way of one simulated request: prefilled, offered, routed, pulled by the ranks of other engines, released.

A request ends when every rank that reads it knows how its pull ended, and every lease that was held for it has ended.
"""

import asyncio
import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Struct

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, KvflowError, WorkerClosed
from kvflow.events import LeaseEnded
from kvflow.leases.tickets import MAC_BYTES, Grant, Kind, Ticket, join_tickets
from kvflow.rendezvous.issuer import TicketMint
from tests.fakes.memory import Written
from tests.fakes.world import World
from tests.simulation.engines import SECRET, Engine, Rank
from tests.simulation.faces import Face
from tests.simulation.readings import Reading
from tests.simulation.tickets import damage, forge, grants_of

SLACK_S = 1e-6

TURN_S_MAX = 2e-3
"""A hundred times the mean delay of a turn of a loop: what is done in the next turn is done by then."""

ADMISSION_S = 1.0
"""A reader that waited for an admission may pause for half a second after it, and read again."""

RECYCLE_S = 0.05
"""Time until an engine tries again to end what it keeps, and what may not be kept yet."""

RELEASE_S_MAX = 0.1
"""What a calm release may take: the pause before it is sent, and some messages."""


class Plan(Struct, frozen=True, kw_only=True):
    """What is going to be done with one request.

    Attributes:
        num_tokens: of the prompt.
        admit_s: mean delay of an admission.
        prefix_of: the request whose first blocks it shares, as far as they are still there; or None.
        repeated: whether its second block is its first one again, if it has so many.
        readers: engines that read it.
        readings: pulls of each rank of a reader: more than one is a program that asks again.
        route_s: mean time on the way through the router.
        skipped: blocks at the beginning that the reader has already.
        priority: of the pulls.
        patience_s: how long its offers wait for a free slot; 0 for not at all.
        abandoned: whether an offer that has waited is cancelled in the moment in which its turn comes.
        kept_s: how long a reader keeps the ticket before it pulls; 0 for not at all.
        cancel_s: for the last pull but one of each reader, when it is cancelled; None for never.
        revoke_s: when the lease is revoked; None for never.
        forged: whether the ticket is changed on its way.
        unread: whether the reader gives the ticket back unread.
        occupied: whether the reader wants it in a block, among others, that it has on offer itself.
        keep_s: mean time that a reader uses what it has read.
        keeps: whether its source keeps it for anyone, until ``revoke_s``, instead of offering it.
        sought: whether its readers find it by its content, and get no ticket.
        part_s: mean time in which its source computes a part, if it offers it before it is computed; otherwise 0.
        stuck: whether its source never computes the last part of such an offer.
        errs: whether it also says what cannot be true of it.
    """

    num_tokens: int
    admit_s: float
    prefix_of: "Request | None" = None
    repeated: bool = False
    readers: tuple[int, ...]
    readings: int = 1
    route_s: float
    skipped: int = 0
    priority: int = 0
    patience_s: float = 0.0
    abandoned: bool = False
    kept_s: float = 0.0
    cancel_s: float | None = None
    revoke_s: float | None = None
    forged: bool = False
    unread: bool = False
    occupied: bool = False
    keep_s: float
    keeps: bool = False
    sought: bool = False
    part_s: float = 0.0
    stuck: bool = False
    errs: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of its leases."""
        return "kept" if self.keeps else "open" if self.part_s else "offer"


class Request:
    """One request, as its engines and the router know it.

    Attributes:
        name: its own.
        plan: what is going to be done.
        source: the engine that prefills it.
        outcomes: how each pull ended.
        readings: of each engine that reads it.
        taken: whether a reading of another request, which begins with the same tokens, has found it.
        written: what its source has.
        block_ids: where, group by group.
        blocks: the same in one list.
        computed: how many tokens each rank has, if it offers them before it has computed all.
    """

    def __init__(self, world: World, name: str, plan: Plan, source: Engine, engines: Callable[[int], Engine]) -> None:
        self.name = name
        self.plan = plan
        self.source = source
        self.outcomes: list[str] = []
        self.readings: list[Reading] = []
        self.taken = False
        self.written = Written(np.zeros(0, np.int64), 0, np.zeros(0, np.int64))
        self.block_ids: list[list[int]] = []
        self.blocks: list[int] = []
        self._world = world
        self._engines = engines
        self._unsettled = 0  # ranks of the source that are still to offer it
        self._tickets: dict[str, Ticket] = {}  # by the name of the rank, or of the engine if a mint has signed it
        self._open = 0  # pulls that have not ended
        self._settled_at = 0.0
        self._untold = 0  # ranks of the source that wait for the end of the lease
        self._routed = False
        self._revoked = False
        self._gave_back: dict[str, set[int]] = {}
        self._ended: dict[str, str] = {}  # how its lease has ended, by rank
        self._num_shared = 0  # tokens whose blocks an earlier request has written
        self.computed: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}  # offers that wait for a slot, by rank

    def idle(self) -> bool:
        """Tell whether nothing is left to be done but what a host that hangs has to do."""
        begun = self._routed or self.source.hung or not self.source.alive
        return begun and all(each.over or each.engine.hung for each in self.readings)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be done, held or waited for."""
        held = self._unsettled or self._untold or any(self.name in rank.held for rank in self.source.ranks)
        held = held and self.source.alive
        return not held and not self._open and (self._routed or not self.source.alive)

    def begin(self) -> None:
        """Prefill it: claim blocks, then write and offer it on every rank."""
        source, plan = self.source, self.plan
        if not source.open:
            self._refuse("source not open")
            return
        if not self._claim():
            self._refuse("no blocks")
            return
        for rank in source.ranks:
            for block in self.blocks:
                rank.uses[block] += 1
        self._unsettled = len(source.ranks)
        grant = self._mint() if source.minted else None
        if source.minted and grant is None:
            return
        for rank in source.ranks:
            self._on(rank, self._world.delay(plan.admit_s) if grant else 0.0, self._offer_on, rank, grant)
        if grant is not None:
            self._route()
        if plan.revoke_s is not None:
            for rank in source.ranks:
                self._on(rank, plan.revoke_s, self._recycle if plan.keeps else self._revoke, rank)

    def is_computed(self, rank: Rank) -> bool:
        """Tell whether a rank has all of it, and has said so."""
        return not self.plan.part_s or self.computed.get(rank.name) == self.plan.num_tokens

    def digests(self) -> list[list[bytes]]:
        """Return a digest for each block that covers all tokens up to its end."""
        last, found = self.plan.num_tokens, []
        for group, ids in zip(self.source.groups, self.block_ids, strict=True):
            size = last if group.kind == "mamba" else group.block_size
            ends = [min(last, size * (at + 1)) for at in range(len(ids))]
            found.append([blake2b(self.written.tokens[:end].tobytes(), digest_size=16).digest() for end in ends])
        return found

    def wrong_end(self, rank: Rank, event: LeaseEnded, since: float, stopped_s: float) -> str:
        """Say what is wrong with the end of a lease, or nothing.

        Args:
            rank: where it was held.
            event: how it ended.
            since: when it was admitted, on the rank's clock.
            stopped_s: how long the rank was stopped meanwhile.
        """
        now = rank.process.time()
        match event.outcome:
            case "expired":
                promised = max(since + rank.engine.setting.settings.lease_s, self._promised(rank))
                if now < promised - SLACK_S:
                    return f"{promised - now:.6f} s before the time that its readers were told"
                # It lasts longer while a question waits.
                if now > promised + TURN_S_MAX and not stopped_s and self.is_computed(rank):
                    return f"{now - promised:.6f} s after its time"
                if rank.engine.setting.calm:
                    return self._missed()
            case "released" if not any(self._released_by(name) for name in self._gave_back):
                return f"no reader has given it back on every rank: {self._gave_back}"
            # An offer that waited is taken back by the worker itself if its turn and the end of its time come together.
            case "revoked" if not self._revoked and rank.worker is not None and not self._unsettled:
                return "" if self.plan.keeps and self._lost_slot(rank, since) else "nobody has revoked it"
        return ""

    def _lost_slot(self, rank: Rank, since: float) -> bool:
        """Tell whether what is kept had to end: the oldest for want of a slot, or all when the engine drains."""
        if self._forgotten():
            return True
        older = any(request.plan.keeps and began < since for request, began, _ in rank.held.values())
        return rank.stage != "open" or (rank.full and not older)

    def on_admitted(self, rank: Rank) -> None:
        """Cancel the offer that has just had its turn, before its caller knows, if the plan is so."""
        task = self._waiting.get(rank.name)
        if task is not None and self.plan.abandoned:
            rank.process.call_soon(task.cancel)

    def on_lease_ended(self, rank: Rank, outcome: str) -> None:
        """Reuse the blocks of a lease that has ended: on its rank at once, and for all when it was the last."""
        rank.drop_use(self.blocks)
        self._ended[rank.name] = outcome
        self._settle()

    def _promised(self, rank: Rank) -> float:
        """Return until when a reader was told that the lease lasts; 0 if none was."""
        ticket = self._tickets.get(rank.name) or self._tickets.get(self.source.name)
        if ticket is None:
            return 0.0
        grant = ticket.grants[0]
        promises = rank.engine.setting.fabric.wires.promises
        return promises.get((rank.process.name, grant.slot, grant.epoch), 0.0)

    def _missed(self) -> str:
        """Say which reading has released a lease that has run out all the same; remember who still wanted it.

        What is given back unread waits for another reader, if one may find it by asking.
        """
        now, is_found = self._world.now, self.plan.part_s and (self.plan.sought or len(self.source.ranks) > 1)
        for reading in self.readings:
            was_read = not (reading.unread and is_found)
            if was_read and reading.released_at is not None and now > reading.released_at + RELEASE_S_MAX:
                return f"{reading.name} has given it back {now - reading.released_at:.3f} s ago"
            reading.note_expiry()
        return ""

    def _claim(self) -> bool:
        """Claim blocks, and say what will be written into them; False if there are too few."""
        source, plan = self.source, self.plan
        counts = [1 if group.kind == "mamba" else -(-plan.num_tokens // group.block_size) for group in source.groups]
        size = source.groups[0].block_size
        prefix = self._prefix()
        repeated = plan.repeated and plan.num_tokens >= 2 * size and len(prefix) < 2
        fresh = source.claim(sum(counts) - len(prefix) - repeated)
        if fresh is None:
            return False
        again = [prefix[0] if prefix else fresh[0]] if repeated else []
        source.claim_also(prefix + again)
        first = (prefix or fresh[:1]) + again
        rest = fresh if prefix else fresh[1:]
        blocks = [*first, *rest]
        self.block_ids = [[blocks.pop(0) for _ in range(number)] for number in counts]
        self.blocks = [block for ids in self.block_ids for block in ids]
        content = source.setting.content
        tokens, places = np.full(plan.num_tokens, content(), np.int64), np.arange(plan.num_tokens)
        if prefix and plan.prefix_of is not None:
            shared = self._num_shared = len(prefix) * size
            tokens[:shared] = plan.prefix_of.written.tokens[:shared]
            places[:shared] = plan.prefix_of.written.places[:shared]
        if repeated:
            tokens[size : 2 * size] = tokens[:size]
            places[size : 2 * size] = places[:size]
        self.written = Written(tokens, content(), places)
        return True

    def _prefix(self) -> list[int]:
        """Return the blocks that it shares with an earlier request, if those are safe on every rank."""
        earlier = self.plan.prefix_of
        if earlier is None or earlier.source is not self.source or not earlier.block_ids:
            return []
        if not all(earlier.name in rank.held for rank in self.source.ranks):
            return []
        there = earlier.plan.num_tokens
        if earlier.plan.part_s:
            there = min(earlier.computed.get(rank.name, 0) for rank in self.source.ranks)
        whole = min(there, self.plan.num_tokens - 1) // self.source.groups[0].block_size
        shared = earlier.block_ids[0][:whole]
        if self.plan.part_s and len(set(shared)) < len(shared):
            return []  # a block is told once
        # What a pull waits for to be free again is shared by nobody else.
        return [] if any(block in rank.heirs for block in shared for rank in self.source.ranks) else shared

    def _mint(self) -> Grant | None:
        source = self.source
        mint = source.mint(self._make_mint)
        try:
            named = {"block_ids": self.block_ids, "num_tokens": self.plan.num_tokens}
            if self.plan.keeps:
                ticket, grant = mint.keep(self.name, **named, digests=self.digests())
            elif self.plan.part_s:
                named["block_ids"] = [[] for _ in self.block_ids]
                ticket, grant = mint.offer_progressive(self.name, **named, digests=self.digests())
            else:
                ticket, grant = mint.offer(self.name, **named)
        except CapacityExceeded as error:
            if len(source.minted_for) < mint.slots:
                self._world.fail(f"{source.name}: {len(source.minted_for)} of {mint.slots} slots are taken: {error}")
            if any(request.plan.keeps for request in source.minted_for.values()):
                self._world.fail(f"{source.name}: something is kept, and {self.name} ended with {error}")
            self._withdraw("mint full")
            return None
        source.minted_for[self.name] = self
        if len(source.minted_for) > mint.slots:  # it has the slot of the oldest that is kept
            del source.minted_for[next(name for name, each in source.minted_for.items() if each.plan.keeps)]
        self._tickets[source.name] = ticket
        return grant

    def _make_mint(self) -> TicketMint:
        return TicketMint(
            self.source.name,
            [rank.worker.rank_address for rank in self.source.ranks if rank.worker is not None],
            cluster_secret=SECRET,
            lease_s=self.source.setting.settings.lease_s,
            draw_bits=self._world.chance.getrandbits,
            block_sizes=[0 if group.kind == "mamba" else group.block_size for group in self.source.groups],
            wall_clock=self.source.ranks[0].process.wall,  # the engine's scheduler runs beside its first rank
        )

    def _on(self, rank: Rank, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Do something in the process of a rank, some time from now."""
        self._world.after(delay_s, rank.process.call_soon, call, *arguments)

    def _offer_on(self, rank: Rank, grant: Grant | None) -> None:
        """Offer it on one rank, or admit what the mint has signed."""
        task = rank.process.create_task(self._drive(rank, grant), name=f"drive offer of {self.name}")
        if grant is None and self.plan.patience_s and rank.full:
            self._waiting[rank.name] = task

    async def _drive(self, rank: Rank, grant: Grant | None) -> None:
        face = rank.face
        rank.offered[self.name] = self
        try:
            if face is None:
                raise WorkerClosed("not open")
            self._write(rank)
            if grant is not None:
                face.admit(grant, None if self.plan.kind == "offer" else self.digests())
            else:
                self._tickets[rank.name] = await self._offer(rank, face)
            self._untold += 1
            for name, task in {"end": self._hear_end(rank, face), "rest": self._compute(rank, face)}.items():
                rank.process.create_task(task, name=f"drive {name} of {self.name}")
        except (CapacityExceeded, WorkerClosed, BlockIdsInvalid) as error:
            self._refused(rank, grant, error)
        except asyncio.CancelledError:
            if not rank.engine.alive:
                return
            await self._abandon(rank)
        except Exception as error:  # noqa: BLE001 - whatever else it is, the call was right
            self._world.fail(error)
        self._waiting.pop(rank.name, None)
        self._unsettled -= 1
        self._settle()
        if not self._unsettled and grant is None:
            if len(self._tickets) == len(self.source.ranks):
                self._route()
            else:
                self._refuse("lease table full")
                for other in self.source.ranks:
                    self._on(other, 0.0, self._revoke, other)

    async def _offer(self, rank: Rank, face: Face) -> Ticket:
        patience_s = self.plan.patience_s
        if self.plan.keeps:
            return face.keep(self.name, self.block_ids, self.plan.num_tokens, self.digests())
        if self.plan.part_s:
            nothing: list[list[int]] = [[] for _ in self.block_ids]
            return face.offer_progressive(self.name, nothing, self.plan.num_tokens, self.digests())
        if not patience_s:
            return face.offer(self.name, self.block_ids, self.plan.num_tokens)
        rank.waiting += 1
        try:
            return await face.offer_when_possible(self.name, self.block_ids, self.plan.num_tokens, patience_s)
        finally:
            rank.waiting -= 1

    def _write(self, rank: Rank) -> None:
        """Write it, unless it is offered before that."""
        # Not before: the ticket of a mint may be out by now, and whoever reads too early must find other bytes.
        if not self.plan.part_s:
            rank.cache.write(self.block_ids, self.written)

    async def _compute(self, rank: Rank, face: Face) -> None:
        """Write part after part, and say what has settled; blocks are told a part before they are written."""
        total, told = self.plan.num_tokens, [0] * len(self.block_ids)
        end = self._num_shared if self.plan.part_s else total
        while end < total:
            await asyncio.sleep(self._world.delay(self.plan.part_s))
            if rank.face is not face or self.name not in rank.held:
                return  # its lease has ended, so its blocks are not its own
            begin, end = end, min(total, end + self._world.chance.randint(1, 16))
            if self.plan.stuck and end == total:
                return
            self.computed[rank.name] = end
            done = Written(self.written.tokens[:end], self.written.state, self.written.places[:end])
            ahead = self._num_blocks(total if end == total else min(total - 1, end + 8))
            whole = [begin // group.block_size if group.kind == "full" else 0 for group in self.source.groups]
            rank.cache.write(
                [
                    [-1] * min(first, last) + ids[first:last]
                    for ids, first, last in zip(self.block_ids, whole, self._num_blocks(end), strict=True)
                ],
                done,
            )
            rank.held[self.name] = (self, rank.process.time(), rank.process.stopped_s)
            try:
                lists = [ids[first:last] for ids, first, last in zip(self.block_ids, told, ahead, strict=True)]
                if end < total:
                    face.advance(self.name, end, lists)
                else:
                    face.seal(self.name, lists)
            except KvflowError as error:
                self._world.fail(f"{rank.name}: {self.name} could not be told: {error!r}")
            told = ahead
            if self.plan.errs:
                self._err(face, end)

    def _err(self, face: Face, end: int) -> None:
        """Say what cannot be true once so many tokens have settled; it must be refused, and change nothing."""
        total, nothing = self.plan.num_tokens, [[] for _ in self.block_ids]
        again = [self.block_ids[0][:1], *nothing[1:]]
        false: list[Callable[[], None]] = [
            lambda: face.advance(self.name, end - 1, nothing),
            lambda: face.advance(self.name, total + 1, nothing),
            lambda: face.advance(self.name, end, again),
            lambda: face.seal(self.name, again),
        ]
        if end == total:
            false += [lambda: face.advance(self.name, total, nothing), lambda: face.seal(self.name, nothing)]
        for number, call in enumerate(false):
            try:
                call()
            except BlockIdsInvalid:
                continue
            self._world.fail(f"{self.name}: falsehood {number} was not refused after {end} of {total} tokens")

    def _num_blocks(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group so many tokens have; before the last one, only of full attention."""
        return [
            len(ids)
            if num_tokens == self.plan.num_tokens
            else -(-num_tokens // group.block_size)
            if group.kind == "full"
            else 0
            for group, ids in zip(self.source.groups, self.block_ids, strict=True)
        ]

    def _refused(self, rank: Rank, grant: Grant | None, error: KvflowError) -> None:
        """Check that an offer was rightly refused, and need its blocks no more."""
        self._world.note(rank.name, "refused", self.name, error.code)
        forgotten = self._forgotten()
        if isinstance(error, BlockIdsInvalid) and not forgotten:
            self._world.fail(error)
        elif isinstance(error, CapacityExceeded):
            if grant is not None and not forgotten:
                self._world.fail(f"{rank.name}: the mint's slot {grant.slot} is not free: {error}")
            roomy = not rank.full and rank.process.time() > rank.roomy_since + TURN_S_MAX
            if roomy and (self.plan.patience_s or not rank.waiting):
                self._world.fail(f"{rank.name}: {len(rank.held)} leases are held, and {self.name} ended with {error}")
        elif not forgotten and rank.stage == "open" and rank.face is not None:
            self._world.fail(f"{rank.name} is open, and {self.name} ended with {error}")
        self._give_up(rank)

    async def _abandon(self, rank: Rank) -> None:
        """Check that nothing is on offer after an offer was cancelled, and need its blocks no more."""
        await asyncio.sleep(TURN_S_MAX)  # an engine of threads hears of it before its worker does
        if self.name in rank.held:
            self._world.fail(f"{rank.name}: the offer of {self.name} was cancelled, and is held")
        self._world.note(rank.name, "abandoned", self.name)
        self._give_up(rank)

    async def _hear_end(self, rank: Rank, face: Face) -> None:
        """Wait for the end of the lease, as an engine does, and check what it is told."""
        try:
            outcome = await face.wait_offer(self.name)
        except WorkerClosed:
            return
        finally:
            self._untold -= 1
        ended = self._ended.get(rank.name, "")
        if outcome != ended:
            self._world.fail(f"{rank.name}: the lease of {self.name} was {ended or 'held'}, and {outcome} was told")

    def _give_up(self, rank: Rank) -> None:
        """Need the blocks no more on a rank that does not hold the lease, or holds it no more."""
        if rank.name not in self._ended:
            rank.drop_use(self.blocks)
            self._ended[rank.name] = "refused"

    def _recycle(self, rank: Rank) -> None:
        """Want the blocks of what is kept for something else, as soon as it is kept."""
        if rank.name not in self._ended and self.source.alive:
            self._revoke(rank)
            self._on(rank, RECYCLE_S, self._recycle, rank)

    def _revoke(self, rank: Rank) -> None:
        if rank.face is not None:
            self._revoked = True
            rank.face.revoke(self.name)

    def _settle(self) -> None:
        """Give the blocks back when no rank needs them any more, and the mint its slot."""
        source = self.source
        if not self._unsettled and not self._settled_at:
            self._settled_at = self._world.now
        if not self._unsettled and not any(self.name in rank.held for rank in source.ranks):
            source.give_back(self.blocks)
            if source.minted:
                source.minted_for.pop(self.name, None)
                source.mint(self._make_mint).retire(self.name)

    def _withdraw(self, reason: str) -> None:
        for rank in self.source.ranks:
            rank.drop_use(self.blocks)
        self._unsettled = 0
        self.source.give_back(self.blocks)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._world.note(self.name, "refused", reason)
        self.outcomes.append("refused")
        self._routed = True

    def _route(self) -> None:
        self._world.later(self.plan.route_s, self._arrive)

    def _arrive(self) -> None:
        """Let the ticket arrive at its readers, as JSON."""
        self._routed = True
        params = json.loads(json.dumps(join_tickets(list(self._tickets.values())).to_params()))
        if self.plan.forged:
            params = _forged(params, self._world)
        for number in self.plan.readers:
            engine = self._engines(number)
            if engine.open:
                for reading in range(self.plan.readings):
                    self.readings.append(Reading(self._world, self, engine, params, reading))
                    self.readings[-1].begin()
            else:
                self.outcomes.append("reader not open")

    def begun(self) -> None:
        """Note that a pull is open."""
        self._open += 1

    def closed(self, outcome: str) -> None:
        """Note how a pull ended."""
        self._open -= 1
        self.outcomes.append(outcome)

    def gave_back(self, rank: Rank) -> None:
        """Note that one rank of a reader has told the source that it needs the lease no more."""
        self._gave_back.setdefault(rank.engine.name, set()).add(rank.rank)

    def over(self, *, neglected: bool) -> bool:
        """Tell whether its lease has ended somewhere, or was never given, or its source's life is over.

        Args:
            neglected: whether it ran out although it was to be renewed, which is no excuse.
        """
        source = self.source
        ended = any(outcome != "expired" or not neglected for outcome in self._ended.values())
        closing = any(rank.stage == "closing" for rank in source.ranks)
        return ended or not source.alive or closing or self._forgotten()

    def _forgotten(self) -> bool:
        """Tell whether the mint has given its slot to another, perhaps before a rank has admitted it."""
        return bool(self.plan.keeps and self.source.minted and self.name not in self.source.minted_for)

    def waited_for(self) -> bool:
        """Tell whether a rank of the source has not admitted it, or had not until a moment ago."""
        return not self._settled_at or self._world.now < self._settled_at + ADMISSION_S

    def _released_by(self, name: str) -> bool:
        ranks = self._gave_back[name]
        return any(
            engine.name == name and len(ranks) == engine.shape.num_ranks
            for engine in map(self._engines, self.plan.readers)
        )


def _forged(params: dict[str, Any], world: World) -> dict[str, Any]:
    """Return parameters with one field of one grant changed, or its MAC; all of it is signed."""

    def change(grant: dict[str, Any]) -> None:
        match kind:
            case 0:
                grant["slot"] += 1
            case 1:
                grant["epoch"] += 2
            case _:
                grant["lease_ms"] += 1000

    which = world.chance.randrange(len(grants_of(params)))
    kind = world.chance.randrange(4)
    if kind == 3:
        return damage(params, lambda signed: bytes(MAC_BYTES) + signed[MAC_BYTES:], grant=which)
    return forge(params, change, grant=which)
