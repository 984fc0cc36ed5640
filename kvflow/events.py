"""The events of a worker: one frozen type for each.

A worker logs every event under the name of its type: ``TransferCompleted`` as ``transfer.completed``, ``PullFailed`` as
``transfer.failed`` and ``WorkerStopped`` as ``worker.closed``. Hooks
(``kvflow.open_worker(..., hooks=[...])``) take the typed event. The names and fields of the events are public.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from kvflow.report import TransferReport

Outcome = Literal["released", "expired", "unread", "revoked"]
"""How a lease ends."""

TIMED_OUT = ("expired", "unread")  # outcomes of leases whose readers did not come in time


class WorkerOpened(Struct, frozen=True):
    """The worker listens for peers."""

    endpoint: str  # control endpoint that peers dial
    transport: str  # data planes of the worker, joined by a plus sign, in order of preference: ``nixl+tcp``
    num_blocks: int  # blocks of the cache
    bytes_per_block: int  # bytes of the backing allocation per block
    http: str = ""  # ``HOST:PORT`` of the worker's HTTP server; empty if it has none


class PlaneOmitted(Struct, frozen=True):
    """This machine cannot use a data plane. The worker uses the other planes, as a reader and as a source."""

    plane: str  # data plane that is missing: ``nixl`` or ``tcp``
    code: str  # code of the error with which it did not start
    detail: str  # message of that error
    remedy: str  # what to do about it


class WorkerDrained(Struct, frozen=True):
    """The worker has stopped draining, because nothing is left or because the deadline has passed."""

    leases_left: int  # leases that the worker still holds
    pulls_left: int  # pulls that have not ended, or are quarantined
    quarantined_left: int  # pulls whose target blocks may still be written
    waited_s: float  # seconds spent draining


class WorkerStopped(Struct, frozen=True):
    """The worker has closed. Its agents are destroyed and its leases are revoked."""

    leases_revoked: int  # leases that the worker still held
    pulls_cancelled: int  # pulls that were still open


class OfferAdmitted(Struct, frozen=True):
    """The producer holds a new lease."""

    request_id: str  # the producer's name of the request
    num_blocks: int  # blocks of all groups
    # seconds until the lease expires, unless a consumer renews it; 0 if only the producer ends it: ``keep``
    lease_s: float
    # W3C trace context of the request; empty if the ticket has none. The record has ``trace_id`` instead.
    traceparent: str = ""
    kind: str = "offer"  # ``offer``; ``kept``: ``keep``; or ``open``: ``offer_progressive``


class OfferRefused(Struct, frozen=True):
    """An offer has failed before the producer held its lease. A ticket that was already issued for it is void."""

    request_id: str  # the producer's name of the request
    code: str  # code of the error that the caller gets
    detail: str  # message of that error
    remedy: str  # what to do about it


class PeerConnected(Struct, frozen=True):
    """The worker has connected to a peer and can read from it."""

    peer: str  # ``engine/rank/incarnation`` of the peer
    endpoint: str  # control endpoint of the peer
    handshake_s: float  # seconds from dialing to the end of the handshake
    # seconds by which the peer's wall clock is ahead of ours; None if the peer does not say
    clock_ahead_s: float | None = None
    clock_error_s: float | None = None  # largest error of ``clock_ahead_s`` in seconds; None likewise
    # transport that carries the bytes, by UCX's name: ``cma`` (shared memory), ``tcp``, ``rc_mlx5``, ``cuda_ipc``; or
    # ``loopback``. Several names with a bar between them: one of these. ``unknown`` if nobody can tell.
    transport: str = ""
    transport_known_by: str = ""  # how that is known: ``kind``, ``addresses``, ``candidates`` or ``nothing``
    plane: str = ""  # data plane that was chosen for the peer: ``nixl``, ``tcp`` or ``loopback``
    # model that both sides name; empty if a side names none. Then only shapes and dtypes were compared.
    model: str = ""
    missing_layers: int = 0  # layers of the peer that our cache does not have, such as those of another pipeline stage
    passed_over: str = ""  # why each data plane that is preferred to this one was not taken
    # what to do about that if both caches are on GPUs, or both hosts have RDMA devices; otherwise empty
    remedy: str = ""


class LayersOmitted(Struct, frozen=True):
    """Layers of one side alone are not read: a draft model's, say. Comes when an engine is first read."""

    remote_engine_id: str  # the engine
    side: str  # who has them: ``source`` (the engine) or ``target``
    layers: str  # their names, at most four
    detail: str  # what it costs
    remedy: str  # what to do about it


class PeerMeasured(Struct, frozen=True):
    """The first 64 MiB have been read from a peer over its present connection, so that the rate is known.

    Neither small reads that the worker moves without its read thread count, nor the first, which also connects.
    """

    peer: str  # ``engine/rank/incarnation`` of the peer
    gb_per_s: float  # 10**9 bytes per second, while something of the peer was in flight
    nbytes: int  # bytes that were counted
    source_memory: str  # where the peer's cache is: ``DRAM`` (host memory) or ``VRAM`` (a GPU)
    target_memory: str  # where our cache is
    transport: str  # transport as in ``PeerConnected``
    plane: str  # data plane as in ``PeerConnected``


