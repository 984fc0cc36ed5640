"""Every error that kvflow raises to its caller.

The tree shows what the caller can do::

    KvflowError
    ├── ConfigInvalid            correct the setting
    ├── ArgumentInvalid          pass an argument of the right type and value
    ├── SpecInvalid              correct the description of the cache
    ├── WorkerClosed             open another worker: this one is closing or closed
    │   ├── WorkerDraining       use another worker: this one only finishes what it has begun
    │   └── WorkerSuspended      resume the worker first: its cache is withdrawn
    ├── ForkedProcess            open the worker in the process that uses it, after the fork
    ├── WrongEventLoop           call the worker on its event loop, or use run_worker
    ├── TicketInvalid            refuse the request: its ticket is truncated, forged or from another cluster
    ├── ContentMismatch          refuse the request, or recompute: the ticket's blocks hold other tokens
    ├── BlockIdsInvalid          correct the block ids of this call
    │   └── BlockRangeMismatch   pull fewer blocks: the ticket does not cover the tokens
    ├── RequestUnknown           offer the request first
    ├── ReleaseMismatch          install one release of kvflow on both sides
    ├── LayoutMismatch           do not pair these engines: their caches cannot be matched
    ├── PlanUnsound              report a defect: a plan failed its check, and nothing was moved
    ├── DefectFound              report a defect: kvflow raised an exception that it did not expect
    ├── CapacityExceeded         try again when a lease or a pull has ended, or raise the limit
    ├── TransportUnavailable     install the data plane, or choose another one
    ├── AuthenticationFailed     give both workers the same cluster secret
    ├── PeerRefused              look up the peer's reason in docs/reference/errors.md
    └── TransferFailed           pull again with a new ticket, or recompute: nothing was delivered
        ├── StaleLease           ask for a new ticket: the lease had ended
        ├── PeerLost             check the peer: it died, closed the connection, or cannot be reached
        │   └── PeerUnavailable  use another producer: this one has failed several times in a row
        ├── DeadlineExceeded     check the peer and the network: a phase took longer than its budget
        ├── TransferCancelled    do nothing: the consumer cancelled the pull
        └── ProtocolViolation    run one release on both sides: the peer broke the protocol

Each error has a stable ``code`` for machines. The text of an error ends with what to do.
"""

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class _Shown(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Show a number with thousands of digits, which Python refuses to write in decimal, by its size."""
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"<a number of {x.bit_length():,} bits>"


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 40


class FailureCode(StrEnum):
    """Name why something failed, for logs, metrics and programs. The names do not change between releases.

    The first part holds the ``code`` of each error. The second part holds finer causes, which stand in the ``cause`` of
    ``transfer.failed`` and in the ``code`` of ``peer.dropped``.
    """

    KVFLOW_ERROR = "kvflow_error"
    CONFIG_INVALID = "config_invalid"
    ARGUMENT_INVALID = "argument_invalid"
    SPEC_INVALID = "spec_invalid"
    WORKER_CLOSED = "worker_closed"
    WORKER_DRAINING = "worker_draining"
    WORKER_SUSPENDED = "worker_suspended"
    FORKED_PROCESS = "forked_process"
    WRONG_EVENT_LOOP = "wrong_event_loop"
    TICKET_INVALID = "ticket_invalid"
    CONTENT_MISMATCH = "content_mismatch"
    BLOCK_IDS_INVALID = "block_ids_invalid"
    BLOCK_RANGE_MISMATCH = "block_range_mismatch"
    REQUEST_UNKNOWN = "request_unknown"
    RELEASE_MISMATCH = "release_mismatch"
    LAYOUT_MISMATCH = "layout_mismatch"
    PLAN_UNSOUND = "plan_unsound"
    DEFECT_FOUND = "defect_found"
    CAPACITY_EXCEEDED = "capacity_exceeded"
    AUTHENTICATION_FAILED = "authentication_failed"
    PEER_REFUSED = "peer_refused"
    TRANSFER_FAILED = "transfer_failed"
    STALE_LEASE = "stale_lease"
    PEER_LOST = "peer_lost"
    PEER_UNAVAILABLE = "peer_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TRANSFER_CANCELLED = "transfer_cancelled"
    PROTOCOL_VIOLATION = "protocol_violation"
    TRANSPORT_UNAVAILABLE = "transport_unavailable"

    BOUNDS = "bounds"
    """A descriptor lies outside the registered memory. Nothing was handed to the data plane."""
    CANCELLED = "cancelled"
    """The read was cancelled before it was posted."""
    CLOSING = "closing"
    """This worker is closing."""
    KEY_REMOVED = "key_removed"
    """The peer's public key was removed from the allowed keys."""
    METADATA_INVALID = "metadata_invalid"
    """The peer's published description of its data plane cannot be used."""
    PEER_CLOSED = "peer_closed"
    """The peer closed its connection in order."""
    PLANE_UNFIT = "plane_unfit"
    """The peer answers, but no data plane of both sides can read from it."""
    PROGRAM_UNKNOWN = "program_unknown"
    """The read names prepared descriptor lists that no longer exist."""
    TRANSPORT_ERROR = "transport_error"
    """The data plane reported an error that no other code names."""

    def __repr__(self) -> str:
        return repr(self.value)  # records of events show codes as the text that they are


@dataclass(eq=False, repr=False)
class KvflowError(Exception):
    """Any error of kvflow.

    What others said, and no terminal could print, is escaped: an error is one line.

    Attributes:
        message: what happened.
        remedy: one sentence that says what to do.
        code: stable name of the kind of error, for logs, metrics and tests.
    """

    message: str
    remedy: str = field(default="", kw_only=True)
    code: ClassVar[FailureCode] = FailureCode.KVFLOW_ERROR
    default_remedy: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.message, self.remedy = escaped(self.message), escaped(self.remedy or self.default_remedy)
        super().__init__(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({quoted(self.message, 400)})"

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.remedy}".rstrip()


class ConfigInvalid(KvflowError):
    """A setting is missing, malformed or unsafe."""

    code = FailureCode.CONFIG_INVALID
    default_remedy = "See docs/reference/config.md for the settings and their bounds."


class ArgumentInvalid(KvflowError):
    """An argument of a call has the wrong type, or a value that it must not have.

    Attributes:
        name: name of the argument.
    """

    code = FailureCode.ARGUMENT_INVALID
    default_remedy = "Pass a value of the form that the message names."

    def __init__(self, name: str, expected: str, found: object, *, remedy: str = "") -> None:
        super().__init__(f"{name} must be {expected}, not {_described(found)}", remedy=remedy)
        self.name = name


class SpecInvalid(KvflowError):
    """A spec, group, shard or layout cannot describe a cache."""

    code = FailureCode.SPEC_INVALID
    default_remedy = "Describe the cache as the engine lays it out: see docs/howto/describe-a-model.md."


class WorkerClosed(KvflowError):
    """The worker is closing or closed."""

    code = FailureCode.WORKER_CLOSED
    default_remedy = "Open a new worker. The tickets of this one are void."


class WorkerDraining(WorkerClosed):
    """The worker is draining: it finishes what it has begun, and begins nothing new."""

    code = FailureCode.WORKER_DRAINING
    default_remedy = "Use another worker. The tickets of this one are valid until it closes."


class WorkerSuspended(WorkerClosed):
    """The worker is suspended: its cache is withdrawn, and it serves nothing until it is resumed."""

    code = FailureCode.WORKER_SUSPENDED
    default_remedy = "Resume the worker first. Tickets from before the suspension are void."


class ForkedProcess(KvflowError):
    """A forked child called a worker or a ``TicketMint`` that its parent had opened."""

    code = FailureCode.FORKED_PROCESS
    default_remedy = "Fork first. Then open workers and create mints in the process that uses them."


class WrongEventLoop(KvflowError):
    """A worker of ``open_worker`` was called outside its event loop."""

    code = FailureCode.WRONG_EVENT_LOOP
    default_remedy = "Call it on the event loop of open_worker, or use run_worker, whose worker any thread may call."


class TicketInvalid(KvflowError):
    """A ticket is not one that a producer of this cluster signed."""

    code = FailureCode.TICKET_INVALID
    default_remedy = "Pass the producer's kv_transfer_params through unchanged, and use one cluster secret."


@dataclass(eq=False, repr=False, kw_only=True)
class ContentMismatch(KvflowError):
    """The blocks of a ticket do not hold what the caller expects. Nothing was read.

    Attributes:
        group: index of the group that differs; None if the ticket does not say what its blocks hold.
    """

    code = FailureCode.CONTENT_MISMATCH
    default_remedy = "Send each request with the kv_transfer_params of its own prefill, or compute the prompt here."
    group: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class BlockIdsInvalid(KvflowError):
    """The caller passed block ids that cannot be used.

    Attributes:
        group: index of the group whose list is wrong; None if the number of lists is wrong.
    """

    code = FailureCode.BLOCK_IDS_INVALID
    default_remedy = "Give one list of block ids per group, each id in [0, num_blocks), targets without duplicates."
    group: int | None = None


class BlockRangeMismatch(BlockIdsInvalid):
    """The ticket does not cover the tokens of the target blocks."""

    code = FailureCode.BLOCK_RANGE_MISMATCH
    default_remedy = "Pull fewer blocks, or have the producer offer the missing ones."


class RequestUnknown(KvflowError):
    """No offer has this request id, and none with it ended recently.

    Attributes:
        request_id: the unknown request id.
    """

    code = FailureCode.REQUEST_UNKNOWN
    default_remedy = "Offer the request first. The outcome of an ended offer is remembered for a limited time."

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no offer has the request id {request_id!r}")
        self.request_id = request_id


class ReleaseMismatch(KvflowError):
    """A ticket or a peer comes from a release of kvflow that this release does not understand. Nothing was read.

    Attributes:
        what: what differs: ``ticket format``, ``kind`` of a ticket, or ``manifest schema``.
        theirs: the version of the ticket or the peer.
        ours: the version that this release understands.
    """

    code = FailureCode.RELEASE_MISMATCH
    default_remedy = "Install the same release of kvflow on the prefill and the decode side."

    def __init__(self, whose: str, what: str, theirs: str, ours: str, *, remedy: str = "") -> None:
        super().__init__(f"{whose} has {what} {theirs}, and this release of kvflow understands {ours}", remedy=remedy)
        self.what = what
        self.theirs = theirs
        self.ours = ours


class LayoutMismatch(KvflowError):
    """Two caches differ in a field that must be equal, or in a way that no plan can express.

    Attributes:
        field: the field that differs, as a path such as ``layers.0.k.head_size``.
        source: the producer's value.
        target: the consumer's value.
    """

    code = FailureCode.LAYOUT_MISMATCH
    default_remedy = "Pair engines that serve the same model, and give both the setting that the message names."

    def __init__(self, field: str, source: object, target: object, *, remedy: str = "") -> None:
        super().__init__(f"{field} differs: source has {source!r}, target has {target!r}", remedy=remedy)
        self.field = field
        self.source = source
        self.target = target


class PlanUnsound(KvflowError):
    """A plan failed the check that precedes its use. Nothing was moved."""

    code = FailureCode.PLAN_UNSOUND
    default_remedy = "This is a defect of kvflow: report it with the manifests of both caches."


class DefectFound(KvflowError):
    """kvflow raised an exception that it did not expect. The request in progress is refused."""

    code = FailureCode.DEFECT_FOUND
    default_remedy = "This is a defect of kvflow: report it with the traceback from the log."


class CapacityExceeded(KvflowError):
    """A table, queue or plan has reached its limit.

    Attributes:
        resource: what is exhausted.
        limit: its limit.
    """

    code = FailureCode.CAPACITY_EXCEEDED
    default_remedy = "Wait until a lease or a pull has ended, or raise the limit that the message names."

    def __init__(self, resource: str, limit: int, *, remedy: str = "") -> None:
        super().__init__(f"no room for more {resource}: the limit is {limit}", remedy=remedy)
        self.resource = resource
        self.limit = limit


class AuthenticationFailed(KvflowError):
    """The peer has another cluster secret, or does not encrypt."""

    code = FailureCode.AUTHENTICATION_FAILED
    default_remedy = "Give every worker of the cluster the same KVFLOW_CLUSTER_SECRET."


class PeerRefused(KvflowError):
    """The peer refused the connection.

    Attributes:
        refusal: the peer's stable code, for example ``version_unsupported``.
    """

    code = FailureCode.PEER_REFUSED
    default_remedy = "Look up the peer's reason under Refusals in docs/reference/errors.md."

    def __init__(self, refusal: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"the peer refused ({refusal}): {message}", remedy=remedy)
        self.refusal = refusal


@dataclass(eq=False, repr=False, kw_only=True)
class TransferFailed(KvflowError):
    """A pull ended without delivering data.

    Attributes:
        request_id: request id of the ticket.
        peer: the source rank concerned, ``engine/rank/incarnation`` or an endpoint.
        quarantined: True while the transfer may still write to the destination blocks. Await
            ``worker.quiesced(request_id)`` before you reuse them.
    """

    code = FailureCode.TRANSFER_FAILED
    default_remedy = "Pull again with a new ticket, or recompute the prompt."
    request_id: str = ""
    peer: str = ""
    quarantined: bool = False


@dataclass(eq=False, repr=False, kw_only=True)
class StaleLease(TransferFailed):
    """The lease ended before the read was complete. The bytes that were read may belong to another request.

    Attributes:
        ended_by: how it ended: ``expired``, ``unread`` for want of blocks, ``revoked``, ``used`` by a reader that read
            it before, ``released`` by one that gave it back, ``gone`` with its producer, or ``unknown``. Empty if the
            producer was not asked yet.
        ended_s: seconds between the end and the question to the producer; None if unknown.
    """

    code = FailureCode.STALE_LEASE
    default_remedy = "Ask the producer for a new ticket, or recompute the prompt."
    ended_by: str = ""
    ended_s: float | None = None


class PeerLost(TransferFailed):
    """The peer died, closed the connection, or cannot be reached."""

    code = FailureCode.PEER_LOST
    default_remedy = "Check that the producer runs, and that its advertise and tcp_advertise lead to it from here."


@dataclass(eq=False, repr=False, kw_only=True)
class PeerUnavailable(PeerLost):
    """The peer's address failed several times in a row. It is not dialed again before ``retry_after_s`` has passed.

    Attributes:
        retry_after_s: seconds until it is dialed again; 0 while a dial is in progress.
    """

    code = FailureCode.PEER_UNAVAILABLE
    default_remedy = "Use another producer, or pull again when retry_after_s has passed."
    retry_after_s: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True)
