"""A data plane within one process over a modelled link, whose posts only queue work.

It stands in for a network card: a rate, a latency, and a send queue of 256 descriptors, of which the rest moves up only
when somebody makes progress. Without a progress thread that is done by the calls of the read thread, as in UCX. Every
call releases the interpreter lock and has to win it back, as NIXL's do.

Bytes move in two halves: one when the work is posted, and one when its end is seen. So a read that is answered too
early has torn bytes, and a reader that was destroyed writes nothing more.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvflow.errors import FailureCode
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, CheckedList, Chunk, PostedWork
from kvflow.reads.bounds import MergedDescriptor, merge
from kvflow.reads.contract import Carrier, PeerAddress
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport

_libc = ctypes.CDLL(None)
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class LinkModel:
    """What a link does.

    Attributes:
        bytes_per_s: rate.
        latency_s: from the end of the last byte on the wire until it shows.
        queue: descriptors that the card holds.
        progress: whether a thread of the library refills the card.
        call_s: seconds of one call, without the interpreter lock.
        post_s: seconds of one post beside its descriptors, likewise.
        descriptor_s: of each descriptor of a post.
        any_memory: whether memory of the host may be called VRAM.
        moves: whether bytes move. Without, only time passes: this memory is slower than the link.
    """

    bytes_per_s: float = 50e9
    latency_s: float = 10e-6
    queue: int = 256
    progress: bool = False
    call_s: float = 0.0
    post_s: float = 20e-6
    descriptor_s: float = 0.1e-6
    any_memory: bool = False
    moves: bool = True


@dataclass
class _Transfer:
    """Descriptors of one length that wait for the card or are on it."""

    nbytes: int
    left: int
    descriptor_s: float
    ends_at: float = float("inf")


@dataclass
class Link:
    """The card and the wire of one reader. Times are those of its calls; between them nothing else happens.

    Attributes:
        clock: seconds.
    """

    model: LinkModel
    clock: Callable[[], float] = time.monotonic
    _free_at: float = 0.0
    _waiting: deque = field(default_factory=deque)
    _on_card: deque = field(default_factory=deque)  # (end, count, seconds of each)

    def start(self, nbytes: int, descriptors: int) -> _Transfer:
        """Queue a read."""
        transfer = _Transfer(nbytes, descriptors, nbytes / descriptors / self.model.bytes_per_s)
        self._waiting.append(transfer)
        self.progress()
        return transfer

    def is_over(self, transfer: _Transfer) -> bool:
        """Make progress, and tell whether a read has ended."""
        self.progress()
        return transfer.ends_at <= self.clock()

    def progress(self) -> None:
        """Take from the card what has gone over the wire, and fill the card."""
        now = self.clock()
        room = self.model.queue
        while self._on_card and self._on_card[0][0] <= now:
            self._on_card.popleft()
        for end, count, each_s in self._on_card:
            room -= min(count, -int(-(end - now) // each_s))
        if self.model.progress:
            room = 1 << 40
        while self._waiting and room > 0:
            transfer = self._waiting[0]
            count = min(room, transfer.left)
            room -= count
            transfer.left -= count
            # A progress thread has filled the card without a pause, also while nobody called.
            self._free_at = max(self._free_at, now) + count * transfer.descriptor_s
            self._on_card.append((self._free_at, count, transfer.descriptor_s))
            if not transfer.left:
                transfer.ends_at = self._free_at + self.model.latency_s
                self._waiting.popleft()


class _Posted(PostedWork):
    def __init__(self, peer, transfer, runs=(), slots=None):
        self.peer, self.transfer, self.runs, self.slots = peer, transfer, runs, slots


class AsyncBackend(LoopbackBackend):
    """Move bytes between transports of one process at the pace of a modelled link. See ``Backend`` for the contract."""

    def __init__(self, agent_name, regions, epochs, model=None, *, clock=time.monotonic, spend=None) -> None:
        self.model = model or LinkModel()
        plain = [Region(region.address, region.nbytes) for region in regions] if self.model.any_memory else regions
        super().__init__(agent_name, plain, epochs)
        self._exporter.regions = (*regions, epochs)
        self._clock, self._spend = clock, spend or _call
        self.link = Link(self.model, clock)
        self.bytes_ended = 0
        # Or the kernel makes each of the short pauses below 50 us longer.
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def add(self, address: PeerAddress) -> Carrier:
        super().add(msgspec.structs.replace(address, planes={"loopback": address.planes["async"]}))
        return Carrier("rc_mlx5", "kind")

    def ends_at_once(self, peer: PeerId) -> bool:
        return True  # as NIXL says: over RDMA a post is short, too

    def chunk_descriptors(self, peer: PeerId) -> int:
        return 8192 if self.model.progress else 0

    def post(self, chunk: Chunk) -> PostedWork | int:
        portion = chunk.portion
        peer = self._peers[portion.peer]
        prepared: CheckedList = peer.prepared_lists[portion.list_id]
        self._require_open(peer)
        part = slice(chunk.first, chunk.stop)
        count = chunk.stop - chunk.first
        self._spend(self.model.call_s)
        self._spend(self.model.post_s + count * self.model.descriptor_s)
        if not self.model.moves:
            return _Posted(peer, self.link.start(count * prepared.source.nbytes_max, count))
        runs = merge(prepared.source, portion.source_index[part], prepared.target, portion.target_index[part])
        self._copy(peer, runs[::2])
        transfer = self.link.start(sum(run.nbytes for run in runs), len(runs))
        return _Posted(peer, transfer, runs[1::2])

    def post_check(self, peer_id, first, last, reads, *, fence):
        peer = self._peers[peer_id]
        self._require_open(peer)
        self._spend(self.model.call_s)
        self._spend(self.model.post_s)
        return _Posted(peer, self.link.start(8 * (last + 1 - first), 1), slots=(first, last))

    def poll(self, posted: PostedWork):
        self._spend(self.model.call_s)
        self._require_open(posted.peer)
        if not self.link.is_over(posted.transfer):
            return None
        self._spend(self.model.call_s)  # to release the handle
        self._copy(posted.peer, posted.runs)
        if posted.slots is None:
            self.bytes_ended += posted.transfer.nbytes
            return 0
        first, last = posted.slots
        with posted.peer.exporter.lock:
            return list((ctypes.c_uint64 * (last + 1 - first)).from_address(posted.peer.epochs.address + 8 * first))

    def reset(self) -> None:
        super().reset()
        self.link = Link(self.model, self._clock)

    def _copy(self, peer, runs: list[MergedDescriptor]) -> None:
        with peer.exporter.lock:
            self._require_open(peer)
            for run in runs:
                ctypes.memmove(run.target_address, run.source_address, run.nbytes)

    def _require_open(self, peer) -> None:
        if peer.exporter.closed:
            raise BackendError(FailureCode.PEER_LOST, "the exporter was closed")


def _call(seconds: float) -> None:
    """Take so long without the interpreter lock, as a call into a library does."""
    if seconds:
        _libc.usleep(round(seconds * 1e6))
    else:
        _libc.getppid()


class AsyncTransport(ThreadedTransport):
    """The data plane over a modelled link.

    Args:
        agent_name: unique per incarnation.
        sink: called on the read thread.
        staging_bytes: memory for staged lists; 0 for none.
        inline_s_max: as of ``ThreadedTransport``.
        reader_progress: whether a thread of the library refills the card.
        model: of the link.
    """

    def __init__(
        self, agent_name, sink, staging_bytes=0, *, inline_s_max=None, reader_progress=False, model=None
    ) -> None:
        model = model or LinkModel(progress=reader_progress)
        self.backend = None

        def opened(regions, epochs, *_):
            self.backend = AsyncBackend(agent_name, regions, epochs, model)
            return self.backend

        super().__init__("async", {"async": opened}, sink, StagingMemory(staging_bytes), inline_s_max=inline_s_max)
