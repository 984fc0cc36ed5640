"""The contract between a worker and its data plane.

A transport has two independent agents. Peers read from the *exporter*; the *reader* reads from peers. They share
nothing, so destroying the reader does not disturb peers that read from this worker.

Lifecycle: construct -> ``start`` (registers memory, blocks) -> any of the other calls -> ``close`` (blocks).
    After ``close`` has returned, no byte of the registered memory is written. A transport starts once. Commands after
    ``close`` are ignored, and cause no event.
Rank reads: a ``RankRead`` is everything that one source rank gives to one pull. The transport checks the lease first if
the read asks for it, and moves the bytes in chunks. Once all bytes have arrived, it reads the epoch slot (the *fence*)
and compares it. It answers with exactly one ``ReadEnded``. If the first check does not find the lease held, no byte is
read. The answer is *terminal*: the read writes nothing after it.
Batches: reads that are posted together share work if possible: one check for many leases of a peer, one chunk for small
    reads of one prepared list, one wake-up. Each read succeeds or fails alone.
Inline: ``post`` may move small reads at once, on the calling thread, and return their answers. It does so only while
    the read thread is idle, for peers that were read before, and if that is expected to take less time than the caller
    allows: what handing a read over to the read thread costs on this host, as ``HandOver`` measures it. All other reads
    go to the read thread, and their answers to ``sink``. The same code runs in both cases. What one turn of the event
    loop posts inline is expected to take at most ``TURN_S_MAX`` together: a bound, not a choice.
Threading: any thread may make any call, and every call except ``start`` and ``close`` returns at once. Events are
    passed to ``sink`` on the read thread; other events of an inline post on the thread that posts. The sink must be
    quick and must not raise (a worker's sink is ``loop.call_soon_threadsafe``).
Order: commands are processed in order. Chunks of all reads are posted one at a time, in the order of ``lanes``.
Failure: a command never raises because of a peer. An error of one peer ends all reads of that peer, and then reports
    ``PeerFailed``. Chunks that are still in flight end later, and their reads with them. Other peers are not affected.
    Between ``PeerFailed`` and the next ``PeerAdded``, reads of the peer fail with ``peer_lost``.
Last resort: reads from a hung peer may never end. ``reset_reader`` ends them: it destroys the reader and creates a new
    one. The exporter continues.
Staging: a chunk of a staged read is posted when a buffer is free; until then the reads of that peer wait. A buffer is
    free again when its chunk has ended, so hung peers may keep all buffers: ``StagingUse`` shows it, and
    ``reset_reader`` frees them. A cancelled read copies nothing out of its buffers.
Memory: the caller keeps registered regions alive until ``close`` has returned. Posted arrays belong to the transport.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvflow.errors import FailureCode
from kvflow.events import PlaneOmitted
from kvflow.ids import Credentials, Ids, Int32s, PeerId
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import AnyBinding, Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.staging import Scatter
from kvflow.validation import Count

CHUNK_BYTES_MAX = 8 << 20  # most bytes of one chunk; over shared memory a post is the copy: 8 MiB take about 1 ms
SHARED_BYTES_MIN = 2 << 20  # least bytes of a chunk that several threads copy; such a chunk is never read inline
CHUNK_DESCRIPTORS_MAX = 256  # most merged descriptors of one chunk: at 2 to 9 us each, about 1 ms, too
SPAN_MAX = 512  # most epoch slots that one check reads: 4 KiB
TURN_S_MAX = 500e-6
"""Longest time that the inline posts of pulls that start in one turn of the event loop are expected to take: they begin
in its first half, and no post is expected to take more than half of it. The rest is posted at once in the next turn."""
RESET_DRAIN_S = 2.0  # how long a reader reset waits for healthy peers: two chunks of 8 MiB take 2 s at 70 Mbit/s

PRIORITY_MAX = 1 << 31
"""Largest priority in either direction. A float still adds it to a time with enough precision."""

ReadPhase = Literal["queue", "wire", "fence"]
Verdict = Literal["held", "early", "stale", "failed"]


class Part(Struct, frozen=True, eq=False, gc=False):
    """What one group of a source rank gives to a pull: at least one pair of units, ascending by source.

    ``binding`` is that of the list, for the report of the pull; the data plane uses that of its list.
    """

    list_id: int
    pairs: UnitPairs
    binding: AnyBinding | None = None


@dataclass(slots=True)
class Outstanding:
    """Whether a peer owes something that was posted. Thread: the data plane writes, any thread reads.

    ``since``: when it last completed something, or when something was first posted if that is later, in seconds of the
    data plane's clock; infinite while it owes nothing.
    """

    since: float = math.inf


class ArrivedChunk(NamedTuple):
    """One chunk of a read that has arrived, for the trace of its pull. Other reads may have shared it.

    ``read_bytes`` of the read had arrived by then. ``descriptors`` are those of the chunk before neighbors merge.
    """

    list_id: int
    posted_at: float
    arrived_at: float
    read_bytes: int
    descriptors: int


class RankRead(Struct, eq=False, gc=False):
    """Everything that one source rank gives to one pull: check, chunks, fence.

    The data plane writes the fields from ``phase`` on; any thread reads them. Times are seconds of its clock.

    Attributes:
        read_id: unique in its data plane.
        parts: what to copy, group by group.
        check_first: whether the ticket may be early. Then the slot is compared before any chunk is posted, and the read
            may end ``early`` or ``stale`` before a byte is read.
        priority: lower is more urgent.
        phase: ``queue``: no chunk was posted yet; includes the first check. ``wire``: chunks were posted.
            ``fence``: all bytes have arrived.
        since: when it entered this phase; infinite before the data plane has taken it.
        outstanding: what its peer owes.
        started_at: when it left the queue; 0 before.
        nbytes: bytes that have arrived so far.
        arrived: takes the chunks that arrive, if the pull is traced.
    """

    read_id: int
    peer: PeerId
    lease: LeaseName
    parts: tuple[Part, ...]
    check_first: bool = False
    priority: int = 0
    phase: ReadPhase = "queue"
    since: float = math.inf
    outstanding: Outstanding | None = None
    started_at: float = 0.0
    nbytes: int = 0
    arrived: list[ArrivedChunk] | None = None


class CancelReads(Struct, frozen=True):
    """Drop the chunks of these reads that were not posted yet."""

    read_ids: tuple[int, ...]


class ReadEnded(Struct, frozen=True, gc=False):
    """A rank read has ended, and will not write to memory. Times are seconds of the data plane's clock.

    Attributes:
        verdict: ``held``: all bytes are in the target, and the fence found the lease held. ``early``: the lease is not
            admitted yet; read again later. ``stale``: the lease has ended. ``failed``: see ``code``.
        code: code of a failure: ``peer_lost``, ``cancelled``, ``program_unknown``, ``bounds`` or ``transport_error``.
        phase: its phase when it ended.
        observed: value of the epoch slot, if it was read.
        unserved: the lease is held now, but the exporter refused bytes before: read again. Only with ``early``.
        nbytes: bytes that were filled, also by a read that failed.
        chunks: how many chunks carried it, some of them shared with other reads.
        started_at: when it left the queue, before its first chunk was bound; 0 if no chunk was.
        arrived_at: when its last byte had arrived; 0 if none has.
        bind_s: of its chunks, in computing descriptor numbers.
        post_s: of its chunks, in posting calls (over shared memory this is the copy).
        scatter_s: in copies from staging buffers.
        fence_s: from the last byte to the verdict.
    """

    read_id: int
    verdict: Verdict
    code: str = ""
    detail: str = ""
    phase: ReadPhase = "fence"
    observed: int = 0
    unserved: bool = False
    nbytes: int = 0
    chunks: int = 0
    started_at: float = 0.0
    arrived_at: float = 0.0
    bind_s: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0
    fence_s: float = 0.0


NOBODY = Credentials("", "", 0, "", b"")
"""The credentials of a reader that has none. A data plane that asks for credentials refuses it."""


class Published(Struct, frozen=True, kw_only=True):
    """What peers need to read from a worker, and the data planes that are missing.

    Attributes:
        planes: name of each data plane -> opaque description of its exporter.
        data_endpoint: where the TCP plane is reached, ``tcp://HOST:PORT``; empty without one.
        certificate: with which the TCP plane encrypts; empty if it does not.
    """

    planes: dict[str, bytes]
    data_endpoint: str = ""
    certificate: bytes = b""
    missing: tuple[PlaneOmitted, ...] = ()

    @property
    def names(self) -> str:
        """The data planes, joined by a plus."""
        return "+".join(self.planes)


REQUIRED = "require_encryption is true"


class PeerAddress(Struct, frozen=True):
    """What a reader must know about a peer's exporter.

    Peers of one exporter share its connection, and a failure of one is a failure of all.

    Attributes:
        planes: name of each data plane that may be used -> opaque description of the exporter, at most 1 MiB.
        epochs: the peer's epoch table, slots of u64.
        agent: the name that the peer's transport was constructed with; other metadata is refused. None accepts any.
        data_endpoint: where its TCP plane is, ``tcp://ADDRESS:PORT`` with a numeric address, because names are not
            resolved here. Empty without one.
        credentials: what this worker presents to its TCP plane.
        weight: chunks in one turn of the peer while other peers wait, 1 to 64.
        encrypted: whether a plane that does not encrypt may read within this host only.
    """

    peer: PeerId
    planes: dict[str, bytes]
    epochs: Region
    agent: str | None = None
    data_endpoint: str = ""
    credentials: Credentials = NOBODY
    weight: int = 1
    encrypted: bool = False


class PairBinder(Protocol):
    """What the transport must know about a group's plan to read with it. The numbers are those of one pair of units."""

    unit_bytes: int  # that it fills
    read_bytes: int  # that are read for it: more if it is staged
    unit_descriptors: int  # before neighbors merge

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the descriptor numbers of these pairs, cut into chunks: run by run, and within a run pair by pair."""
        ...

    @property
    def number(self) -> Callable[[Ids, Ids], tuple[Int32s, Int32s]] | None:
        """The same without cuts. None unless each number is that of the unit and a constant of its run and side."""
        ...


class PreparedList(Struct, frozen=True, eq=False):
    """Two prepared descriptor lists: what can be read from one peer under one plan.

    A list with ``scatter`` is *staged*: each chunk of its reads gets a free staging buffer, is fetched into it, and is
    scattered from there when it has arrived. One descriptor of each row then fetches one *unit*. The target rows are
    those of one buffer, with a descriptor for each place. The source's descriptors are divided evenly among them, in
    order.

    Attributes:
        list_id: unique in this transport while the peer is added.
        source_rows: int64, shape (rows, 5): address, nbytes, device, stride, count. One row is ``count``
            descriptors; descriptor numbers run through the rows in order. All within the peer's regions.
            A row with a count above one has ``stride >= nbytes``.
        target_rows: the same for our own memory, each row within one registered region; for a staged list, offsets from
            the start of a staging buffer.
        source_memory: memory kind of all source rows, ``DRAM`` or ``VRAM``.
        target_memory: memory kind of all target rows.
        scatter: the copies from a buffer to our own memory, both of the host; None: not staged.
        group: the group of the peer's manifest that the source rows belong to.
        binding: turns pairs of units into descriptor numbers of the two lists; for a staged list, into unit numbers.
    """

    list_id: int
    peer: PeerId
    source_rows: npt.NDArray[np.int64]
    target_rows: npt.NDArray[np.int64]
    source_memory: str = "DRAM"
    target_memory: str = "DRAM"
    scatter: Scatter | None = None
    group: int = 0
    binding: PairBinder | None = None


Piece = tuple[int, int]  # address and length of bytes that are contiguous in device memory


class DeviceMemory(Protocol):
    """Copies between host memory and the registered memory of devices. Thread: any; each call blocks until it is done.

    ``parts`` are not empty, each within one registered region of that device; together they are as long as the buffer.
    If a call raises, the device cannot be used, and the caller must not use the bytes.
    """

    def fetch(self, device: int, parts: Sequence[Piece], into: memoryview) -> None:
        """Copy parts of device memory to host memory, one after the other. On return all bytes are there."""
        ...

    def store(self, device: int, parts: Sequence[Piece], content: memoryview) -> None:
        """Copy host memory to parts of device memory. Work that the device starts after the return sees the bytes."""
        ...


class Serving(Struct, frozen=True, eq=False):
    """What a data plane that serves reads must know about its worker. Its functions are called on any thread.

    Attributes:
        tracks: the tracks of each group, see ``tracks_of``.
        blocks_of: slot and epoch -> the block ids of each group while that lease is held, or None. Takes no lock.
        admits: whether a public key, in hex, may still read from this worker.
        pass_key: 32 random bytes, from which passes are made.
        vouches: slot, epoch and MAC -> whether the lease is held and the MAC is that of its ticket. Takes no lock.
            None: readers need no MAC.
        device_memory: copies to and from device memory; None: reads from and to device memory are refused.
        keys_differ: whether each reader has its own key: limits of one reader then count by key, and not by the
            name that a reader gives itself.
    """

    tracks: tuple[tuple[Track, ...], ...]
    blocks_of: Callable[[int, int], Sequence[Sequence[int]] | None]
    admits: Callable[[str], bool]
    pass_key: bytes
    vouches: Callable[[int, int, bytes], bool] | None = None
    device_memory: DeviceMemory | None = None
    keys_differ: bool = False


SERVES_NOTHING = Serving((), lambda _slot, _epoch: None, lambda _public_key: False, b"")
"""The value for a worker whose planes have one-sided reads only."""


class StagingUse(Struct, frozen=True, kw_only=True):
    """The staging buffers of a transport at one moment. Each is free, or has one chunk in flight.

    Attributes:
        buffer_bytes: length of each buffer.
        quarantined: buffers in use whose read was cancelled or whose peer failed. They are free again when the
            transport knows that nothing writes into them.
        waiting: peers without a read in flight whose next chunk needs a buffer while none is free. They owe nothing.
    """

    buffers: Count = 0
    buffer_bytes: Count = 0
    in_use: Count = 0
    quarantined: Count = 0
    waiting: Annotated[frozenset[PeerId], Meta(max_length=1 << 16)] = frozenset()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the buffers in quarantine."""
        return self.quarantined * self.buffer_bytes

    @property
    def starved(self) -> bool:
        """Whether peers wait for a buffer while every one is in quarantine."""
        return bool(self.waiting) and self.quarantined == self.buffers


