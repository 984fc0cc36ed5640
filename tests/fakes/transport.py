"""The data plane of one simulated worker: the production ``ReadCore``, and this module in place of its thread."""

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from kvflow.config import WorkerConfig
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.planning.bind import Binding as PlanBinding
from kvflow.planning.bind import Bound, StagedBinding
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import (
    CHUNK_BYTES_MAX,
    SERVES_NOTHING,
    TURN_S_MAX,
    CancelReads,
    PairBinder,
    PeerAddress,
    PreparedList,
    Published,
    RankRead,
    ReadEnded,
    ResetDone,
    Serving,
    Sink,
    StagingUse,
    Transport,
    TransportEvent,
)
from kvflow.reads.core import PostReads, ReadCommand, ReadCore, RemovePeer, ResetReader
from kvflow.worker.environment import OpenTransport
from tests.fakes.fabric import NOBODY, Agent, Fabric, SimulatedBackend
from tests.fakes.memory import SimulatedCache
from tests.fakes.process import Process
from tests.fakes.staging import SimulatedStaging
from tests.fakes.world import Event

NAME = "simulated"

RESET_POLL_S = 50e-3
"""How often the read thread looks whether a reset of its reader is due: seldom, compared to a real one."""


def opener(fabric: Fabric, process: Process, cache: SimulatedCache, cores: list[int]) -> OpenTransport:
    """Return what makes the transport of one worker.

    Args:
        fabric: between all workers.
        process: whose it is.
        cache: what it reads into.
        cores: for each block, the number of the pull that may write into it, or ``NOBODY``.
    """

    def open_transport(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
        del config  # of which only real data planes have settings
        return SimulatedTransport(
            fabric, agent_name, sink, process=process, cache=cache, cores=cores, staging_bytes=staging_bytes
        )

    return open_transport


class SimulatedTransport:
    """The data plane of one simulated worker. See ``kvflow.reads.contract.Transport`` for the contract.

    The production ``ReadCore`` decides everything; this class is its thread.
    """

    def __init__(
        self,
        fabric: Fabric,
        agent_name: str,
        sink: Sink,
        *,
        process: Process,
        cache: SimulatedCache,
        cores: list[int],
        staging_bytes: int,
    ) -> None:
        self._fabric = fabric
        self._world = fabric.world
        self._process = process
        self._cache = cache
        self._cores = cores
        self._agent_name = agent_name
        self._sink = sink
        self._commands: deque[ReadCommand] = deque()
        self._started: list[tuple[ReadCore, Agent]] = []  # one after start
        self._step: Event | None = None
        self._closed = False
        self._aims: dict[int, dict[int, int]] = {}
        self._units: dict[int, int] = {}  # prepared list -> units of one of our blocks
        self._staging = SimulatedStaging(staging_bytes, cache, self._check_scatter)
        self._resetting = False

    @property
    def name(self) -> str:
        """``simulated``."""
        return NAME

    def start(self, regions: Sequence[Region], epochs: Region, serving: Serving = SERVES_NOTHING) -> None:
        agent = Agent(self._agent_name, self._process, self._cache, epochs, serving)
        self._fabric.agents[agent.name] = agent
        backend = SimulatedBackend(self._fabric, agent, self, self._staging)
        core = ReadCore(backend, regions, self._report, self._process.time, self._staging)
        self._started.append((core, agent))

    def published(self) -> Published:
        return Published(planes={NAME: self._agent_name.encode()})

    def add_peer(self, address: PeerAddress) -> None:
        self._command(address)

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        self._command(RemovePeer(peer, gone))

    def prepare(self, prepared_list: PreparedList) -> None:
        binding = prepared_list.binding
        assert isinstance(binding, PlanBinding | StagedBinding)
        self._units[prepared_list.list_id] = binding.group.target.per_block
        self._command(replace(prepared_list, binding=SmallChunks(binding, self._fabric.faults.chunk_bytes)))

    def post(self, reads: Sequence[RankRead], within_s: float = TURN_S_MAX / 2) -> list[ReadEnded]:
        """See ``Transport.post``. A share of posts is made at once, if a real transport would make them so."""
        for read in reads:
            self._world.note(self._process.name, "posted", read.read_id, len(read.parts), read.check_first)
            blocks = {unit // self._units[part.list_id] for part in read.parts for unit in part.pairs.target}
            self._aims[read.read_id] = {block: self._cores[block] for block in blocks}
        inline = self._world.happens(self._fabric.faults.inline) and not self._commands and not self._closed
        for core, _ in self._started if inline else ():
            answers = core.post_inline(reads, within_s)
            if answers is not None:
                for ended in answers:
                    self._note_end(ended)
                if len(answers) < len(reads):
                    self.wake()
                return answers
        self._command(PostReads(tuple(reads)))
        return []

    def cancel(self, read_ids: Sequence[int]) -> None:
        self._world.note(self._process.name, "cancelled", *read_ids)
        self._command(CancelReads(tuple(read_ids)))

    def staging(self) -> StagingUse:
        return self._staging.use

    def reset_reader(self) -> None:
        self._resetting = True
        self._command(ResetReader())

    def close(self) -> None:
        """See ``Transport.close``. It is called as a thread's work, so that what is in flight has had its grace."""
        self._closed = True
        for core, agent in self._started:
            while self._commands:  # what was posted before is refused, and not forgotten
                core.handle(self._commands.popleft())
            core.begin_close()
            core.end_close()
            if not agent.closed:
                self._world.fail(f"{agent.name} was closed, but its agent was not destroyed")
        self._started.clear()

    def wake(self) -> None:
        """Let the core take its next step when its thread gets to it."""
        if self._step is None:
            self._step = self._world.later(self._fabric.faults.step_s, self._take_step)

    def check_write(self, read_id: int, blocks: Sequence[int]) -> None:
        """Check that every block which is written to belongs to the pull that its read was posted for."""
        aims = self._aims.get(read_id)
        if aims is None:
            self._world.fail(f"{self._process.name}: read {read_id} is over, and writes")
            return
        for block in blocks:
            core = aims.get(block, NOBODY)
            if core == NOBODY or self._cores[block] != core:
                now = self._cores[block] or "nobody"
                self._world.fail(
                    f"{self._process.name}: read {read_id} for pull {core} writes into block {block}, which is {now}'s"
                )

    def _check_scatter(self, blocks: Sequence[int]) -> None:
        """Check that every block that a buffer is scattered to belongs to the pull that some open read is for."""
        for block in blocks:
            core = self._cores[block]
            if core == NOBODY or all(aims.get(block) != core for aims in self._aims.values()):
                self._world.fail(f"{self._process.name}: a buffer is scattered into block {block}, which is {core}'s")

    def _command(self, command: ReadCommand) -> None:
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
        for core, _ in self._started:
            try:
                stepped = core.step()
                while self._commands:
                    core.handle(self._commands.popleft())
                    stepped = True
            except Exception as error:  # noqa: BLE001 - it would end a real read thread
                self._world.fail(error)
                return
            if stepped:
                self.wake()
            elif self._resetting:  # it waits for what may never arrive
                self._world.after(RESET_POLL_S, self.wake)

    def _report(self, event: TransportEvent) -> None:
        """Pass an event on."""
        if isinstance(event, ReadEnded):
            self._note_end(event)
        else:
            self._world.note(self._process.name, "told", event)
        if isinstance(event, ResetDone):
            self._resetting = False
        self._sink(event)

    def _note_end(self, ended: ReadEnded) -> None:
        """Check that a read that is over has nothing left that could write, and that it is told once."""
        self._world.note(self._process.name, "told", ended)
        for _, agent in self._started:
            if not agent.closed and any(ended.read_id in dict(flying.writes) for flying in agent.transfers):
                self._world.fail(f"{self._process.name}: {ended} was told, and its transfer goes on")
        if self._aims.pop(ended.read_id, None) is None:
            self._world.fail(f"{self._process.name}: {ended} was told, and its read is over")


class SmallChunks:
    """A binding whose chunks are so small that a read of a small cache has several. See ``PairBinder``.

    Args:
        binding: of the prepared list.
        chunk_bytes: most bytes of one chunk.
    """

    def __init__(self, binding: PairBinder, chunk_bytes: int) -> None:
        self._binding = binding
        self._chunk_bytes = chunk_bytes
        self.unit_bytes = binding.unit_bytes
        # The data plane divides what it takes for one chunk, and for one portion, by this.
        self.read_bytes = binding.read_bytes * (CHUNK_BYTES_MAX // chunk_bytes)
        self.unit_descriptors, self.number = binding.unit_descriptors, binding.number

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        nbytes = min(chunk_bytes, self._chunk_bytes)
        return self._binding.bind(pairs, chunk_bytes=nbytes, chunk_descriptors=chunk_descriptors)
