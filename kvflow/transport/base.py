"""The contract between a worker and its data plane.

A transport is two independent agents of one worker. The *exporter* is what peers read from; the *reader* reads from
peers. They share nothing, so destroying the reader does not disturb peers that read from us.

Lifecycle: construct -> ``start`` (registers memory, blocks) -> any of the other calls -> ``close`` (blocks).
    After ``close`` has returned, no byte of the registered memory is written. A transport starts once; commands given
    after ``close`` are ignored, and cause no event.
Rank reads: a ``RankRead`` is everything that one source rank gives to one pull. The transport checks the lease first
    if the read says so, moves the bytes in chunks, reads the epoch slot once all bytes have arrived (the *fence*),
    compares, and answers with exactly one ``ReadEnded``. A first check that does not find the lease held reads no byte.
    The answer is *terminal*: nothing of the read will write to memory after it.
Batches: reads that are posted together share work where that is possible: one check for many leases of a peer, one
    chunk for small reads of one program, one wake-up. Each read succeeds or fails alone.
Inline: ``post`` may move small reads at once, on the calling thread, and return their answers. It does so only while
    the owner thread has nothing to do, for peers that were read before, and while the measured cost stays within
    ``INLINE_S_MAX``. All other reads go to the owner thread, and their answers to ``sink``. Both ways run one code.
Threading: every call but ``start`` and ``close`` may be made from any thread and returns at once. Events are passed to
    ``sink`` on the owner thread, and what happens inline beside the answers on the thread that posts. The sink must be
    quick and must not raise (a worker's sink is ``loop.call_soon_threadsafe``).
Order: commands are taken in order. Chunks of all reads are posted one at a time, in the order of ``lanes``: by urgency
    and by the time that a peer has waited, so that peers take turns and no read starves.
Failure: a command never raises for what a peer does. An error of one peer ends all reads of that peer, and then
    reports ``PeerFailed``; chunks still in flight end later, and their reads with them. Other peers are not disturbed.
    Between ``PeerFailed`` and the next ``PeerAdded``, reads of the peer fail with ``peer_lost``.
Last resort: what is in flight from a peer that hangs may never end. ``reset_reader`` ends it: it destroys the reader
    and makes another. The exporter is not touched, so peers that read from us notice nothing.
Staging: a transport with staging buffers (see ``Program``) posts a chunk of a staged read only while a buffer is free;
    until then the reads of that peer wait. Peers without staged reads go on. A buffer is free again when its chunk has
    ended, so peers that hang may keep them all: ``StagingUse`` tells, and ``reset_reader`` frees them. A cancelled read
    copies nothing out of its buffers.
Memory: the caller keeps registered regions alive until ``close`` returned. Arrays belong to the transport once posted.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.ids import Credentials, PeerId
from kvflow.layout.region import Region
from kvflow.transfer.bind import Bound
from kvflow.transfer.boxes import Scatter
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.requests import RankRead, ReadEnded

if TYPE_CHECKING:
    from kvflow.transport.serving import Serving  # which may use what is here

CHUNK_BYTES_MAX = 8 << 20
"""A post on shared memory is the copy itself: 8 MiB take about 1 ms, and splitting costs nothing measurable."""

CHUNK_DESCRIPTORS_MAX = 256
"""Each merged descriptor costs 2 to 9 us in a post, so that 256 of them stay near the same millisecond."""


INLINE_S_MAX = 100e-6
"""Longest time that a post may hold the event loop."""

RESET_DRAIN_S = 2.0
"""What a reset of the reader may cost healthy peers. Two chunks in flight are 16 MiB: 20 ms over loopback TCP, and 2 s
at 70 Mbit/s."""


NOBODY = Credentials("", "", 0, "", b"")
"""Of a reader that cannot say who it is. A data plane that asks refuses it."""

UNFIT = "plane_unfit"
"""Code of a peer that answers, but that no data plane of both sides can read from."""


class Published(Struct, frozen=True, kw_only=True):
    """What peers need to read from a worker, and what is not there.

    Attributes:
        planes: name of each data plane -> its exporter's own opaque description.
        data_endpoint: where the TCP plane is reached, ``tcp://HOST:PORT``; empty without one.
        missing: name of each data plane that could not start here -> why. Others have started.
    """

    planes: dict[str, bytes]
    data_endpoint: str = ""
    missing: dict[str, str] = {}

    @property
    def names(self) -> str:
        """The data planes, joined by a plus."""
        return "+".join(self.planes)


class PeerAddress(Struct, frozen=True):
    """What a reader must know of a peer's exporter.

    Two peers may have one exporter: a worker that is reached at two endpoints. They share its connection, and what
    fails for one of them has failed for both.

    Attributes:
        peer: identity of the peer.
        planes: name of each data plane that may be used -> the exporter's own opaque description, at most 1 MiB.
        epochs: the peer's epoch table, ``epochs.nbytes // 8`` slots of u64.
        agent: the name that the peer's transport was constructed with; metadata of another is refused. None: any.
        data_endpoint: where its TCP plane is, ``tcp://ADDRESS:PORT`` with a numeric address: nothing is looked up
            below. Empty without one.
        credentials: what we say to its TCP plane.
        weight: chunks that it has in one turn, 1 to 64, while other peers wait as well.
    """

    peer: PeerId
    planes: dict[str, bytes]
    epochs: Region
    agent: str | None = None
    data_endpoint: str = ""
    credentials: Credentials = NOBODY
    weight: int = 1


class Binding(Protocol):
    """What the transport must know of a group's plan to read with it: see ``kvflow.transfer.bind.Binding``.

    Attributes:
        unit_bytes: bytes that one pair of units fills.
        read_bytes: bytes that are read for one pair: more if it is staged.
        unit_descriptors: descriptors of one pair before neighbors merge.
    """

    unit_bytes: int
    read_bytes: int
    unit_descriptors: int

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the descriptor numbers of these pairs, run by run and within a run pair by pair, cut into chunks."""
        ...