class Carrier(Struct, frozen=True):
    """What carries the bytes that are read from one peer. The choice of the plane adds the last three.

    Attributes:
        name: ``loopback``, or UCX's name of its transport: ``cma`` (shared memory), ``rc_mlx5``, ``cuda_ipc``.
            Several with a bar between them if it is one of these; ``unknown`` if not even that is known.
        known_by: ``kind``: the data plane has no other transport. ``addresses``: only one transport of both sides
            reaches the peer. ``candidates``: several do. ``nothing``: the two sides could not be compared.
        passed_over: why each plane that is preferred to this one was not taken.
        remedy: what to do about that, if the pair should be read faster; empty: nothing.
    """

    name: str
    known_by: str
    plane: str = ""
    passed_over: str = ""
    remedy: str = ""


UNKNOWN_CARRIER = Carrier("unknown", "nothing")


class PeerAdded(Struct, frozen=True):
    """The peer was added. The first read connects (10 to 40 ms), and shows whether the peer answers."""

    peer: PeerId
    carrier: Carrier = UNKNOWN_CARRIER


class RateLearned(Struct, frozen=True):
    """The rate of a peer: bytes, seconds with some in flight, kinds of both memories. Inline reads do not count."""

    peer: PeerId
    nbytes: int
    busy_s: float
    source_memory: str
    target_memory: str


