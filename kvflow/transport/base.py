"""The contract between a worker and its data plane.

A transport is two independent agents of one worker. The *exporter* is what peers read from; the *reader*
reads from peers. They share nothing, so destroying the reader harms nobody who reads from us.

Lifecycle: construct -> ``start`` (registers memory, blocks) -> any of the other calls -> ``close`` (blocks).
    After ``close`` has returned, no byte of the registered memory is written any more. A transport starts once;
    commands given after ``close`` are ignored, and cause no event.
Threading: every call but ``start`` and ``close`` may be made from any thread and returns at once: it puts a
    command into the queue of the one owner thread. Events are passed to ``sink`` on the owner thread; the
    sink must be quick and must not raise (a worker's sink is ``loop.call_soon_threadsafe``).
Order: commands are taken in order, but the chunks of a read are posted one at a time, and chunks of other
    peers, and adding and removing peers, run in between. Among waiting reads a lower ``priority`` goes first;
    equals go peer by peer in rotation. After every eight chunks that went before the oldest read because they were
    more urgent, the oldest read has one, so that no read starves.
Failure: a command never raises for what a peer does. Each accepted ``Read`` ends in exactly one
    ``ReadCompleted`` or ``ReadFailed``, each fence in exactly one ``FenceJudged`` or ``FenceFailed``. These
    events are *terminal*: when one is reported, nothing of that read will write to memory any more. An error
    of one peer ends all reads of that peer at once, as far as they are terminal, and then reports
    ``PeerFailed``; reads still in flight end later, each by itself. Other peers are not disturbed. Between
    ``PeerFailed`` and the next ``PeerAdded``, reads of the peer fail with ``peer_lost``.
Last resort: what is in flight from a peer that hangs may be terminal never. ``renew_reader`` makes it so: it
    destroys the reader and makes another. The exporter is not touched, so whoever reads from us notices nothing.
Staging: a transport with staging buffers (see ``Program``) posts a chunk of a staged read only while one is free;
    until then what the peer is to be read waits behind it, and peers of whom nothing is staged go on. A buffer is free
    again when its chunk is terminal, so that peers that hang may keep them all: ``StagingUse`` says who waits then, and
    ``renew_reader`` frees them. A cancelled read copies nothing out of its buffers any more.
Memory: the caller keeps registered regions alive until ``close`` returned. Index arrays belong to the
    transport once posted.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.ids import Credentials, PeerId
from kvflow.layout.region import Region
from kvflow.transfer.boxes import Scatter
from kvflow.transfer.requests import LeaseShare

if TYPE_CHECKING:
    from kvflow.transport.serving import Serving  # which may use what is here

CHUNK_BYTES_MAX = 8 << 20
"""A post on shared memory is the copy itself: 8 MiB take about 1 ms, and splitting costs nothing measurable."""

CHUNK_DESCRIPTORS_MAX = 256
"""Each merged descriptor costs 2 to 9 us in a post, so that 256 of them stay near the same millisecond."""


RENEWAL_DRAIN_S = 2.0
"""What renewing the reader may cost healthy peers. Two chunks in flight are 16 MiB: 20 ms over loopback TCP, and 2 s at
70 Mbit/s."""


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
    """

    peer: PeerId
    planes: dict[str, bytes]
    epochs: Region
    agent: str | None = None
    data_endpoint: str = ""
    credentials: Credentials = NOBODY


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
    """

    program_id: int
    peer: PeerId
    source_rows: npt.NDArray[np.int64]
    target_rows: npt.NDArray[np.int64]
    source_memory: str = "DRAM"
    target_memory: str = "DRAM"
    scatter: Scatter | None = None
    group: int = 0


class Fence(Struct, frozen=True):
    """Read one epoch slot of the peer once all reads in ``after`` have been observed complete.

    Attributes:
        fence_id: chosen by the caller, unique in this transport.
        slot: index into the peer's epoch table.
        epoch: what the ticket says the slot must hold.
        after: ids of reads of the same peer that were posted before the fence's own read, which is always
            among them. If one of them fails or failed, so does the fence (``FenceFailed``); an id that is
            not known, or was forgotten after 65,536 later reads, counts as failed.
    """

    fence_id: int
    slot: int
    epoch: int
    after: tuple[int, ...]


class Read(Struct, frozen=True, eq=False):
    """Copy descriptors ``source_index[i]`` to ``target_index[i]`` of a program; of a staged one, units.

    Attributes:
        read_id: chosen by the caller, unique in this transport.
        peer: the peer of the program.
        program_id: a program that was prepared before.
        source_index: int32, shape (n,), n >= 1.
        target_index: int32, shape (n,).
        cuts: int64, ascending, first 0, last n: chunk ``c`` is ``[cuts[c], cuts[c + 1])``. The caller keeps
            each chunk within ``CHUNK_BYTES_MAX`` and ``CHUNK_DESCRIPTORS_MAX`` merged descriptors; a chunk of
            a staged program has at most as many units as a buffer has slots.
        nbytes: total bytes; must be what the descriptors hold; of a staged program, what its units write in the end.
        priority: lower is more urgent.
        fences: fences that become due with this read.
        looks: fences that are judged before any chunk of this read is posted. The read is posted if all of them find
            their lease held. If one does not, the read fails with ``lease_not_held`` and no byte of it is read; if one
            fails, so does the read. Several reads may have the same look, which is judged once. Its ``after`` means
            nothing.
        leases: which leases vouch for the bytes, in the order of the unit pairs; empty: the caller does not say. The
            read has ``P`` pairs, the sum of the shares' ``pairs``, numbered from 0, and ``n`` is a multiple of ``P``.
            Index ``k`` belongs to pair ``k % P``: a plain program lists its indices run by run, and within each run
            pair by pair. A staged program has one index for each pair, so that ``n`` is ``P``.
            ``kvflow.transport.ledger.lease_numbers`` tells the lease of each descriptor of a chunk.
    """

    read_id: int
    peer: PeerId
    program_id: int
    source_index: npt.NDArray[np.int32]
    target_index: npt.NDArray[np.int32]
    cuts: npt.NDArray[np.int64]
    nbytes: int
    priority: int = 0
    fences: tuple[Fence, ...] = ()
    looks: tuple[Fence, ...] = ()
    leases: tuple[LeaseShare, ...] = ()


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
    """The peer cannot be read from any more, or never could; its programs are gone. Add it anew to retry.

    Attributes:
        peer: who.
        code: ``peer_lost``, ``metadata_invalid``, ``transport_error``, or ``plane_unfit`` if no data plane of both
            sides can read from it.
        detail: the foreign library's own words.
    """

    peer: PeerId
    code: str
    detail: str


class ReadCompleted(Struct, frozen=True):
    """All bytes of the read have arrived, and are where they belong.

    Attributes:
        read_id: which read.
        posted_s: seconds spent in posting calls (on shared memory this is the copy).
        wire_s: seconds from the end of the first posting call to the observed completion, less ``posted_s``
            of later chunks and ``scattered_s``; about zero on shared memory.
        scattered_s: seconds spent in copies from staging buffers.
        unheld: leases, as slot and epoch, of which the exporter has not served something: they were not held. The fence
            tells of a lease that has ended; one that was not admitted yet may be held by then, and its bytes were not
            read.
    """

    read_id: int
    posted_s: float
    wire_s: float
    scattered_s: float = 0.0
    unheld: frozenset[tuple[int, int]] = frozenset()


class ReadFailed(Struct, frozen=True):
    """The read ended early, and nothing of it will write any more.

    Attributes:
        read_id: which read.
        code: ``peer_lost``, ``cancelled``, ``program_unknown``, ``bounds``, ``lease_not_held`` or
            ``transport_error``.
        detail: the foreign library's own words.
    """

    read_id: int
    code: str
    detail: str


class FenceJudged(Struct, frozen=True):
    """The epoch slot was read: after the data, or before them if it is a look.

    Attributes:
        fence_id: which fence or look.
        observed: the slot's value. Equal to the fence's epoch: held. Above: stale. Below: not admitted yet.
        fence_s: seconds from posting the fence read to its completion.
    """

    fence_id: int
    observed: int
    fence_s: float


class FenceFailed(Struct, frozen=True):
    """The fence cannot be judged.

    Attributes:
        fence_id: which fence.
        code: of the read before it that failed, or ``peer_lost``, ``cancelled``, ``bounds`` (there is no such
            slot) or ``transport_error``.
        detail: the foreign library's own words.
    """

    fence_id: int
    code: str
    detail: str


class RenewalEnded(Struct, frozen=True):
    """A renewal of the reader is over, and its terminal events have been passed before.

    Attributes:
        ended: chunks and fences that were still in flight, and were ended by destroying the reader; 0 if all had
            ended by themselves, and then the reader was kept.
        drain_s: seconds without new chunks, while others were given time to land.
        renew_s: seconds to destroy the reader, to make another, and to add peers and programs again.
    """

    ended: int
    drain_s: float
    renew_s: float


TransportEvent = PeerAdded | PeerFailed | ReadCompleted | ReadFailed | FenceJudged | FenceFailed | RenewalEnded
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
        """Forget a peer, its programs and its unposted reads (``ReadFailed``, ``cancelled``).

        Args:
            peer: that was added, or removed already.
            gone: it never comes again, so that its connection is not kept for that either.
        """
        ...

    def prepare(self, program: Program) -> None:
        """Prepare descriptor lists. A failure shows as ``ReadFailed`` of the reads that use the program."""
        ...

    def post(self, read: Read) -> None:
        """Start a read. Ends in ``ReadCompleted`` or ``ReadFailed``, then its fences are judged."""
        ...

    def look(self, peer: PeerId, fence: Fence) -> None:
        """Read an epoch slot now, without any data. Ends in ``FenceJudged`` or ``FenceFailed``."""
        ...

    def cancel(self, read_ids: Sequence[int]) -> None:
        """Drop chunks that were not posted yet.

        Each unfinished read ends in ``ReadFailed`` (``cancelled``) once its posted chunks are terminal, which
        for a hung peer may be never; or in ``ReadCompleted`` if nothing was left to drop.
        """
        ...

    def renew_reader(self) -> None:
        """End what is in flight from peers that hang: destroy the reader and make another.

        No new chunk is posted until that is done. Peers that were not removed get ``RENEWAL_DRAIN_S`` for what they
        have in flight; what has not landed by then ends with ``peer_lost``, and its peer with ``PeerFailed``. All other
        peers and their programs are kept, and their reads go on. Ends in ``RenewalEnded``, unless closed before.
        """
        ...

    def close(self) -> None:
        """Destroy both agents and join the owner thread. Idempotent. Pending reads end as ``cancelled``.

        What is in flight gets two seconds to end by itself. There is no other bound: a call into the library that does
        not return may still write to memory, so the caller may not be told that it can be freed. Must not be called by
        the sink.
        """
        ...
