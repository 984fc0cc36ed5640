"""Every error that kvflow raises to its caller.

The tree, by what the caller can do about it::

    KvflowError
    ├── ConfigInvalid            fix the configuration
    ├── ArgumentInvalid          pass an argument of the right type
    ├── SpecInvalid              fix the description of the cache
    ├── WorkerClosed             the worker is closing or closed: nothing more is served
    │   ├── WorkerDraining       the worker finishes what it has begun: begin nothing new here
    │   └── WorkerSuspended      the worker's cache is withdrawn: ask again when it was resumed
    ├── ForkedProcess            open it in this process: what a parent has opened is the parent's
    ├── WrongEventLoop           call it on the worker's event loop, or use run_worker
    ├── TicketInvalid            the ticket is truncated, forged or from another cluster: refuse the request
    ├── ContentMismatch          the ticket's blocks hold other tokens than the request: refuse it, or recompute
    ├── BlockIdsInvalid          fix the block ids of this call
    │   └── BlockRangeMismatch   the ticket does not cover the tokens that are asked for
    ├── RequestUnknown           no offer of that name is held or remembered
    ├── ReleaseMismatch          a ticket or a peer is of another release of kvflow: install one release on both
    ├── LayoutMismatch           the two caches cannot be matched: do not pair these engines
    ├── PlanUnsound              a plan failed its own proof: a defect of kvflow, nothing was moved
    ├── DefectFound              something unforeseen failed: a defect of kvflow, the request is refused
    ├── CapacityExceeded         try again when something has ended
    ├── TransportUnavailable     the data plane cannot start here
    ├── AuthenticationFailed     the peer does not share our cluster secret
    ├── PeerRefused              the peer gave a reason for not talking to us
    └── TransferFailed           nothing was delivered; ask again, elsewhere, or recompute
        ├── StaleLease           the producer's promise had ended
        ├── PeerLost             the peer died, hung up or cannot be reached
        │   └── PeerUnavailable  it has failed too often, and is not dialled before its time
        ├── DeadlineExceeded     a phase took longer than its budget
        ├── TransferCancelled    the consumer gave up
        └── ProtocolViolation    the peer sent something that it must not

Each has a stable ``code`` for machines, and its text ends with what to do.
"""

from typing import ClassVar


class KvflowError(Exception):
    """Base of all errors of kvflow.

    Attributes:
        code: stable name of the kind of error, for logs, metrics and tests.
        remedy: what to do about it, one sentence.
    """

    code: ClassVar[str] = "kvflow_error"
    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy or self.default_remedy
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.remedy}".rstrip()


class ConfigInvalid(KvflowError):
    """A setting is missing, malformed or unsafe."""

    code = "config_invalid"
    default_remedy = "See docs/reference/config.md for the settings and their bounds."


class ArgumentInvalid(KvflowError):
    """An argument of a call has the wrong type.

    Attributes:
        name: of the argument.
    """

    code = "argument_invalid"
    default_remedy = "See the docstring of the call."

    def __init__(self, name: str, expected: str, found: object, *, remedy: str = "") -> None:
        super().__init__(f"{name} must be {expected}, not {type(found).__name__}", remedy=remedy)
        self.name = name


class SpecInvalid(KvflowError):
    """A spec, group, shard or layout cannot describe a cache."""

    code = "spec_invalid"
    default_remedy = "Correct the named field of the spec."


class WorkerClosed(KvflowError):
    """The worker is closing or closed."""

    code = "worker_closed"
    default_remedy = "Open a new worker; tickets of this one are void."


class WorkerDraining(WorkerClosed):
    """The worker is draining: it keeps its promises and makes no new ones."""

    code = "worker_draining"
    default_remedy = "Use another worker; tickets of this one are good until it closes."


class WorkerSuspended(WorkerClosed):
    """The worker is suspended: its cache is withdrawn, and nothing is served until it is resumed."""

    code = "worker_suspended"
    default_remedy = "Resume the worker first; tickets of before are void."


