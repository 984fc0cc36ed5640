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

Outcome = Literal["released", "expired", "revoked"]
"""How a lease ends."""


class WorkerOpened(Struct, frozen=True):
    """The worker listens for peers.

    Attributes:
        endpoint: control endpoint that peers dial.
        transport: data planes of the worker, joined by a plus sign, in order of preference: ``nixl+tcp``.
        num_blocks: blocks of the cache.
        bytes_per_block: bytes of the backing allocation per block.
        http: ``HOST:PORT`` of the worker's HTTP server; empty if it has none.
    """

    endpoint: str
    transport: str
    num_blocks: int
    bytes_per_block: int
    http: str = ""


class PlaneOmitted(Struct, frozen=True):
    """This machine cannot use a data plane. The worker uses the other planes, as a reader and as a source.

    Attributes:
        plane: data plane that is missing: ``nixl`` or ``tcp``.
        code: code of the error with which it did not start.
        detail: message of that error.
        remedy: what to do about it.
    """

    plane: str
    code: str
    detail: str
    remedy: str


class WorkerDrained(Struct, frozen=True):
    """The worker has stopped draining, because nothing is left or because the deadline has passed.

    Attributes:
        leases_left: leases that the worker still holds.
        pulls_left: pulls that are still open or quarantined.
        quarantined_left: pulls whose target blocks may still be written.
        waited_s: seconds spent draining.
    """

    leases_left: int
    pulls_left: int
    quarantined_left: int
    waited_s: float


class WorkerStopped(Struct, frozen=True):
    """The worker has closed. Its agents are destroyed and its leases are revoked.

    Attributes:
        leases_revoked: leases that the worker still held.
        pulls_cancelled: pulls that were still open.
    """

    leases_revoked: int
    pulls_cancelled: int


class OfferAdmitted(Struct, frozen=True):
    """The producer holds a new lease.

    Attributes:
        request_id: the producer's name of the request.
        num_blocks: blocks of all groups.
        lease_s: seconds until the lease expires, unless a consumer renews it.
        traceparent: W3C trace context of the request; empty if the ticket has none. The record has ``trace_id``
            instead.
    """

    request_id: str
    num_blocks: int
    lease_s: float
    traceparent: str = ""


class OfferRefused(Struct, frozen=True):
    """An offer has failed before the producer held its lease. A ticket that was already issued for it is void.

    Attributes:
        request_id: the producer's name of the request.
        code: code of the error that the caller gets.
        detail: message of that error.
        remedy: what to do about it.
    """

    request_id: str
    code: str
    detail: str
    remedy: str


class PeerConnected(Struct, frozen=True):
    """The worker has connected to a peer and can read from it.

    Attributes:
        peer: ``engine/rank/incarnation`` of the peer.
        endpoint: control endpoint of the peer.
        handshake_s: seconds from dialing to the end of the handshake.
        clock_ahead_s: seconds by which the peer's wall clock is ahead of ours; None if the peer does not say.
        clock_error_s: largest error of ``clock_ahead_s`` in seconds; None likewise.
        transport: transport that carries the bytes, by UCX's name: ``cma`` (shared memory), ``tcp``, ``rc_mlx5``,
            ``cuda_ipc``; or ``loopback``. Several names with a bar between them: one of these. ``unknown`` if nobody
            can tell.
        transport_known_by: source of that knowledge: ``kind``, ``addresses``, ``candidates`` or ``nothing``.
        plane: data plane that was chosen for the peer: ``nixl``, ``tcp`` or ``loopback``.
        model: model that both sides name; empty if a side names none. Then only shapes and dtypes were compared.
        missing_layers: layers of the peer that our cache does not have, such as those of another pipeline stage.
    """

    peer: str
    endpoint: str
    handshake_s: float
    clock_ahead_s: float | None = None
    clock_error_s: float | None = None
    transport: str = ""
    transport_known_by: str = ""
    plane: str = ""
    model: str = ""
    missing_layers: int = 0


class PeerMeasured(Struct, frozen=True):
    """The first 64 MiB have been read from a peer over its present connection, so that the rate is known.

    Small reads that the worker moves at once, without its read thread, do not count. The first read does not, either,
    because it also makes the connection.

    Attributes:
        peer: ``engine/rank/incarnation`` of the peer.
        gb_per_s: 10**9 bytes per second, while something of the peer was in flight.
        nbytes: bytes that were counted.
        source_memory: where the peer's cache is: ``DRAM`` (host memory) or ``VRAM`` (a GPU).
        target_memory: where our cache is.
        transport: transport as in ``PeerConnected``.
        plane: data plane as in ``PeerConnected``.
    """

    peer: str
    gb_per_s: float
    nbytes: int
    source_memory: str
    target_memory: str
    transport: str
    plane: str