class PeerFailed(Struct, frozen=True):
    """The peer is lost or could not be added. Its prepared lists are gone. Add it again to retry.

    ``code``: ``peer_lost``, ``metadata_invalid``, ``transport_error``, or ``plane_unfit`` if no data plane of both
    sides can read from it. ``detail``: the message of the foreign library.
    """

    peer: PeerId
    code: FailureCode
    detail: str


class ResetDone(Struct, frozen=True):
    """A reset of the reader has ended. Its terminal events were passed before.

    Attributes:
        ended: chunks and fences in flight that the reset ended; 0 if all had ended in time, so the reader was kept.
        drain_s: without new chunks, while chunks of other peers had time to arrive.
        reset_s: to renew the reader, and to add peers and prepared lists again.
    """

    ended: int
    drain_s: float
    reset_s: float


TransportEvent = PeerAdded | RateLearned | PeerFailed | ReadEnded | ResetDone
Sink = Callable[[TransportEvent], None]


class Transport(Protocol):
    """The data plane of one worker. See the module's docstring for the contract."""

    @property
    def name(self) -> str:
        """The setting for data planes: ``auto``, ``nixl``, ``tcp`` or ``loopback``."""
        ...

    def start(self, regions: Sequence[Region], epochs: Region, serving: Serving = SERVES_NOTHING) -> None:
        """Register the cache, and our epoch table in DRAM, with both agents, and start the read thread.

        Raises:
            TransportUnavailable: no data plane, or not the required one, can start.
        """
        ...

    def staging(self) -> StagingUse:
        """Return how many staging buffers are taken. Thread: any."""
        ...

    def published(self) -> Published:
        """Return what a peer needs to read from us; constant between ``start`` and ``close``."""
        ...

    def add_peer(self, address: PeerAddress) -> None:
        """Connect to a peer's exporter. The result is ``PeerAdded`` or ``PeerFailed``. Adding a peer again is allowed.

        A peer that was removed or failed is added again once nothing of it is in flight. For a hung peer that may never
        happen.
        """
        ...

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """Forget a peer, its prepared lists and its unposted reads. ``gone``: it is never added again."""
        ...

    def prepare(self, prepared_list: PreparedList) -> None:
        """Prepare descriptor lists. If this fails, the reads that use the list fail."""
        ...

    def post(self, reads: Sequence[RankRead], within_s: float = TURN_S_MAX / 2) -> list[ReadEnded]:
        """Start reads from any peers. Thread: one at a time; the worker's event loop.

        ``within_s``: longest time that they may be expected to take on the calling thread. Return the answers of reads
        that were moved at once, on the calling thread; ``sink`` does not get them.
        """
        ...

    def cancel(self, read_ids: Sequence[int]) -> None:
        """Drop chunks that were not posted yet.

        Each unfinished read ends ``failed`` with ``cancelled`` once its posted chunks have ended; for a hung peer that
        may never happen. A read of which everything was posted ends normally. Unknown ids are ignored.
        """
        ...

    def reset_reader(self) -> None:
        """End what is in flight from hung peers: destroy the reader and create a new one.

        No new chunk is posted until then. Peers that were not removed get ``RESET_DRAIN_S`` for what they have in
        flight. What has not arrived by then ends with ``peer_lost``, and its peer with ``PeerFailed``. All others are
        kept, and their reads continue. The result is ``ResetDone``, unless the transport is closed before.
        """
        ...

    def close(self) -> None:
        """Destroy both agents and join the read thread. Idempotent. Pending reads end as ``cancelled``.

        What is in flight gets two seconds to end. If a call into the library does not return, ``close`` does not return
        either, because that call may still write to memory. The sink must not call ``close``.
        """
        ...
