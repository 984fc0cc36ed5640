"""A simulated data plane: the production ``ReadCore`` and ``Lanes`` over a backend whose bytes take their time.

A read may be done when its post returns, as on shared memory, or fly: then its bytes arrive in pieces, and go on to
arrive after a cancel until the read is over, as they do with a real network card. It may end early with some of its
bytes written. A fence reads its slot somewhere between its post and its end. A peer that was killed is noticed late,
a parted one not before it is joined, a stopped one goes on to be read if the fabric is an RDMA network, and a host that
hangs keeps what is under way until it is replaced.

In a share of the worlds exporters serve, as the TCP data plane has it: a lease that is not held when a piece is copied
gives zeros, and the end of the read tells. In some of these a fence is what reads have told, in others it reads the
slot.

Every write is checked at the moment it happens: each block must still belong to the pull for which that read was posted
whose share of the chunk the block is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct

from kvflow.errors import FailureCode
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import Bound
from kvflow.reads.backend import Backend, BackendError, CheckedList, Chunk, PostedWork, share_numbers
from kvflow.reads.bounds import OutOfBounds, check_bound, check_inside, merge
from kvflow.reads.contract import Carrier, PeerAddress, Serving
from kvflow.reads.serving import LeasedBlocks
from kvflow.reads.staging import memory_at
from kvflow.reads.tcp.connection import ToldEpochs
from tests.fakes.memory import SimulatedCache
from tests.fakes.network import Wires
from tests.fakes.process import Process
from tests.fakes.serving import Answer, Part, Served
from tests.fakes.staging import SimulatedStaging
from tests.fakes.world import World

NAME = "simulated"
NOBODY = 0
"""Owner of a block that nothing may write into."""

Serves = Literal["nothing", "reads", "reads and fences"]
"""What exporters do themselves: at ``nothing`` they are read without their help."""


class FabricFaults(Struct, frozen=True, kw_only=True):
    """What the data plane does to reads.

    Attributes:
        step_s: mean pause of the read thread between two steps.
        inline: share of posts that may be made by the caller's own thread, if the owner has nothing to do.
        chunk_bytes: most bytes of one chunk; a portion has four times as many.
        at_once: share of reads that are done when their post returns.
        piece_s: mean time from one piece of a read to the next.
        pieces_max: most pieces of one chunk.
        failed: share of chunks and checks that fail on the way.
        noticed_s: mean time until a death is noticed.
        rdma: whether a stopped process can be read, and written to.
    """

    step_s: float = 20e-6
    inline: float = 0.5
    chunk_bytes: int = 768
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
        """Return how many chunks and checks are under way."""
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
        """End at once: nothing of it writes after that."""
        self.closed = True
        self.transfers.clear()

    def slot(self, number: int) -> int:
        """Read one slot of the epoch table."""
        return int(self.epochs[number])


class _Transfer(PostedWork):
    """A chunk or a check on its way.

    Attributes:
        source: the agent that it reads from.
        writes: of each read in the chunk, its id and the blocks of ours that its share may write into.
        pieces: what is still to be copied.
        slots: to be read, by a check.
        staged: whether it is read into a staging buffer.
        answer: of an exporter that serves.
        doomed: pieces after which it fails.
        outcome: when it is over: what ``poll`` returns or raises.
        unheld: see ``PostedWork``.
    """

    __slots__ = ("answer", "doomed", "outcome", "pieces", "slots", "source", "staged", "unheld", "writes")

    def __init__(
        self,
        source: Agent,
        writes: list[tuple[int, list[int]]],
        pieces: list[list[Part]],
        slots: range,
        *,
        staged: bool = False,
        answer: Answer | None = None,
    ) -> None:
        self.source = source
        self.writes = writes
        self.pieces = pieces
        self.slots = slots
        self.staged = staged
        self.answer = answer
        self.doomed: int | None = None
        self.outcome: int | list[int] | BackendError | None = None
        self.unheld: frozenset[tuple[int, int]] = frozenset()


class OwnerThread(Protocol):
    """What a backend asks of the thread that calls it."""

    def check_write(self, read_id: int, blocks: Sequence[int]) -> None:
        """Check that every block which is written to belongs to the pull that this read was posted for."""
        ...

    def wake(self) -> None:
        """Take a step soon: something has ended."""
        ...


class SimulatedBackend(Backend):
    """Move bytes between the processes of a world. See ``kvflow.reads.backend.Backend`` for the contract."""

    def __init__(self, fabric: Fabric, agent: Agent, thread: OwnerThread, staging: SimulatedStaging) -> None:
        self._fabric = fabric
        self._world = fabric.world
        self._agent = agent
        self._thread = thread
        self._staging = staging
        self._peers: dict[PeerId, Agent] = {}
        self._prepared_lists: dict[tuple[PeerId, int], CheckedList] = {}
        self._served: dict[tuple[PeerId, int], Served] = {}
        self._told = ToldEpochs()

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Backend.add``. Whether the peer answers shows when it is read from."""
        name = address.planes[NAME].decode()
        source = self._fabric.agents.get(name)
        if source is None:
            raise BackendError(FailureCode.METADATA_INVALID, f"there never was an agent {name!r}")
        self._peers[address.peer] = source
        return Carrier(NAME, "kind", NAME)

    def ends_at_once(self, peer_id: PeerId) -> bool:
        """See ``Backend.ends_at_once``. As with real planes, those whose exporters serve have something in flight."""
        del peer_id
        return self._fabric.serves == "nothing"

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        self._peers.pop(peer_id, None)
        self._prepared_lists = {
            key: prepared_list for key, prepared_list in self._prepared_lists.items() if key[0] != peer_id
        }
        self._served = {key: served for key, served in self._served.items() if key[0] != peer_id}

    def prepare(self, prepared: CheckedList) -> None:
        prepared_list = prepared.prepared_list
        try:
            check_inside(prepared.source, [self._peers[prepared_list.peer].cache.region], prepared_list.source_memory)
        except OutOfBounds as error:
            raise BackendError(FailureCode.BOUNDS, str(error)) from error
        self._prepared_lists[prepared_list.peer, prepared_list.list_id] = prepared
        if self._fabric.serves != "nothing":
            tracks = self._peers[prepared_list.peer].serving.tracks[prepared_list.group]
            served = Served(prepared, tracks, prepared_list.group)
            self._served[prepared_list.peer, prepared_list.list_id] = served

    def post(self, chunk: Chunk) -> PostedWork | int:
        portion = chunk.portion
        source, prepared_list = self._peers[portion.peer], self._prepared_lists[portion.peer, portion.list_id]
        part = slice(chunk.first, chunk.stop)
        staged = prepared_list.staged is not None
        if not staged:  # the core checks few pairs of a linear binding only once for the list
            bound = Bound(portion.source_index, portion.target_index, portion.cuts, portion.nbytes)
            num_pairs = sum(share.pairs for share in portion.shares)
            check_bound(bound, num_pairs, prepared_list.source, prepared_list.target)
        answer: Answer | None = None
        if self._fabric.serves == "nothing":
            runs = merge(
                prepared_list.source, portion.source_index[part], prepared_list.target, portion.target_index[part]
            )
            parts: list[Part] = [(run, None) for run in runs]
        else:
            answer = Answer(chunk, prepared_list, self._served[portion.peer, portion.list_id], source.leased)
            parts = answer.parts
        transfer = _Transfer(
            source, self._writes(chunk, prepared_list), self._cut(parts), range(0), staged=staged, answer=answer
        )
        outcome = self._launch(transfer)
        assert not isinstance(outcome, list)
        return outcome

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        if fence and self._fabric.serves == "reads and fences":
            return self._told.verdicts(first, last, reads)
        outcome = self._launch(_Transfer(self._peers[peer_id], [], [], range(first, last + 1)))
        assert not isinstance(outcome, int)
        return outcome

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        assert isinstance(posted, _Transfer)
        outcome = posted.outcome
        if outcome is None:
            return None
        del self._agent.transfers[posted]
        if isinstance(outcome, BackendError):
            raise outcome
        return outcome

    def reset(self) -> None:
        self._agent.transfers.clear()
        self._peers.clear()
        self._prepared_lists.clear()
        self._served.clear()

    def close(self) -> None:
        self._agent.close()

    def _writes(self, chunk: Chunk, prepared_list: CheckedList) -> list[tuple[int, list[int]]]:
        """Return which blocks of ours each read in a chunk may write into; what is staged is read into a buffer."""
        shares, index = chunk.portion.shares, chunk.portion.target_index[chunk.first : chunk.stop]
        if prepared_list.staged is not None:
            return [(share.read_id, []) for share in shares]
        numbers = share_numbers(chunk)
        parts = [index] if numbers is None else [index[numbers == number] for number in range(len(shares))]
        blocks_of = self._agent.cache.blocks_of
        return [
            (share.read_id, blocks_of(prepared_list.target, part)) for share, part in zip(shares, parts, strict=True)
        ]

    def _cut(self, parts: list[Part]) -> list[list[Part]]:
        """Cut a chunk into pieces that arrive one after the other."""
        pieces = self._world.chance.randint(1, self._fabric.faults.pieces_max)
        size = -(-len(parts) // pieces)
        return [parts[first : first + size] for first in range(0, len(parts), size)]

    def _launch(self, transfer: _Transfer) -> PostedWork | int | list[int]:
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
        world.later(faults.piece_s, self._advance, transfer)
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
            lost = BackendError(FailureCode.PEER_LOST, f"{transfer.source.name} does not answer")
            world.later(faults.noticed_s, self._end, transfer, lost)
        elif transfer.doomed == 0:
            self._end(transfer, BackendError(FailureCode.TRANSPORT_ERROR, "failed as the faults have it"))
        elif transfer.pieces:
            self._copy(transfer, transfer.pieces.pop(0))
            transfer.doomed = None if transfer.doomed is None else transfer.doomed - 1
            world.later(faults.piece_s, self._advance, transfer)
        else:
            world.later(faults.piece_s, self._end, transfer, self._value(transfer))

    def _value(self, transfer: _Transfer) -> int | list[int]:
        """Return what a transfer ends with: the values of slots, or 0; note what of a chunk was not served."""
        if transfer.slots:
            return [transfer.source.slot(number) for number in transfer.slots]
        if transfer.answer is not None:
            transfer.answer.compare(transfer.source.epochs)
            shares = transfer.answer.shares
            for share, held in shares:
                self._told.note(share, held.epoch if held.other is None else held.other)
            transfer.unheld = frozenset((held.slot, held.epoch) for _, held in shares if not held.held)
        return 0

    def _copy(self, transfer: _Transfer, piece: list[Part]) -> None:
        if transfer.answer is not None:
            transfer.answer.compare(transfer.source.epochs)
        for read_id, blocks in transfer.writes:
            self._thread.check_write(read_id, blocks)
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

    def _end(self, transfer: _Transfer, outcome: int | list[int] | BackendError) -> None:
        if transfer in self._agent.transfers:
            transfer.outcome = outcome
            self._thread.wake()