class PeerSlow(Struct, frozen=True):
    """Bytes move from GPU to GPU at less than 2 GB/s, which is far below what NVLink, PCIe or RDMA carry.

    Comes after ``PeerMeasured``, once for each connection.
    """

    peer: str  # ``engine/rank/incarnation`` of the peer
    gb_per_s: float  # rate as in ``PeerMeasured``
    transport: str  # transport as in ``PeerConnected``
    plane: str  # data plane as in ``PeerConnected``
    detail: str  # the likely cause
    remedy: str  # what to check


class PeerDropped(Struct, frozen=True):
    """The worker has closed its connection to a peer. It connects again when a pull needs the peer."""

    peer: str  # ``engine/rank/incarnation`` of the peer, or its endpoint if the handshake was not complete
    code: str  # ``peer_lost``, ``peer_closed``, or the code of another failure
    detail: str  # what happened


class BreakerOpened(Struct, frozen=True):
    """Connecting to an address has failed several times in a row. Pulls from it fail at once until the next attempt."""

    endpoint: str  # the address
    failures: int  # failed attempts in a row
    retry_s: float  # seconds until the next attempt


class BreakerClosed(Struct, frozen=True):
    """An address answers again after several failures in a row."""

    endpoint: str  # the address


class ConsumerRejected(Struct, frozen=True):
    """The producer has dropped a consumer that broke the protocol or runs an incompatible release."""

    peer: str  # ``engine/rank/incarnation`` of the consumer
    code: str  # which rule it broke, or ``release_mismatch``
    detail: str  # what happened


class ReaderReset(Struct, frozen=True):
    """The worker has replaced its reading agent, because some of its reads might never have ended."""

    # limit that was exceeded: ``quarantine_bytes_max`` or ``quarantine_s_max``; ``staging_bytes`` if all staging
    # memory was in quarantine
    setting: str
    num_blocks: int  # blocks that were in quarantine
    ended: int  # chunks and fences in flight that the reset ended
    drain_s: float  # seconds in which the worker posted no new chunk, while healthy peers finished theirs
    reset_s: float  # seconds in which nothing moved, until the worker could read from every healthy peer again


class LeaseEnded(Struct, frozen=True, gc=False):
    """A lease has ended: its epoch is raised, and the producer may reuse its blocks."""

    request_id: str  # the producer's name of the request
    outcome: Outcome  # how it ended: ``released``, ``expired``, ``unread`` or ``revoked``
    held_s: float  # seconds for which the producer held it
    # W3C trace context of the request; empty if the ticket has none. The record has ``trace_id`` instead.
    traceparent: str = ""
    kind: str = "offer"  # ``offer``; ``kept``: ``keep``; or ``open``: ``offer_progressive``
    # of an open one: seconds since its admission, and the tokens that had settled then, at each advance and the seal.
    # At most 256.
    advances: tuple[tuple[float, int], ...] = ()


class TransferStarted(Struct, frozen=True):
    """The worker has handed the reads of a pull to the data plane. A pull that ends before that has no such event."""

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request


class TransferRetried(Struct, frozen=True):
    """A source rank does not hold the lease yet. It is looked for again, without another event, and read once held."""

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request
    peer: str  # ``engine/rank/incarnation`` of the source rank


class TransferCompleted(Struct, frozen=True):
    """A pull has delivered: all bytes have arrived and every fence was held. The target blocks may be used."""

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request
    report: TransferReport  # what moved, and where the time went
    local_request_id: str = ""  # the consumer's own name of the request; empty if it gave none
    remote_engine_id: str = ""  # engine of the producer
    # W3C trace context of the request; empty if the ticket has none. The record has ``trace_id`` instead.
    traceparent: str = ""


class PullFailed(Struct, frozen=True):
    """A pull has failed and delivers nothing.

    There is one event for each call of ``pull`` that fails, however early, and for each call of ``record_refusal``.
    """

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request; empty if the caller passed no ticket
    code: str  # code of the error that the caller gets
    # phase that failed: ``check`` of the call and its ticket, ``connect`` or ``handshake`` with the peers, ``plan``
    # of what each source rank gives, ``compute`` of an open offer, ``queue``, ``wire`` or ``fence``
    phase: str
    peer: str  # ``engine/rank/incarnation`` of the source rank concerned; empty if none is
    detail: str  # what happened
    quarantined: bool  # True while a read in flight may still write into the target blocks
    cause: str = ""  # code of the data plane or the scheduler, where it says more than ``code``
    remedy: str = ""  # what to do about it
    local_request_id: str = ""  # the consumer's own name of the request; empty if it gave none
    nbytes: int = 0  # bytes that have certainly arrived, without those in flight
    nbytes_wanted: int = 0  # bytes of the whole pull; 0 if not known yet
    transport: str = ""  # transport as in ``TransferReport``; empty if no peer is connected
    plane: str = ""  # data plane as in ``TransferReport``; empty if no peer is connected
    # seconds since the ticket was signed, by the clocks of both sides; None if the ticket does not say
    ticket_age_s: float | None = None
    lease_ended_by: str = ""  # how the lease ended, for the code ``stale_lease``: see ``StaleLease``
    # seconds from the end of the lease to our question to the producer; None if not known
    lease_ended_s: float | None = None
    timings_s: dict[str, float] = {}  # seconds per phase so far, as in ``TransferReport``
    remote_engine_id: str = ""  # engine of the producer; empty if the caller passed no ticket
    # W3C trace context of the request; empty if the ticket has none. The record has ``trace_id`` instead.
    traceparent: str = ""


