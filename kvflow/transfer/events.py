"""What the scheduler reports: the records that are logged, counted and asserted on.

``TransferCompleted`` is logged as ``transfer.completed``, and so on.
"""

from msgspec import Struct

from kvflow.transfer.report import TransferReport


class TransferStarted(Struct, frozen=True):
    """The data plane has the reads of a pull. A pull that ends within the call that starts it has no such event.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
    """

    pull_id: int
    request_id: str


class TransferRetried(Struct, frozen=True):
    """The lease is not admitted yet: the worker checks it again later, and reads once it is held.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
        peer: the source rank.
    """

    pull_id: int
    request_id: str
    peer: str


class TransferCompleted(Struct, frozen=True):
    """All bytes have arrived and every fence was held: the blocks may be used.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
        report: what moved and where the time went.
        local_request_id: the caller's own name of the request; empty if it gave none.
    """

    pull_id: int
    request_id: str
    report: TransferReport
    local_request_id: str = ""


class TransferFailed(Struct, frozen=True):
    """The pull has ended and delivers nothing. The scheduler says what it knows, and the shell adds the rest.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request; empty if there was no ticket to read it from.
        code: the stable code of the error that the caller gets.
        phase: where it was: ``check`` of the call and its ticket, ``connect`` or ``handshake`` with the peers, ``plan``
            of what each gives, ``queue``, ``wire`` or ``fence``.
        peer: the source rank concerned, or empty.
        detail: in words.
        quarantined: True while something may still write into the destination blocks.
        cause: the scheduler's or the transport's own code, where it says more than ``code``.
        remedy: what to do about it.
        local_request_id: the caller's own name of the request; empty if it gave none.
        nbytes: bytes that are known to have arrived; what was in flight is not counted.
        nbytes_wanted: of the whole pull; 0 if that was not known yet.
        transport: as in ``TransferReport``; empty if no peer was met.
        plane: likewise.
        ticket_age_s: seconds since the ticket was signed, by the clocks of both sides; None if it does not tell.
        lease_ended_by: of ``stale_lease``, how the lease had ended: see ``StaleLease``.
        lease_ended_s: how many seconds before the producer was asked; None if that is not known.
        timings_s: seconds per phase so far, as in ``TransferReport``.
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


class TransferQuiesced(Struct, frozen=True):
    """Nothing of a failed pull will write any more: its destination blocks may be reused.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
    """

    pull_id: int
    request_id: str


TransferEvent = TransferStarted | TransferRetried | TransferCompleted | TransferFailed | TransferQuiesced