class PeerSlow(Struct, frozen=True):
    """Bytes move from GPU to GPU at less than 2 GB/s, which is far below what NVLink, PCIe or RDMA carry.

    Comes after ``PeerMeasured``, once for each connection.

    Attributes:
        peer: ``engine/rank/incarnation`` of the peer.
        gb_per_s: rate as in ``PeerMeasured``.
        transport: transport as in ``PeerConnected``.
        plane: data plane as in ``PeerConnected``.
        detail: the likely cause.
        remedy: what to check.
    """

    peer: str
    gb_per_s: float
    transport: str
    plane: str
    detail: str
    remedy: str


class PeerDropped(Struct, frozen=True):
    """The worker has closed its connection to a peer. It connects again when a pull needs the peer.

    Attributes:
        peer: ``engine/rank/incarnation`` of the peer, or its endpoint if the handshake was not complete.
        code: ``peer_lost``, ``peer_closed``, or the code of another failure.
        detail: what happened.
    """

    peer: str
    code: str
    detail: str


class BreakerOpened(Struct, frozen=True):
    """Connecting to an address has failed several times in a row. Pulls from it fail at once until the next attempt.

    Attributes:
        endpoint: the address.
        failures: failed attempts in a row.
        retry_s: seconds until the next attempt.
    """

    endpoint: str
    failures: int
    retry_s: float


class BreakerClosed(Struct, frozen=True):
    """An address answers again after several failures in a row.

    Attributes:
        endpoint: the address.
    """

    endpoint: str


class ConsumerRejected(Struct, frozen=True):
    """The producer has dropped a consumer that broke the protocol or runs an incompatible release.

    Attributes:
        peer: ``engine/rank/incarnation`` of the consumer.
        code: which rule it broke, or ``release_mismatch``.
        detail: what happened.
    """

    peer: str
    code: str
    detail: str


class ReaderReset(Struct, frozen=True):
    """The worker has replaced its reading agent, because some of its reads might never have ended.

    Attributes:
        setting: limit that was exceeded: ``quarantine_bytes_max`` or ``quarantine_s_max``; ``staging_bytes`` if all
            staging memory was in quarantine.
        num_blocks: blocks that were in quarantine.
        ended: chunks and fences in flight that the reset ended.
        drain_s: seconds in which the worker posted no new chunk, while healthy peers finished theirs.
        reset_s: seconds in which nothing moved, until the worker could read from every healthy peer again.
    """

    setting: str
    num_blocks: int
    ended: int
    drain_s: float
    reset_s: float


class LeaseEnded(Struct, frozen=True, gc=False):
    """A lease has ended: its epoch is raised, and the producer may reuse its blocks.

    Attributes:
        request_id: the producer's name of the request.
        outcome: how it ended: ``released``, ``expired`` or ``revoked``.
        held_s: seconds for which the producer held it.
        traceparent: W3C trace context of the request; empty if the ticket has none. The record has ``trace_id``
            instead.
    """

    request_id: str
    outcome: Outcome
    held_s: float
    traceparent: str = ""


class TransferStarted(Struct, frozen=True):
    """The worker has handed the reads of a pull to the data plane. A pull that ends before that has no such event.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request.
    """

    pull_id: int
    request_id: str


class TransferRetried(Struct, frozen=True):
    """A source rank does not hold the lease yet. The worker checks the lease again later, and reads once it is held.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request.
        peer: ``engine/rank/incarnation`` of the source rank.
    """

    pull_id: int
    request_id: str
    peer: str


class TransferCompleted(Struct, frozen=True):
    """A pull has delivered: all bytes have arrived and every fence was held. The target blocks may be used.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request.
        report: what moved, and where the time went.
        local_request_id: the consumer's own name of the request; empty if it gave none.
        remote_engine_id: engine of the producer.
        traceparent: W3C trace context of the request; empty if the ticket has none. The record has ``trace_id``
            instead.
    """

    pull_id: int
    request_id: str
    report: TransferReport
    local_request_id: str = ""
    remote_engine_id: str = ""
    traceparent: str = ""


