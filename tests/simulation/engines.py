"""Simulated engines: ranks with real workers, a pool of blocks that all ranks share, and books of who owns which block.

The engine knows nothing of kvflow's own accounts. It believes only what the public face tells it, reuses a block in
the very moment in which it may, and overwrites it at once, so that whoever still uses it is seen.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from kvflow.events import Event, LeaseEnded, OfferAdmitted, ReaderReset, TransferCompleted
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.environment import Environment
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import open_calls
from kvflow.worker.worker import Worker
from tests.fakes.fabric import NOBODY, Fabric
from tests.fakes.memory import CONTENTS_MAX, SimulatedCache
from tests.fakes.models import NUM_BLOCKS, Shape, plan_of
from tests.fakes.network import SimulatedNetwork
from tests.fakes.process import OUR_TASKS, Process
from tests.fakes.staging import STAGE_ALL, STAGING_BYTES, PlansAt
from tests.fakes.transport import opener
from tests.fakes.troubles import Troubles
from tests.fakes.world import World
from tests.helpers.settings import flat_config
from tests.simulation.faces import AsyncFace, Face, ThreadedFace

if TYPE_CHECKING:
    from tests.simulation.requests import Request

SECRET = "the secret of a simulated cluster"
PORT = 5000

PLANS = PlansAt(STAGE_ALL, plans_max=100_000)
"""Plans of all scenarios: a plan depends on nothing but the two layouts."""

PULLS_MAX = 64
"""Of one worker, so that it refuses one now and then."""


class Settings(Struct, frozen=True, kw_only=True):
    """What every worker of a scenario is told. See ``WorkerConfig``."""

    lease_s: float
    lease_slots: int
    unread_s: float
    connect_s: float
    handshake_s: float
    queue_s: float
    wire_s: float
    fence_s: float
    compute_s: float
    follow_bytes_min: int
    quarantine_s_max: float
    quarantine_bytes_max: int


class Setting(Struct, frozen=True):
    """What every engine of a scenario lives in.

    Attributes:
        world: whose time it is.
        fabric: between all workers.
        settings: of every worker.
        calm: whether nothing goes wrong but what callers do.
        skew_s: how far wall clocks are apart.
        hang_up_s: mean time until the kernel hangs up for a process that was killed.
        pull_s_max: seconds after which every pull has ended and nothing writes into its blocks.
        contents: numbers of contents.
        pulls: numbers of pulls.
    """

    world: World
    fabric: Fabric
    settings: Settings
    calm: bool
    skew_s: float
    hang_up_s: float
    pull_s_max: float
    contents: "count[int]"
    pulls: "count[int]"

    @property
    def troubles(self) -> Troubles:
        """What was done to hosts and between them."""
        return self.fabric.wires.troubles

    def content(self) -> int:
        """Return the number of a new content."""
        return next(self.contents) % CONTENTS_MAX


class Rank:
    """One rank in one life: a process, its memory, and its worker.

    Attributes:
        engine: whose rank.
        rank: its number.
        process: that it runs in.
        cache: its memory.
        owners: for each block, the number of the pull that may write into it.
        uses: for each block, how many requests on offer need what it holds.
        offered: requests that are to be held here.
        reads: requests that were pulled here.
        held: those whose lease is held, and since when, on its clock and without the time that it was stopped.
        worker: while it is open.
        face: what the engine calls, while it is open.
        waiting: offers that wait for a free slot.
        roomy_since: when a slot was free after all had been taken, on its clock.
        pulls: how many are open.
        heirs: for blocks that are on offer, the pull that has them next.
        stage: how far its life has come.
        left: whether it has closed.
    """

    def __init__(self, engine: "Engine", rank: int, address: int) -> None:
        world = engine.setting.world
        self.engine = engine
        self.rank = rank
        self.name = f"{engine.name}.{engine.life}/{rank}"
        began_s, skew_s = 1000.0 * world.chance.random(), world.chance.gauss(0.0, engine.setting.skew_s)
        host = engine.host(rank)
        # What the interface of a loop has besides, no worker asks for.
        self.process = Process(world, self.name, host, began_s=began_s, skew_s=skew_s)  # type: ignore[abstract]
        self.cache = SimulatedCache(engine.shape, rank, address)
        self.owners = [NOBODY] * NUM_BLOCKS
        self.uses = [0] * NUM_BLOCKS
        self.offered: dict[str, Request] = {}
        self.reads: dict[str, Request] = {}
        self.held: dict[str, tuple[Request, float, float]] = {}
        self.worker: Worker | None = None
        self.face: Face | None = None
        self.waiting = 0
        self.roomy_since = 0.0
        self.pulls = 0
        self.heirs: dict[int, int] = {}
        self.stage: Literal["open", "draining", "closing"] = "open"
        self.left = False
        self._leaving: asyncio.Future[float] = self.process.create_future()
        self._world = world
        self.process.create_task(self._live(), name=f"life of {self.name}")

    @property
    def endpoint(self) -> str:
        """Where it listens: the same in every life."""
        return f"tcp://{self.process.host}:{PORT}"

    @property
    def full(self) -> bool:
        """Whether no slot of its lease table is free."""
        return len(self.held) >= self.engine.setting.settings.lease_slots

    def leave(self, drain_s: float) -> None:
        """Close the worker in peace, after it has drained for so long at most."""
        if not self._leaving.done():
            self._leaving.set_result(drain_s)

    def own(self, blocks: list[int], pull: int) -> None:
        """Let a pull write into blocks; until then they hold something that nobody asked for."""
        self.cache.overwrite(blocks, self.engine.setting.content())
        for block in blocks:
            if self.owners[block] != NOBODY or self.uses[block]:
                self._world.fail(f"{self.name}: the books give block {block} away twice")
            self.owners[block] = pull

    def inherit(self, block: int, pull: int) -> None:
        """Let a pull write into a block that is on offer, as soon as it is not, and no sooner."""
        self.heirs[block] = pull

    def disown(self, blocks: list[int]) -> None:
        """Let nothing write into blocks any more."""
        for block in blocks:
            self.owners[block] = NOBODY
            self.heirs.pop(block, None)

    def drop_use(self, blocks: list[int]) -> None:
        """Note that a request needs blocks no more; whatever nobody needs is overwritten at once."""
        unused = []
        for block in blocks:
            self.uses[block] -= 1
            if not self.uses[block]:
                unused.append(block)
                self.owners[block] = self.heirs.pop(block, NOBODY)
        if unused:
            self.cache.overwrite(unused, self.engine.setting.content())

    async def _live(self) -> None:
        engine = self.engine
        settings = engine.setting.settings
        config = flat_config(
            engine_id=engine.name,
            rank=self.rank,
            num_ranks=engine.shape.num_ranks,
            bind=self.endpoint,
            cluster_secret=SECRET,
            **msgspec.structs.asdict(settings),
        )
        fabric = engine.setting.fabric
        environment = Environment(
            clock=self.process.time,
            network=SimulatedNetwork(fabric.wires, self.process),
            open_transport=opener(fabric, self.process, self.cache, self.owners),
            draw_bits=self._world.chance.getrandbits,
            pulls_max=PULLS_MAX,
            make_plans=lambda: PLANS,
            staging=lambda _config, _manifest: STAGING_BYTES if engine.staged else 0,
        )
        try:
            async with open_calls(self.process) as calls:
                threaded = ThreadedFace(self._world, self.process, calls)
                hooks = (self._on_event, threaded.on_event) if engine.threaded else (self._on_event,)
                async with open_worker(config, self.cache, hooks=hooks, environment=environment) as worker:
                    if engine.threaded:
                        threaded.open(worker, config, self.cache)
                    self.worker, self.face = worker, threaded if engine.threaded else AsyncFace(worker)
                    await self._drain(self.face, await self._leaving)
                    self.stage, self.worker, self.face = "closing", None, None
            threaded.close()
            self._check_left(worker)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._world.fail(error)
            raise
        finally:
            self.worker = self.face = None
            self.left = True

    async def _drain(self, face: Face, drain_s: float) -> None:
        """Begin nothing new, and wait for so long at most until nothing is left."""
        self.engine.setting.troubles.note("left", self.process.host)
        if drain_s:
            self.stage = "draining"
            report = await face.drain(drain_s)
            if not report.complete and report.waited_s < drain_s:
                self._world.fail(f"{self.name} has given up draining: {report}")
            if not report.complete and self.engine.setting.calm:
                self._world.fail(f"{self.name} is not drained after {drain_s} s: {report}")

    def _check_left(self, worker: Worker) -> None:
        """Check that a worker that was closed has left nothing behind."""
        left = worker.snapshot()
        if left.leases or left.pulls or left.quarantined or left.staging.in_use:
            self._world.fail(f"{self.name} was closed and left {left}")
        names = [task.get_name() for task in self.process.pending()]
        if any(not name.startswith(OUR_TASKS) for name in names):
            self._world.fail(f"{self.name} was closed and left tasks: {names}")

    def _on_event(self, event: Event) -> None:
        """Take what the worker reports; it may be in the middle of something."""
        self._world.note(self.name, "event", event)
        worker = self.worker
        if worker is not None:
            try:
                worker.check()
            except AssertionError as error:
                self._world.fail(f"{self.name}: {error}")
        match event:
            case OfferAdmitted(request_id=name):
                request = self.offered.pop(name)
                self.held[name] = (request, self.process.time(), self.process.stopped_s)
                request.on_admitted(self)
            case TransferCompleted(request_id=name):
                self.reads[name].gave_back(self)
            case LeaseEnded():
                self._on_lease_ended(event)
            case ReaderReset():
                self.engine.setting.troubles.note("reset", self.process.host)

    def _on_lease_ended(self, event: LeaseEnded) -> None:
        if self.full:
            self.roomy_since = self.process.time()
        request, since, stopped_s = self.held.pop(event.request_id, (None, 0.0, 0.0))
        if request is None:
            self._world.fail(f"{self.name}: a lease ended that is not held: {event}")
            return
        if event.kind != request.plan.kind or (event.kind == "kept" and event.outcome != "revoked"):
            self._world.fail(f"{self.name}: {event}: only its engine ends what is kept")
        if wrong := request.wrong_end(self, event, since, self.process.stopped_s - stopped_s):
            self._world.fail(f"{self.name}: {event}: {wrong}")
        request.on_lease_ended(self, event.outcome)


class Engine:
    """One engine in one life: its ranks, its blocks, and its mint if another process signs for it.

    Attributes:
        name: the same in every life.
        life: number of this life.
        shape: how its ranks hold the model.
        setting: what it lives in.
        ranks: of this life.
        minted: whether a mint in another process signs its tickets, instead of each rank for itself.
        threaded: whether it speaks to its workers from other threads.
        staged: whether its workers stage what they read, where that saves a descriptor.
        alive: whether it was not killed.
        minted_for: requests that a mint has signed a ticket for, and that hold its slot.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        number: int,
        *,
        shape: Shape,
        minted: bool,
        threaded: bool,
        staged: bool,
        life: int = 0,
    ) -> None:
        self.name = name
        self.life = life
        self.shape = shape
        self.setting = setting
        self.minted = minted
        self.threaded = threaded
        self.staged = staged
        self.alive = True
        self.minted_for: dict[str, Request] = {}
        self._number = number
        self._free = list(range(NUM_BLOCKS))
        self._claims = [0] * NUM_BLOCKS
        self.groups = plan_of(shape, 0).groups
        # No two lives share an address: whoever uses an old one is seen.
        self.ranks = [
            Rank(self, rank, ((number * 64 + rank) * 4096 + life + 1) << 32) for rank in range(shape.num_ranks)
        ]
        self._mints: list[TicketMint] = []
        self._when_killed: list[Callable[[], object]] = []

    @property
    def open(self) -> bool:
        """Whether every rank's worker is open."""
        return self.alive and all(rank.worker is not None for rank in self.ranks)

    @property
    def hung(self) -> bool:
        """Whether a rank's host hangs."""
        return any(rank.process.hung for rank in self.ranks)

    def host(self, rank: int) -> str:
        """Return the address of a rank: each has a host of its own."""
        return f"10.0.{self._number}.{rank + 1}"

    def mint(self, make: Callable[[], TicketMint]) -> TicketMint:
        """Return the engine's mint, made when it is first needed."""
        if not self._mints:
            self._mints.append(make())
        return self._mints[0]

    def claim(self, num_blocks: int) -> list[int] | None:
        """Take free blocks, those first that were freed last; None if there are too few."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        self.claim_also(taken)
        return taken

    def claim_also(self, blocks: list[int]) -> None:
        """Claim blocks that are claimed already, as requests with a common prefix do."""
        for block in blocks:
            self._claims[block] += 1

    def on_offer(self) -> list[int]:
        """Return the blocks that every rank has on offer, for any reader, and that nobody waits for."""
        found = set(range(NUM_BLOCKS))
        for rank in self.ranks:
            held = [request for request, _, _ in rank.held.values() if request.is_computed(rank)]
            lent = Counter(block for request in held for block in request.blocks)
            found = {block for block in found if lent[block] and lent[block] == rank.uses[block]} - rank.heirs.keys()
        return sorted(found)

    def give_back(self, blocks: list[int]) -> None:
        """End one claim to each block."""
        for block in blocks:
            self._claims[block] -= 1
            if not self._claims[block]:
                self._free.append(block)

    def unclaimed(self) -> int:
        """Return how many blocks are free."""
        return len(self._free)

    def call_when_killed(self, call: Callable[[], object]) -> None:
        """Have ``call`` told when the engine is killed."""
        self._when_killed.append(call)

    def next_life(self) -> "Engine":
        """Start it anew."""
        return Engine(
            self.setting,
            self.name,
            self._number,
            shape=self.shape,
            minted=self.minted,
            threaded=self.threaded,
            staged=self.staged,
            life=self.life + 1,
        )

    def leave(self, drain_s: float = 0.0) -> None:
        """Close every rank in peace, after each has drained for so long at most."""
        for rank in self.ranks:
            rank.process.call_soon(rank.leave, drain_s)

    def kill(self) -> None:
        """Kill every rank."""
        self.alive = False
        for rank in self.ranks:
            rank.process.kill()
            rank.worker = rank.face = None
            self.setting.troubles.note("killed", rank.process.host)
            self.setting.fabric.kill(rank.process)
            # The kernel closes its sockets when it gets to it: a process with much memory takes a while to be gone.
            world = self.setting.world
            world.later(self.setting.hang_up_s, self.setting.fabric.wires.hang_up, rank.process)
        for call in self._when_killed:
            call()