class DeadlineExceeded(TransferFailed):
    """A phase of the pull took longer than its budget.

    Attributes:
        phase: ``connect``, ``handshake``, ``compute``, ``queue``, ``wire``, ``fence`` or ``total``.
    """

    code = FailureCode.DEADLINE_EXCEEDED
    default_remedy = "Check the peer's load and the network. Only a deadline finds a hung peer."
    phase: str = "total"


class TransferCancelled(TransferFailed):
    """The caller or the closing worker cancelled the pull."""

    code = FailureCode.TRANSFER_CANCELLED
    default_remedy = "No action is needed: the consumer cancelled the pull, or closed."


class ProtocolViolation(TransferFailed):
    """The peer broke the protocol, or described memory that it does not own."""

    code = FailureCode.PROTOCOL_VIOLATION
    default_remedy = "Run the same kvflow release on both sides. If they already do, treat the peer as hostile."


class TransportUnavailable(KvflowError):
    """The data plane cannot start on this machine."""

    code = FailureCode.TRANSPORT_UNAVAILABLE
    default_remedy = "Install nixl>=1.5 with a working UCX, or use transport='tcp', or 'loopback' within one process."


def quoted(text: str, length: int = 80) -> str:
    """Return text in quotes; text of more characters than ``length`` without its middle."""
    if len(text) > length:
        half = (length - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return repr(text)


def escaped(text: str) -> str:
    """Return text without what moves a cursor or ends a line: peers and clients choose parts of it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shown(value: object) -> str:
    """Return a value as a message shows it: its ``repr``, cut where it is long."""
    return _SHOWN.repr(value)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 block``, ``2 blocks``. ``plural`` is for a noun that takes more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _described(found: object) -> str:
    """Describe an argument without its contents, which may be secret or huge: a number by its value."""
    if found is None or isinstance(found, int | float):
        return shown(found)
    if isinstance(found, bytes) and not found:
        return "empty"
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of length {len(found)}"
    return type(found).__name__


def suggest(name: object, known: Iterable[str]) -> str:
    """Return a remedy for a name that is unknown: the one that is closest, and all that are known."""
    names = sorted(known)
    meant = closest(name, names)
    return f"{f'Did you mean {meant}? ' if meant else ''}Known are {', '.join(names)}."


def closest(name: object, known: Iterable[str]) -> str:
    """Return the known name that is probably meant by one that is unknown; empty if none is close."""
    names = sorted(known)
    longer = sorted((each for each in names if str(name).startswith(each)), key=len)[-1:]  # lease_seconds: lease_s
    return next(iter(longer or difflib.get_close_matches(str(name), names, n=1)), "")