class PullFailed(Struct, frozen=True):
    """A pull has failed and delivers nothing.

    There is one event for each call of ``pull`` that fails, however early, and for each call of ``record_refusal``.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request; empty if the caller passed no ticket.
        code: code of the error that the caller gets.
        phase: phase that failed: ``check`` of the call and its ticket, ``connect`` or ``handshake`` with the peers,
            ``plan`` of what each source rank gives, ``queue``, ``wire`` or ``fence``.
        peer: ``engine/rank/incarnation`` of the source rank concerned; empty if none is.
        detail: what happened.
        quarantined: True while a read in flight may still write into the target blocks.
        cause: code of the transport or the scheduler, where it says more than ``code``.
        remedy: what to do about it.
        local_request_id: the consumer's own name of the request; empty if it gave none.
        nbytes: bytes that have certainly arrived, without those in flight.
        nbytes_wanted: bytes of the whole pull; 0 if not known yet.
        transport: transport as in ``TransferReport``; empty if no peer is connected.
        plane: data plane as in ``TransferReport``; empty if no peer is connected.
        ticket_age_s: seconds since the ticket was signed, by the clocks of both sides; None if the ticket does not say.
        lease_ended_by: how the lease ended, for the code ``stale_lease``: see ``StaleLease``.
        lease_ended_s: seconds from the end of the lease to our question to the producer; None if not known.
        timings_s: seconds per phase so far, as in ``TransferReport``.
        remote_engine_id: engine of the producer; empty if the caller passed no ticket.
        traceparent: W3C trace context of the request; empty if the ticket has none. The record has ``trace_id``
            instead.
    """

    pull_id: int
    request_id: str
    code: str
    phase: str
    peer: str
    detail: str
    quarantined: bool
    cause: str = ""
    remedy: str = ""
    local_request_id: str = ""
    nbytes: int = 0
    nbytes_wanted: int = 0
    transport: str = ""
    plane: str = ""
    ticket_age_s: float | None = None
    lease_ended_by: str = ""
    lease_ended_s: float | None = None
    timings_s: dict[str, float] = {}
    remote_engine_id: str = ""
    traceparent: str = ""


class TracedGroup(Struct, frozen=True):
    """What one group of one source rank gave to a traced pull.

    Attributes:
        peer: index into the peers of the event.
        source_group: number of the group at the source.
        target_group: number of our group.
        source_units: units of one source block. Blocks of different sizes are cut into units of one size.
        target_units: units of one of our blocks.
        unit_bytes: bytes of one unit.
        unit_descriptors: descriptors of one unit before neighbors merge: 1 if both sides keep it in one piece.
        descriptors: descriptors of all units after neighbors have merged.
        staged: whether the units passed through staging buffers.
        pairs: first source unit, first target unit, and count, of each run of units that ascends by one on both sides.
            A unit is ``block * units + number in the block``.
        pairs_omitted: runs that are not listed.
    """

    peer: int
    source_group: int
    target_group: int
    source_units: int
    target_units: int
    unit_bytes: int
    unit_descriptors: int
    descriptors: int
    staged: bool
    pairs: tuple[tuple[int, int, int], ...]
    pairs_omitted: int = 0


class TransferTraced(Struct, frozen=True):
    """What a pull has read in detail, for ``kvflow trace``. It follows the event that the pull has ended.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request.
        peers: ``engine/rank/incarnation`` of each source rank that was read.
        groups: what each group of each rank gave: rank as index into ``peers``, groups of both sides, units in a block
            of each side, bytes and descriptors of a unit, descriptors after merging, whether it was staged, and the
            runs of paired units: first source unit, first target unit, count. At most 4,096 runs for a group.
        chunks: each chunk that has arrived: index into ``groups``, seconds from the call of ``pull`` to the post and to
            the arrival, bytes, and descriptors before merging. At most 4,096.
        chunks_omitted: chunks that are not listed.
    """

    pull_id: int
    request_id: str
    peers: tuple[str, ...]
    groups: tuple[TracedGroup, ...]
    chunks: tuple[tuple[int, float, float, int, int], ...]
    chunks_omitted: int = 0


class TransferQuiesced(Struct, frozen=True):
    """Nothing writes into the target blocks of a failed pull now: the consumer may reuse them.

    Attributes:
        pull_id: number of the pull, unique in the worker.
        request_id: the producer's name of the request.
    """

    pull_id: int
    request_id: str


Event = (
    WorkerOpened
    | PlaneOmitted
    | WorkerDrained
    | WorkerStopped
    | OfferAdmitted
    | OfferRefused
    | PeerConnected
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
    | TransferTraced
    | TransferQuiesced
)
"""Every event of a worker."""

_NAMES: dict[type[Event], str] = {PullFailed: "transfer.failed", WorkerStopped: "worker.closed"}
"""Names of events whose types would have the name of an error."""

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