class PrefixFetched(Struct, frozen=True):
    """An engine has read the beginning of a prompt from one that keeps it. Each rank has an event of its own."""

    request_id: str  # the producer's name of the kept lease
    local_request_id: str  # the consumer's own name of the request
    source: str  # control endpoint of the producer that was asked
    tokens_held: int  # first tokens of the prompt that it holds
    tokens: int  # tokens that were read, behind those that the consumer's cache had
    asked_s: float  # seconds until the answer of the producer
    seconds: float = 0.0  # seconds of the pull, as ``total`` of its report
    nbytes: int = 0  # bytes that this rank has read


class TracedGroup(Struct, frozen=True):
    """What one group of one source rank gave to a traced pull."""

    peer: int  # index into the peers of the event
    source_group: int  # number of the group at the source
    target_group: int  # number of our group
    source_units: int  # units of one source block. Blocks of different sizes are cut into units of one size.
    target_units: int  # units of one of our blocks
    unit_bytes: int  # bytes of one unit
    unit_descriptors: int  # descriptors of one unit before neighbors merge: 1 if both sides keep it in one piece
    descriptors: int  # descriptors of all units after neighbors have merged
    staged: bool  # whether the units passed through staging buffers
    # first source unit, first target unit, and count, of each run of units that ascends by one on both sides. A unit
    # is ``block * units + number in the block``.
    pairs: tuple[tuple[int, int, int], ...]
    pairs_omitted: int = 0  # runs that are not listed


class TransferTraced(Struct, frozen=True):
    """What a pull has read in detail, for ``kvflow trace``. It follows the event that the pull has ended."""

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request
    peers: tuple[str, ...]  # ``engine/rank/incarnation`` of each source rank that was read
    # what each group of each rank gave: rank as index into ``peers``, groups of both sides, units in a block of each
    # side, bytes and descriptors of a unit, descriptors after merging, whether it was staged, and the runs of paired
    # units: first source unit, first target unit, count. At most 4,096 runs for a group.
    groups: tuple[TracedGroup, ...]
    # each chunk that has arrived: index into ``groups``, seconds from the call of ``pull`` to the post and to the
    # arrival, bytes, and descriptors before merging. At most 4,096.
    chunks: tuple[tuple[int, float, float, int, int], ...]
    chunks_omitted: int = 0  # chunks that are not listed
    # of an open offer, the last 4,096 ranges that were read one after the other: first token, token behind the last,
    # seconds from the call of ``pull`` to the post and to the arrival
    ranges: tuple[tuple[int, int, float, float], ...] = ()


class TransferQuiesced(Struct, frozen=True):
    """Nothing writes into the target blocks of a failed pull now: the consumer may reuse them."""

    pull_id: int  # number of the pull, unique in the worker
    request_id: str  # the producer's name of the request


Event = (
    WorkerOpened
    | PlaneOmitted
    | WorkerDrained
    | WorkerStopped
    | OfferAdmitted
    | OfferRefused
    | PeerConnected
    | LayersOmitted
    | PeerMeasured
    | PeerSlow
    | PeerDropped
    | BreakerOpened
    | BreakerClosed
    | ConsumerRejected
    | ReaderReset
    | LeaseEnded
    | TransferStarted
    | TransferRetried
    | TransferCompleted
    | PullFailed
    | PrefixFetched
    | TransferTraced
    | TransferQuiesced
)
"""Every event of a worker."""

# Of events whose types would have the name of an error.
_NAMES: dict[type[Event], str] = {PullFailed: "transfer.failed", WorkerStopped: "worker.closed"}

Hook = Callable[[Event], None]
"""Takes every event of a worker, on the thread where it happens. It must return quickly. The worker logs what it raises
and goes on. ``TransferTraced`` costs time for each chunk and block: only ``OnlyEvents`` asks for it."""


OneEvent = TypeVar("OneEvent", bound=Event)


@dataclass(frozen=True)
class OnlyEvents(Generic[OneEvent]):
    """A hook that takes events of one type. A worker does not create events that no hook and no logger takes.

    Attributes:
        kind: type of the events.
        hook: takes them.
    """

    kind: type[OneEvent]
    hook: Callable[[OneEvent], None]

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, self.kind):
            self.hook(event)


@cache
def event_name(kind: type[Event]) -> str:
    """Return the name of a type of events in the log: ``transfer.completed`` for ``TransferCompleted``."""
    if kind in _NAMES:
        return _NAMES[kind]
    noun, *verb = re.findall("[A-Z][a-z]+", kind.__name__)
    return f"{noun}.{'_'.join(verb)}".lower()