class ForkedProcess(KvflowError):
    """A forked child called a worker, or a mint, of its parent."""

    code = "forked_process"
    default_remedy = "Open workers, and make mints, in the process that uses them: after the fork."


class WrongEventLoop(KvflowError):
    """A worker of ``open_worker`` was called from another event loop than its own, or from none."""

    code = "wrong_event_loop"
    default_remedy = "Call it on the event loop of open_worker, or use run_worker, which any thread may call."


class TicketInvalid(KvflowError):
    """A ticket is not what a producer of this cluster signed."""

    code = "ticket_invalid"
    default_remedy = "Pass the producer's kv_transfer_params through unchanged, and use one cluster secret."


class ContentMismatch(KvflowError):
    """The blocks of a ticket hold something else than what the caller expects: nothing was read.

    Attributes:
        group: index of the group that differs, or None if the ticket does not say what its blocks hold.
    """

    code = "content_mismatch"
    default_remedy = "Send each request with the kv_transfer_params of its own prefill, or compute the prompt here."

    def __init__(self, message: str, *, group: int | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.group = group


class BlockIdsInvalid(KvflowError):
    """Block ids given by the caller cannot be used.

    Attributes:
        group: index of the group whose list is wrong, or None when the number of lists is.
    """

    code = "block_ids_invalid"
    default_remedy = "Give one list of block ids per group, each in [0, num_blocks), targets without duplicates."

    def __init__(self, message: str, *, group: int | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.group = group


class BlockRangeMismatch(BlockIdsInvalid):
    """The ticket does not cover the tokens that the target blocks stand for."""

    code = "block_range_mismatch"
    default_remedy = "Pull fewer blocks, or have the producer offer the missing ones."


class RequestUnknown(KvflowError):
    """No offer of this name is held, and none ended recently.

    Attributes:
        request_id: the name.
    """

    code = "request_unknown"
    default_remedy = "Offer the request first; the outcome of an old one is kept for a while only."

    def __init__(self, request_id: str) -> None:
        super().__init__(f"there is no offer {request_id!r}")
        self.request_id = request_id


class ReleaseMismatch(KvflowError):
    """A ticket or a peer is of a release of kvflow that this one does not understand: nothing was read.

    Attributes:
        what: that differs: ``ticket format`` or ``manifest schema``.
        theirs: its version.
        ours: the version that this release understands.
    """

    code = "release_mismatch"
    default_remedy = "Install the same release of kvflow on the prefill and the decode side."

    def __init__(self, whose: str, what: str, theirs: str, ours: str, *, remedy: str = "") -> None:
        super().__init__(f"{whose} has {what} {theirs}, and this release of kvflow understands {ours}", remedy=remedy)
        self.what = what
        self.theirs = theirs
        self.ours = ours


class LayoutMismatch(KvflowError):
    """Two caches differ where they must agree, or in a way that no plan can express.

    Attributes:
        field: what differs, as a path such as ``layers.0.k.head_size``.
        source: the producer's value.
        target: the consumer's value.
    """

    code = "layout_mismatch"
    default_remedy = "Pair only engines that serve the same model with convertible caches."

    def __init__(self, field: str, source: object, target: object, *, remedy: str = "") -> None:
        super().__init__(f"{field} differs: source has {source!r}, target has {target!r}", remedy=remedy)
        self.field = field
        self.source = source
        self.target = target


class PlanUnsound(KvflowError):
    """A plan does not do what it should. Found before anything is moved."""

    code = "plan_unsound"
    default_remedy = "Report it with both manifests: this is a defect of kvflow."


class DefectFound(KvflowError):
    """Something failed that kvflow does not foresee. It costs the request during which it happened."""

    code = "defect_found"
    default_remedy = "Report it with the traceback from the log: this is a defect of kvflow."


class CapacityExceeded(KvflowError):
    """A bounded table, queue or plan is full.

    Attributes:
        resource: what is exhausted.
        limit: its bound.
    """

    code = "capacity_exceeded"
    default_remedy = "Wait until something has ended, or raise the limit."

    def __init__(self, resource: str, limit: int, *, remedy: str = "") -> None:
        super().__init__(f"no room for more {resource}: the limit is {limit}", remedy=remedy)
        self.resource = resource
        self.limit = limit


class AuthenticationFailed(KvflowError):
    """The peer does not hold our cluster secret, or speaks without encryption."""

    code = "authentication_failed"
    default_remedy = "Give every worker of the cluster the same KVFLOW_CLUSTER_SECRET."


class PeerRefused(KvflowError):
    """The peer answered the handshake with a refusal.

    Attributes:
        refusal: the peer's own stable code, for example ``version_unsupported``.
    """

    code = "peer_refused"
    default_remedy = "Do what the peer's reason says."

    def __init__(self, refusal: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"the peer refused ({refusal}): {message}", remedy=remedy)
        self.refusal = refusal


class TransferFailed(KvflowError):
    """A pull ended without delivering anything.

    Attributes:
        request_id: the request of the ticket.
        peer: the source rank concerned, ``engine/rank/incarnation`` or an endpoint.
        quarantined: True while the destination blocks may still be written to:
            await ``worker.quiesced(request_id)`` before reusing them.
    """

    code = "transfer_failed"
    default_remedy = "Pull again with a new ticket, or recompute the prompt."

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        peer: str = "",
        quarantined: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.request_id = request_id
        self.peer = peer
        self.quarantined = quarantined


class StaleLease(TransferFailed):
    """The lease had ended when the fence was read: the bytes may be another request's.

    Attributes:
        ended_by: how it had ended: ``expired``, ``revoked``, ``used`` by a reader that read it before, ``released`` by
            one that gave it back, ``gone`` with its producer, or ``unknown``. Empty where nobody has asked yet.
        ended_s: how many seconds before the producer was asked; None if that is not known.
    """

    code = "stale_lease"
    default_remedy = "Ask the producer for a new ticket, or recompute the prompt."

    def __init__(
        self,
        message: str,
        *,
        ended_by: str = "",
        ended_s: float | None = None,
        request_id: str = "",
        peer: str = "",
        quarantined: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id, peer=peer, quarantined=quarantined, remedy=remedy)
        self.ended_by = ended_by
        self.ended_s = ended_s


class PeerLost(TransferFailed):
    """The peer died, hung up, or cannot be reached."""

    code = "peer_lost"
    default_remedy = "Check that the producer runs and that its advertised endpoint is reachable from here."


class PeerUnavailable(PeerLost):
    """The peer's address has failed several times in a row, and is not dialled before its time.

    Attributes:
        retry_after_s: seconds until it is dialled again; 0 while that is under way.
    """

    code = "peer_unavailable"
    default_remedy = "Use another producer, or pull again when retry_after_s has passed."

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 0.0,
        request_id: str = "",
        peer: str = "",
        quarantined: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id, peer=peer, quarantined=quarantined, remedy=remedy)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TransferFailed):
    """A phase of the pull used up its budget.

    Attributes:
        phase: ``connect``, ``handshake``, ``queue``, ``wire``, ``fence`` or ``total``.
    """

    code = "deadline_exceeded"
    default_remedy = "Check the peer's load and the network; a hung peer is found only by its deadline."

    def __init__(
        self,
        message: str,
        *,
        phase: str = "total",
        request_id: str = "",
        peer: str = "",
        quarantined: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id, peer=peer, quarantined=quarantined, remedy=remedy)
        self.phase = phase


class TransferCancelled(TransferFailed):
    """The pull was cancelled by its caller or by the closing worker."""

    code = "transfer_cancelled"
    default_remedy = "Nothing: the consumer asked for it."


class ProtocolViolation(TransferFailed):
    """The peer sent something that breaks the protocol, or describes memory that it does not own."""

    code = "protocol_violation"
    default_remedy = "Run the same kvflow release on both sides; if they do, treat the peer as hostile."


class TransportUnavailable(KvflowError):
    """The data plane cannot be started on this machine."""

    code = "transport_unavailable"
    default_remedy = "Install nixl>=1.5 with a working UCX, or use transport='tcp', or 'loopback' within one process."
