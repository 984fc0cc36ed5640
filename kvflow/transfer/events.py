"""What the scheduler reports: the records that are logged, counted and asserted on.

``TransferCompleted`` is logged as ``transfer.completed``, and so on.
"""

from msgspec import Struct

from kvflow.transfer.report import TransferReport


class TransferStarted(Struct, frozen=True):
    """The first batch of a pull was dispatched.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
        queue_s: seconds from submission.
    """

    pull_id: int
    request_id: str
    queue_s: float


class TransferRetried(Struct, frozen=True):
    """A fence found the lease not admitted yet: it will be looked at again.

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
    """

    pull_id: int
    request_id: str
    report: TransferReport


class TransferFailed(Struct, frozen=True):
    """The pull has ended and delivers nothing.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
        code: the stable code of the error that the caller gets.
        phase: where it was: ``queue``, ``wire`` or ``fence``.
        peer: the source rank concerned, or empty.
        detail: in words.
        quarantined: True while something may still write into the destination blocks.
    """

    pull_id: int
    request_id: str
    code: str
    phase: str
    peer: str
    detail: str
    quarantined: bool


class TransferQuiesced(Struct, frozen=True):
    """Nothing of a failed pull will write any more: its destination blocks may be reused.

    Attributes:
        pull_id: the pull.
        request_id: the producer's name of the request.
    """

    pull_id: int
    request_id: str


TransferEvent = TransferStarted | TransferRetried | TransferCompleted | TransferFailed | TransferQuiesced