class Program(Struct, frozen=True, eq=False):
    """Two prepared descriptor lists: what can be read from one peer under one plan.

    A program with ``scatter`` is *staged*: each chunk of its reads gets a free staging buffer, is fetched into it, and
    is scattered from there when it has arrived. Its lists then fetch one *unit* with one descriptor of each row: the
    rows of one buffer are its target rows, with a descriptor for each slot, and the source's descriptors are divided
    evenly among them, in order.

    Attributes:
        program_id: chosen by the caller, unique in this transport as long as the peer is added.
        peer: whose memory ``source_rows`` names.
        source_rows: int64, shape (rows, 5): address, nbytes, device, stride, count. One row is ``count``
            descriptors; descriptor numbers run through the rows in order. All within the peer's regions.
            A row with a count above one has ``stride >= nbytes``.
        target_rows: the same for our own memory, each row within one registered region; of a staged program
            addressed from the start of a staging buffer.
        source_memory: memory kind of all source rows, ``DRAM`` or ``VRAM``.
        target_memory: memory kind of all target rows.
        scatter: the copies from a buffer to our own memory, all in DRAM; None: not staged.
        group: the group of the peer's manifest that the source rows belong to.
        binding: turns pairs of units into descriptor numbers of the two lists; of a staged program into unit numbers.
    """

    program_id: int
    peer: PeerId
    source_rows: npt.NDArray[np.int64]
    target_rows: npt.NDArray[np.int64]
    source_memory: str = "DRAM"
    target_memory: str = "DRAM"
    scatter: Scatter | None = None
    group: int = 0
    binding: Binding | None = None


