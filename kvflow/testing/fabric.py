"""A simulated data plane: the production ``Owner`` and ``Ledger`` over a mover whose bytes take their time.

A read may be done when its post returns, as on shared memory, or fly: then its bytes arrive in pieces, and go on to
arrive after a cancel until the read is over, as they do with a real network card. It may end early with some of its
bytes written. A fence reads its slot somewhere between its post and its end. A peer that was killed is noticed late,
a parted one not before it is joined, a stopped one goes on to be read if the fabric is an RDMA network, and a host that
hangs keeps what is under way for ever.

In a share of the worlds exporters serve, as the TCP data plane has it: a lease that is not held when a piece is copied
gives zeros, and the end of the read tells. In some of these a fence is what reads have told, in others it reads the
slot.

Every write is checked at the moment it happens: the block must still belong to the pull for which the read was posted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.testing.memory import SimulatedCache
from kvflow.testing.process import Process
from kvflow.testing.serving import Answer, Part, Told
from kvflow.testing.staging import SimulatedStaging
from kvflow.testing.wires import Wires
from kvflow.testing.world import World
from kvflow.transport.base import Carrier, Fence, PeerAddress
from kvflow.transport.bounds import OutOfBounds, check_inside, merge
from kvflow.transport.ledger import Chunk
from kvflow.transport.mover import Flight, MoveFailed, Mover, Prepared
from kvflow.transport.serving import LeasedBlocks, ServedProgram, Serving
from kvflow.transport.staging import memory_at

NAME = "simulated"
NOBODY = 0
"""Owner of a block that nothing may write into."""

Serves = Literal["nothing", "reads", "reads and fences"]
"""What exporters do themselves: at ``nothing`` they are read without their help."""


class FabricFaults(Struct, frozen=True, kw_only=True):
    """What the data plane does to reads.

    Attributes:
        step_s: mean pause of the owner thread between two steps.
        at_once: share of reads that are done when their post returns.
        piece_s: mean time from one piece of a read to the next.
        pieces_max: most pieces of one chunk.
        failed: share of chunks and fences that fail on the way.
        noticed_s: mean time until a death is noticed.
        rdma: whether a stopped process can be read, and written to.
    """

    step_s: float = 20e-6
    at_once: float = 0.5
    piece_s: float = 100e-6
    pieces_max: int = 3
    failed: float = 0.0
    noticed_s: float = 10e-3
    rdma: bool = True


class Fabric:
    """The data plane between all processes of a world.

    Attributes:
        faults: what happens to reads from now on.
        world: whose time it is.
        wires: says which hosts are parted.
        serves: what exporters do themselves.
    """

    def __init__(self, world: World, wires: Wires, faults: FabricFaults, serves: Serves = "nothing") -> None:
        self.world = world
        self.wires = wires
        self.faults = faults
        self.serves = serves
        self.agents: dict[str, Agent] = {}

    def kill(self, process: Process) -> None:
        """Note that a process was killed: nothing of it reads, and nothing can be read from it."""
        for agent in self.agents.values():
            if agent.process is process:
                agent.close()

    def reads_from(self, process: Process) -> bool:
        """Tell whether something is being read from a process."""
        return any(transfer.source.process is process for agent in self.agents.values() for transfer in agent.transfers)

    def in_flight(self) -> int:
        """Return how many reads and fences are under way."""
        return sum(len(agent.transfers) for agent in self.agents.values())


class Agent:
    """One exporter and reader.

    Attributes:
        name: unique per incarnation.
        process: whose it is.
        cache: what may be read.
        epochs: likewise.
        serving: what it may serve.
        leased: the blocks of its leases.
        transfers: what it has under way, in order of their posts.
        closed: whether it was destroyed, or its process killed.
    """

    def __init__(self, name: str, process: Process, cache: SimulatedCache, epochs: Region, serving: Serving) -> None:
        self.name = name
        self.process = process
        self.cache = cache
        self.epochs = memory_at(epochs.address, epochs.nbytes).view(np.uint64)
        self.serving = serving
        self.leased = LeasedBlocks(serving)
        self.transfers: dict[_Transfer, None] = {}
        self.closed = False

    def close(self) -> None:
        """End at once: nothing of it writes any more."""
        self.closed = True
        self.transfers.clear()

    def slot(self, number: int) -> int:
        """Read one slot of the epoch table."""
        return int(self.epochs[number])


class _Transfer(Flight):
    """A chunk or a fence on its way.

    Attributes:
        source: whom it reads from.
        read_id: of the chunk, or -1.
        blocks: of ours, which it may write into.
        pieces: what is still to be copied.
        slot: to be read, for a fence.
        staged: whether it is read into a staging buffer.
        answer: of an exporter that serves.
        doomed: pieces after which it fails.
        outcome: when it is over: what ``poll`` returns or raises.
        unheld: see ``Flight``.
    """

    __slots__ = ("answer", "blocks", "doomed", "outcome", "pieces", "read_id", "slot", "source", "staged", "unheld")

    def __init__(
        self,
        source: Agent,
        read_id: int,
        blocks: list[int],
        pieces: list[list[Part]],
        slot: int,
        *,
        staged: bool = False,
        answer: Answer | None = None,
    ) -> None:
        self.source = source
        self.read_id = read_id
        self.blocks = blocks
        self.pieces = pieces
        self.slot = slot
        self.staged = staged
        self.answer = answer
        self.doomed: int | None = None
        self.outcome: int | MoveFailed | None = None
        self.unheld: frozenset[tuple[int, int]] = frozenset()


class OwnerThread(Protocol):
    """What a mover asks of the thread that calls it."""

    def check_write(self, read_id: int, blocks: Sequence[int]) -> None:
        """Check that every block which is written to belongs to the pull that its read was posted for."""
        ...

    def wake(self) -> None:
        """Take a step soon: something has ended."""
        ...


class SimulatedMover(Mover):
    """Move bytes between the processes of a world. See ``kvflow.transport.mover.Mover`` for the contract."""

    def __init__(self, fabric: Fabric, agent: Agent, thread: OwnerThread, staging: SimulatedStaging) -> None:
        self._fabric = fabric
        self._world = fabric.world
        self._agent = agent
        self._thread = thread
        self._staging = staging
        self._peers: dict[PeerId, Agent] = {}
        self._programs: dict[tuple[PeerId, int], Prepared] = {}
        self._served: dict[tuple[PeerId, int], ServedProgram] = {}
        self._told = Told()

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Mover.add``. Whether the peer answers shows when it is read from."""
        name = address.planes[NAME].decode()
        source = self._fabric.agents.get(name)
        if source is None:
            raise MoveFailed("metadata_invalid", f"there never was an agent {name!r}")
        self._peers[address.peer] = source
        return Carrier(NAME, "kind", NAME)

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """See ``Mover.remove``."""
        self._peers.pop(peer_id, None)
        self._programs = {key: program for key, program in self._programs.items() if key[0] != peer_id}
        self._served = {key: served for key, served in self._served.items() if key[0] != peer_id}

    def prepare(self, prepared: Prepared) -> None:
        """See ``Mover.prepare``."""
        program = prepared.program
        try:
            check_inside(prepared.source, [self._peers[program.peer].cache.region], program.source_memory)
        except OutOfBounds as error:
            raise MoveFailed("bounds", str(error)) from error
        self._programs[program.peer, program.program_id] = prepared
        if self._fabric.serves != "nothing":
            tracks = self._peers[program.peer].serving.tracks[program.group]
            served = ServedProgram(prepared.source.table, tracks, program.group)
            self._served[program.peer, program.program_id] = served

    def post(self, chunk: Chunk) -> Flight | int:
        """See ``Mover.post``."""
        source, read = self._peers[chunk.peer], chunk.read
        program = self._programs[chunk.peer, read.program_id]
        part = slice(chunk.first, chunk.stop)
        staged = program.staged is not None
        blocks = [] if staged else self._agent.cache.blocks_of(program.target, read.target_index[part])
        answer: Answer | None = None
        if self._fabric.serves == "nothing":
            runs = merge(program.source, read.source_index[part], program.target, read.target_index[part])
            parts: list[Part] = [(run, None) for run in runs]
        else:
            answer = Answer(chunk, program, self._served[chunk.peer, read.program_id], source.leased)
            parts = answer.parts
        pieces = self._cut(parts)
        return self._launch(_Transfer(source, read.read_id, blocks, pieces, slot=-1, staged=staged, answer=answer))

    def post_fence(self, peer_id: PeerId, fence: Fence, after: frozenset[int]) -> Flight | int:
        """See ``Mover.post_fence``."""
        if after and self._fabric.serves == "reads and fences":
            return self._told.verdict(fence.slot, fence.epoch, after)
        return self._launch(_Transfer(self._peers[peer_id], -1, [], [], fence.slot))

    def poll(self, flight: Flight) -> int | None:
        """See ``Mover.poll``."""
        assert isinstance(flight, _Transfer)
        outcome = flight.outcome
        if outcome is None:
            return None
        del self._agent.transfers[flight]
        if isinstance(outcome, MoveFailed):
            raise outcome
        return outcome

    def renew(self) -> None:
        """See ``Mover.renew``."""
        self._agent.transfers.clear()
        self._peers.clear()
        self._programs.clear()
        self._served.clear()

    def close(self) -> None:
        """See ``Mover.close``."""
        self._agent.close()

    def _cut(self, parts: list[Part]) -> list[list[Part]]:
        """Cut a chunk into pieces that arrive one after the other."""
        pieces = self._world.chance.randint(1, self._fabric.faults.pieces_max)
        size = -(-len(parts) // pieces)
        return [parts[first : first + size] for first in range(0, len(parts), size)]

    def _launch(self, transfer: _Transfer) -> Flight | int:
        world, faults = self._world, self._fabric.faults
        if world.happens(faults.failed):
            transfer.doomed = world.chance.randint(0, len(transfer.pieces))
            self._fabric.wires.troubles.note("failed", self._agent.process.host, transfer.source.process.host)
        elif world.happens(faults.at_once) and self._obstacle(transfer) is None and not transfer.source.closed:
            for piece in transfer.pieces:
                self._copy(transfer, piece)
            value = self._value(transfer)
            if not transfer.unheld:
                return value
            self._agent.transfers[transfer] = None
            self._end(transfer, value)
            return transfer
        self._agent.transfers[transfer] = None
        world.after(world.delay(faults.piece_s), self._advance, transfer)
        return transfer

    def _obstacle(self, transfer: _Transfer) -> Process | str | None:
        """Return what keeps a transfer from going on: a stopped process, or the hosts that are parted."""
        ours, theirs = self._agent.process, transfer.source.process
        if not self._fabric.faults.rdma or self._fabric.serves != "nothing":
            for process in (ours, theirs):
                if process.life == "stopped":
                    return process
        for process in (ours, theirs):
            if process.hung:
                return process
        return theirs.host if self._fabric.wires.parted(ours.host, theirs.host) else None

    def _advance(self, transfer: _Transfer) -> None:
        """Let the next piece arrive, or the end."""
        if transfer not in self._agent.transfers:
            return  # the agents were destroyed
        world, faults = self._world, self._fabric.faults
        again = partial(self._advance, transfer)
        match self._obstacle(transfer):
            case Process() as stopped:
                stopped.postpone(again)
                return
            case str():
                self._fabric.wires.hold(again)
                return
        if transfer.source.closed:
            lost = MoveFailed("peer_lost", f"{transfer.source.name} does not answer")
            world.after(world.delay(faults.noticed_s), self._end, transfer, lost)
        elif transfer.doomed == 0:
            self._end(transfer, MoveFailed("transport_error", "failed as the faults have it"))
        elif transfer.pieces:
            self._copy(transfer, transfer.pieces.pop(0))
            transfer.doomed = None if transfer.doomed is None else transfer.doomed - 1
            world.after(world.delay(faults.piece_s), self._advance, transfer)
        else:
            world.after(world.delay(faults.piece_s), self._end, transfer, self._value(transfer))

    def _value(self, transfer: _Transfer) -> int:
        """Return what a transfer ends with: the value of a slot, or 0; note what of a chunk was not served."""
        if transfer.slot >= 0:
            return transfer.source.slot(transfer.slot)
        if transfer.answer is not None:
            transfer.answer.compare(transfer.source.epochs)
            leases = transfer.answer.leases
            self._told.note(transfer.read_id, leases)
            transfer.unheld = frozenset((lease.slot, lease.epoch) for lease in leases if not lease.held)
        return 0

    def _copy(self, transfer: _Transfer, piece: list[Part]) -> None:
        if transfer.answer is not None:
            transfer.answer.compare(transfer.source.epochs)
        self._thread.check_write(transfer.read_id, transfer.blocks)
        source, target = transfer.source.cache, self._agent.cache
        from_view, from_base = source.view, source.region.address
        to_view, to_base = target.view, target.region.address
        for run, lease in piece:
            start = run.source_address - from_base
            served = lease is None or lease.held
            content = from_view[start : start + run.nbytes] if served else memoryview(bytes(run.nbytes))
            if transfer.staged:
                self._staging.fill(run.target_address, content)
            else:
                at = run.target_address - to_base
                to_view[at : at + run.nbytes] = content

    def _end(self, transfer: _Transfer, outcome: int | MoveFailed) -> None:
        if transfer in self._agent.transfers:
            transfer.outcome = outcome
            self._thread.wake()
