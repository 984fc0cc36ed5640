"""Events of the shells, beside those of ``kvflow.transfer.events`` and ``kvflow.cache.leases``."""

from msgspec import Struct


class WorkerOpened(Struct, frozen=True):
    """The worker listens.

    Attributes:
        endpoint: control endpoint as peers reach it.
        transport: its data planes, joined by a plus, the preferred one first.
        num_blocks: blocks of its cache.
        bytes_per_block: of the backing allocation.
    """

    endpoint: str
    transport: str
    num_blocks: int
    bytes_per_block: int


class PlaneOmitted(Struct, frozen=True):
    """A data plane cannot be used on this machine: the worker reads, and is read, over the others.

    Attributes:
        plane: ``nixl`` or ``tcp``.
        detail: why.
    """

    plane: str
    detail: str


class CalibrationIgnored(Struct, frozen=True):
    """The calibration that the environment names is of another transport: this worker reads everything directly.

    Attributes:
        path: of the file.
        measured: the transport that it was measured over.
        transport: the worker's.
    """

    path: str
    measured: str
    transport: str


class WorkerClosed(Struct, frozen=True):
    """The worker is gone: its agents are destroyed, its leases revoked.

    Attributes:
        leases_revoked: how many were still held.
        pulls_cancelled: how many were still open.
    """

    leases_revoked: int
    pulls_cancelled: int


class WorkerDrained(Struct, frozen=True):
    """The worker has begun nothing new since it was told to drain, and has waited for what had begun.

    Attributes:
        leases_left: leases that are still held.
        pulls_left: pulls that are still open or draining.
        quarantined_left: destinations that something may still write into.
        waited_s: seconds that it took.
    """

    leases_left: int
    pulls_left: int
    quarantined_left: int
    waited_s: float


class OfferAdmitted(Struct, frozen=True):
    """A lease is held from here on.

    Attributes:
        request_id: our name of the request.
        num_blocks: blocks of all groups.
        lease_s: how long, unless renewed.
    """

    request_id: str
    num_blocks: int
    lease_s: float


class OfferRefused(Struct, frozen=True):
    """An offer has ended before its lease was held, and its ticket, if there is one, is void.

    Attributes:
        request_id: our name of the request.
        code: of the error that the caller gets.
        detail: in words.
        remedy: what to do about it.
    """

    request_id: str
    code: str
    detail: str
    remedy: str


class PeerConnected(Struct, frozen=True):
    """A peer was met and can be read from.

    Attributes:
        peer: ``engine/rank/incarnation``.
        endpoint: where.
        handshake_s: seconds from dialling to being ready.
        clock_ahead_s: seconds by which its wall clock is ahead of ours; None if it does not tell.
        clock_error_s: by how much that may be wrong, either way.
        transport: what carries the bytes that are read from it, by UCX's name: ``cma`` (shared memory), ``tcp``,
            ``rc_mlx5``, ``cuda_ipc``; ``loopback``. Several with a bar between them: one of these. ``unknown``.
        transport_known_by: how that is known: ``kind``, ``addresses``, ``candidates`` or ``nothing``.
        plane: the data plane that was chosen for it: ``nixl``, ``tcp`` or ``loopback``.
    """

    peer: str
    endpoint: str
    handshake_s: float
    clock_ahead_s: float | None = None
    clock_error_s: float | None = None
    transport: str = ""
    transport_known_by: str = ""
    plane: str = ""


class PeerDropped(Struct, frozen=True):
    """A peer cannot be read from any more; it is met anew when it is needed.

    Attributes:
        peer: ``engine/rank/incarnation``, or the endpoint if it was never met.
        code: ``peer_lost``, ``peer_closed``, or what went wrong.
        detail: in words.
    """

    peer: str
    code: str
    detail: str


class BreakerOpened(Struct, frozen=True):
    """An address has failed too often in a row: it is left alone for a while, and pulls from it fail at once.

    Attributes:
        endpoint: the address.
        failures: attempts that have failed.
        retry_s: seconds until the next one.
    """

    endpoint: str
    failures: int
    retry_s: float


class BreakerClosed(Struct, frozen=True):
    """An address that had failed too often answers again.

    Attributes:
        endpoint: the address.
    """

    endpoint: str


class ReaderRejected(Struct, frozen=True):
    """A reader of ours broke the protocol and was dropped, or is of another release and cannot read from us.

    Attributes:
        peer: who.
        code: what it did, or `release_mismatch`.
        detail: in words.
    """

    peer: str
    code: str
    detail: str


class ReaderReset(Struct, frozen=True):
    """The agent that reads from peers was destroyed and created again, to end reads that might never have ended.

    Attributes:
        setting: the limit that was exceeded, ``quarantine_bytes_max`` or ``quarantine_s_max``; ``staging_bytes`` if all
            staging memory was in quarantine.
        num_blocks: blocks that were in quarantine.
        ended: chunks and fences in flight that were ended by it.
        drain_s: seconds in which no new chunk was posted, while healthy peers finished theirs.
        reset_s: seconds in which nothing moved, until every healthy peer could be read from again.
    """

    setting: str
    num_blocks: int
    ended: int
    drain_s: float
    reset_s: float


ShellEvent = (
    WorkerOpened
    | PlaneOmitted
    | CalibrationIgnored
    | WorkerDrained
    | WorkerClosed
    | OfferAdmitted
    | OfferRefused
    | PeerConnected
    | PeerDropped
    | BreakerOpened
    | BreakerClosed
    | ReaderRejected
    | ReaderReset
)