class StagingUse(Struct, frozen=True, kw_only=True):
    """The staging buffers of a transport at one moment. Each is free, or has one chunk in flight.

    Attributes:
        buffers: how many there are.
        buffer_bytes: length of each.
        in_use: how many have a chunk in flight.
        quarantined: how many of these have one whose read was cancelled, or whose peer failed: they are free again
            when the transport knows that nothing is written there any more.
        waiting: peers of whom nothing is in flight, because what is next of them needs a buffer and none is free. They
            owe us nothing.
    """

    buffers: int = 0
    buffer_bytes: int = 0
    in_use: int = 0
    quarantined: int = 0
    waiting: frozenset[PeerId] = frozenset()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the buffers that something unwanted may still write to."""
        return self.quarantined * self.buffer_bytes

    @property
    def starved(self) -> bool:
        """Whether peers wait for a buffer while every one is in quarantine."""
        return bool(self.waiting) and self.quarantined == self.buffers


class Carrier(Struct, frozen=True):
    """What carries the bytes that are read from one peer.

    Attributes:
        name: ``loopback``, or UCX's name of its transport: ``cma`` (shared memory), ``rc_mlx5``, ``cuda_ipc``.
            Several with a bar between them if it is one of these, and ``unknown`` if that is not known, either.
        known_by: ``kind``: a data plane of this kind has no other. ``addresses``: it is the only one that both sides
            have and that reaches. ``candidates``: they have several that do. ``nothing``: they could not be compared.
        plane: the data plane that it belongs to: ``nixl``, ``tcp`` or ``loopback``. What chooses the plane adds it.
    """

    name: str
    known_by: str
    plane: str = ""


UNKNOWN_CARRIER = Carrier("unknown", "nothing")


class PeerAdded(Struct, frozen=True):
    """The peer is known. That it answers shows in the first read, which also connects (10 to 40 ms).

    Attributes:
        peer: who.
        carrier: of its bytes.
    """

    peer: PeerId
    carrier: Carrier = UNKNOWN_CARRIER


class PeerFailed(Struct, frozen=True):
    """The peer is lost or could not be added; its programs are gone. Add it again to retry.

    Attributes:
        peer: who.
        code: ``peer_lost``, ``metadata_invalid``, ``transport_error``, or ``plane_unfit`` if no data plane of both
            sides can read from it.
        detail: the foreign library's own words.
    """

    peer: PeerId
    code: str
    detail: str


class ReaderReset(Struct, frozen=True):
    """A reset of the reader is over, and its terminal events have been passed before.

    Attributes:
        ended: chunks and fences that were still in flight, and were ended by destroying the reader; 0 if all had
            ended by themselves, and then the reader was kept.
        drain_s: seconds without new chunks, while others were given time to land.
        reset_s: seconds to destroy the reader, to make another, and to add peers and programs again.
    """

    ended: int
    drain_s: float
    reset_s: float


TransportEvent = PeerAdded | PeerFailed | ReadEnded | ReaderReset
Sink = Callable[[TransportEvent], None]


class Transport(Protocol):
    """The data plane of one worker. See the module's docstring for the contract."""

    @property
    def name(self) -> str:
        """Which data planes were asked for: ``auto``, ``nixl``, ``tcp`` or ``loopback``."""
        ...

    def start(self, regions: Sequence[Region], epochs: Region, serving: "Serving" = ...) -> None:
        """Register memory with both agents and start the owner thread.

        Args:
            regions: the cache. Peers may read it; our own reads may write to it.
            epochs: our epoch table: DRAM, ``nbytes`` a multiple of 8. Peers may read it.
            serving: what a data plane that serves reads must know; by default ``SERVES_NOTHING``.

        Raises:
            TransportUnavailable: no data plane can start, or not the one that was asked for.
        """
        ...

    def staging(self) -> StagingUse:
        """Return how many staging buffers are taken. Thread: any."""
        ...

    def published(self) -> Published:
        """Return what a peer needs to read from us; constant between ``start`` and ``close``."""
        ...

    def add_peer(self, address: PeerAddress) -> None:
        """Connect to a peer's exporter. Ends in ``PeerAdded`` or ``PeerFailed``; adding again is harmless.

        A peer that was removed or failed is added again once nothing of it is in flight, which for a hung peer
        may be never.
        """
        ...

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """Forget a peer, its programs and its unposted reads (``failed``, ``cancelled``).

        Args:
            peer: that was added, or removed already.
            gone: it never comes again, so that its connection is not kept for that either.
        """
        ...

    def prepare(self, program: Program) -> None:
        """Prepare descriptor lists. A failure shows as the end of the reads that use the program."""
        ...

    def post(self, reads: Sequence[RankRead]) -> list[ReadEnded]:
        """Start reads, of any peers. Each ends in one ``ReadEnded``.

        Returns:
            The answers of reads that were small enough to be moved at once, on the calling thread; they are not passed
            to ``sink``. Empty otherwise.

        Thread: one at a time; the worker's event loop.
        """
        ...

    def cancel(self, read_ids: Sequence[int]) -> None:
        """Drop chunks that were not posted yet.

        Each unfinished read ends ``failed`` with ``cancelled`` once its posted chunks have ended, which for a hung peer
        may be never; or as it would have ended if nothing was left to drop. Unknown ids are ignored.
        """
        ...

    def reset_reader(self) -> None:
        """End what is in flight from peers that hang: destroy the reader and make another.

        No new chunk is posted until that is done. Peers that were not removed get ``RESET_DRAIN_S`` for what they have
        in flight; what has not arrived by then ends with ``peer_lost``, and its peer with ``PeerFailed``. All other
        peers and their programs are kept, and their reads go on. Ends in ``ReaderReset``, unless closed before.
        """
        ...

    def close(self) -> None:
        """Destroy both agents and join the owner thread. Idempotent. Pending reads end as ``cancelled``.

        What is in flight gets two seconds to end by itself. There is no other bound: a call into the library that does
        not return may still write to memory, so the caller may not be told that it can be freed. Must not be called by
        the sink.
        """
        ...
