"""The data plane of one simulated worker: the production ``Owner``, and this module in place of its thread."""

from collections import deque
from collections.abc import Sequence

from kvflow.config import WorkerConfig
from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.testing.fabric import NOBODY, Agent, Fabric, SimulatedMover
from kvflow.testing.memory import SimulatedCache
from kvflow.testing.process import Process
from kvflow.testing.staging import SimulatedStaging, blocks_of_units
from kvflow.testing.world import Event
from kvflow.transport.base import (
    Fence,
    PeerAddress,
    Program,
    Published,
    Read,
    ReadCompleted,
    ReadFailed,
    RenewalEnded,
    Sink,
    StagingUse,
    Transport,
    TransportEvent,
)
from kvflow.transport.bounds import Rows, check_rows
from kvflow.transport.owner import CancelReads, Command, Look, Owner, RemovePeer, RenewReader
from kvflow.transport.serving import SERVES_NOTHING, Serving
from kvflow.worker.surroundings import OpenTransport

NAME = "simulated"

RENEWAL_POLL_S = 50e-3
"""How often the owner thread looks whether a renewal of its reader is due: seldom, compared to a real one."""


def opener(fabric: Fabric, process: Process, cache: SimulatedCache, owners: list[int]) -> OpenTransport:
    """Return what makes the transport of one worker.

    Args:
        fabric: between all workers.
        process: whose it is.
        cache: what it reads into.
        owners: for each block, the number of the pull that may write into it, or ``NOBODY``.
    """

    def open_transport(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
        del config  # of which only real data planes have settings
        return SimulatedTransport(
            fabric, agent_name, sink, process=process, cache=cache, owners=owners, staging_bytes=staging_bytes
        )

    return open_transport


class SimulatedTransport:
    """The data plane of one simulated worker. See ``kvflow.transport.base.Transport`` for the contract.

    The production ``Owner`` decides everything; this class is its thread.
    """

    def __init__(
        self,
        fabric: Fabric,
        agent_name: str,
        sink: Sink,
        *,
        process: Process,
        cache: SimulatedCache,
        owners: list[int],
        staging_bytes: int,
    ) -> None:
        self._fabric = fabric
        self._world = fabric.world
        self._process = process
        self._cache = cache
        self._owners = owners
        self._agent_name = agent_name
        self._sink = sink
        self._commands: deque[Command] = deque()
        self._started: list[tuple[Owner, Agent]] = []  # one after start
        self._step: Event | None = None
        self._closed = False
        self._aims: dict[int, dict[int, int]] = {}
        self._targets: dict[int, Rows | tuple[int, int, int]] = {}
        self._staging = SimulatedStaging(staging_bytes, cache, self._check_scatter)
        self._renewing = False

    @property
    def name(self) -> str:
        """``simulated``."""
        return NAME

    def start(self, regions: Sequence[Region], epochs: Region, serving: Serving = SERVES_NOTHING) -> None:
        """See ``Transport.start``."""
        agent = Agent(self._agent_name, self._process, self._cache, epochs, serving)
        self._fabric.agents[agent.name] = agent
        mover = SimulatedMover(self._fabric, agent, self, self._staging)
        owner = Owner(mover, regions, self._report, self._process.time, self._staging)
        self._started.append((owner, agent))

    def published(self) -> Published:
        """See ``Transport.published``."""
        return Published(planes={NAME: self._agent_name.encode()})

    def add_peer(self, address: PeerAddress) -> None:
        """See ``Transport.add_peer``."""
        self._command(address)

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """See ``Transport.remove_peer``."""
        self._command(RemovePeer(peer, gone))

    def prepare(self, program: Program) -> None:
        """See ``Transport.prepare``."""
        # What is staged is read into a buffer, and its descriptors say nothing of our blocks.
        staged = program.scatter
        self._targets[program.program_id] = check_rows(program.target_rows) if staged is None else staged.units
        self._command(program)

    def post(self, read: Read) -> None:
        """See ``Transport.post``."""
        self._world.note(self._process.name, "posted", read.read_id, len(read.source_index), len(read.fences))
        target, index = self._targets[read.program_id], read.target_index
        blocks = blocks_of_units(target, index) if isinstance(target, tuple) else self._cache.blocks_of(target, index)
        self._aims[read.read_id] = {block: self._owners[block] for block in blocks}
        self._command(read)

    def look(self, peer: PeerId, fence: Fence) -> None:
        """See ``Transport.look``."""
        self._world.note(self._process.name, "looked", peer, fence.slot)
        self._command(Look(peer, fence))

    def cancel(self, read_ids: Sequence[int]) -> None:
        """See ``Transport.cancel``."""
        self._world.note(self._process.name, "cancelled", *read_ids)
        self._command(CancelReads(tuple(read_ids)))

    def staging(self) -> StagingUse:
        """See ``Transport.staging``."""
        return self._staging.use

    def renew_reader(self) -> None:
        """See ``Transport.renew_reader``."""
        self._renewing = True
        self._command(RenewReader())

    def close(self) -> None:
        """See ``Transport.close``. It is called as a thread's work, so that what is in flight has had its grace."""
        self._closed = True
        for owner, agent in self._started:
            while self._commands:  # what was posted before is refused, and not forgotten
                owner.handle(self._commands.popleft())
            owner.begin_close()
            owner.end_close()
            if not agent.closed:
                self._world.fail(f"{agent.name} was closed, but its agent was not destroyed")
        self._started.clear()

    def wake(self) -> None:
        """Let the owner take its next step when its thread gets to it."""
        if self._step is None:
            self._step = self._world.after(self._world.delay(self._fabric.faults.step_s), self._take_step)

    def check_write(self, read_id: int, blocks: Sequence[int]) -> None:
        """Check that every block which is written to belongs to the pull that its read was posted for."""
        aims = self._aims.get(read_id)
        if aims is None:
            self._world.fail(f"{self._process.name}: read {read_id} is over, and writes")
            return
        for block in blocks:
            owner = aims.get(block, NOBODY)
            if owner == NOBODY or self._owners[block] != owner:
                now = self._owners[block] or "nobody"
                self._world.fail(
                    f"{self._process.name}: read {read_id} for pull {owner} writes into block {block}, which is {now}'s"
                )

    def _check_scatter(self, blocks: Sequence[int]) -> None:
        """Check that every block that a buffer is scattered to belongs to the pull that some open read is for."""
        for block in blocks:
            owner = self._owners[block]
            if owner == NOBODY or all(aims.get(block) != owner for aims in self._aims.values()):
                self._world.fail(f"{self._process.name}: a buffer is scattered into block {block}, which is {owner}'s")

    def _command(self, command: Command) -> None:
        if not self._closed:
            self._commands.append(command)
            self.wake()

    def _take_step(self) -> None:
        self._step = None
        if self._closed or not self._process.alive:
            return
        if not self._process.running:
            self._process.postpone(self.wake)
            return
        for owner, _ in self._started:
            stepped = owner.step()
            while self._commands:
                command = self._commands.popleft()
                owner.handle(command)
                stepped = True
            if stepped:
                self.wake()
            elif self._renewing:  # it waits for what may never land
                self._world.after(RENEWAL_POLL_S, self.wake)

    def _report(self, event: TransportEvent) -> None:
        """Pass an event on; a read that is over must have nothing left that could write."""
        self._world.note(self._process.name, "told", event)
        if isinstance(event, ReadCompleted | ReadFailed):
            for _, agent in self._started:
                if not agent.closed and any(flying.read_id == event.read_id for flying in agent.transfers):
                    self._world.fail(f"{self._process.name}: {event} was told, and its transfer goes on")
            self._aims.pop(event.read_id, None)
        if isinstance(event, RenewalEnded):
            self._renewing = False
        self._sink(event)
