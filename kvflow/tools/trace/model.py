"""A trace: what is known of each request, on one clock. Times of a request are seconds from its start."""

from msgspec import Struct

from kvflow.events import TracedGroup
from kvflow.tools.proxy.completions import FailedAttempt
from kvflow.tools.trace.records import Reading


class Phase(Struct, frozen=True):
    """A part of a request's time. The phases of a request follow each other and add up to its whole.

    Attributes:
        name: ``prefill``, ``ticket`` (from the offer to the pull), a phase of the pull as in ``TransferReport``,
            ``decode step``, or ``answer`` (from the first token to the end of an answer that failed).
        start_s: when it begins.
        seconds: how long it lasts.
    """

    name: str
    start_s: float
    seconds: float


class Failure(Struct, frozen=True):
    """Why a pull failed (``kvflow.events.PullFailed``) or a request (``Outcome`` of ``kvflow proxy``)."""

    code: str
    phase: str
    peer: str
    detail: str
    remedy: str


class PullTrace(Struct, frozen=True, kw_only=True):
    """One pull of a request.

    Attributes:
        worker: ``engine/rank/incarnation`` of the consumer.
        local_request_id: the consumer's name of the request.
        start_s: when it was called.
        total_s: how long it took.
        phases: of the pull; the data plane alternates ``bind``, ``post``, ``wire`` and ``scatter``.
        failure: why it failed; None if it has delivered.
        traced: whether its chunks and blocks are known.
        peers: source ranks; see ``kvflow.events.TransferTraced`` for this and the next.
        groups: groups of the source ranks.
        chunks: chunks that have arrived, in seconds from the call.
    """

    worker: str
    local_request_id: str
    start_s: float
    total_s: float
    phases: list[Phase]
    nbytes: int
    nbytes_wanted: int
    descriptors: int
    merged: float
    reads: int
    early: int
    transport: str
    plane: str
    failure: Failure | None = None
    traced: bool = False
    peers: tuple[str, ...] = ()
    groups: tuple[TracedGroup, ...] = ()
    chunks: tuple[tuple[int, float, float, int, int], ...] = ()
    chunks_omitted: int = 0

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.total_s

    @property
    def moving(self) -> tuple[float, float]:
        """When its first read left the queue, and when its last byte had arrived."""
        reading = [phase for phase in self.phases if phase.name in READING]
        if not reading:
            return self.end_s, self.end_s
        return reading[0].start_s, reading[-1].start_s + reading[-1].seconds


READING = ("bind", "post", "wire", "scatter")
"""Phases in which the data plane moves bytes."""


class Offer(Struct, frozen=True, kw_only=True):
    """A lease that a producer held for a request.

    Attributes:
        worker: ``engine/rank/incarnation`` of the producer.
        start_s: when it was offered.
        held_s: how long the lease was held; None if its end was not recorded.
        outcome: how it ended: ``released``, ``expired`` or ``revoked``; empty if its end was not recorded.
    """

    worker: str
    start_s: float
    held_s: float | None = None
    outcome: str = ""


class Routed(Struct, frozen=True, kw_only=True):
    """What a router did for a request, which starts with it.

    Attributes:
        prefill_s: when the prefill server had answered, or when the request ended before.
        first_bytes_s: when the first bytes of the answer came; None if not recorded.
        elapsed_s: when the answer was complete, or the request failed.
        client: ``host:port`` of who asked; empty if not recorded, like the next two.
        prefill_server: URL of the server that computed the prompt.
        decode_server: URL of the server that answered.
        failed_attempts: servers that were asked in vain.
        status: of HTTP; 0 if not recorded.
        sent_bytes: of the answer.
        failure: why the client has no whole answer; None if it has.
    """

    prefill_s: float
    first_bytes_s: float | None
    elapsed_s: float
    client: str = ""
    prefill_server: str = ""
    decode_server: str = ""
    failed_attempts: list[FailedAttempt] = []
    status: int = 0
    sent_bytes: int = 0
    failure: Failure | None = None


class RequestTrace(Struct, kw_only=True):
    """One request.

    Attributes:
        request_id: the producer's name of it; the router's or the consumer's if no producer is known.
        outcome: ``completed``, ``failed`` (the answer, or else every pull), ``offered`` (no pull is recorded) or
            ``answered`` (neither is).
        title: says in one sentence where the time went.
        start_at: seconds since 1970, on the clock of the trace.
        total_s: from the start to the first token, or to the last that is known.
        phases: parts of ``total_s``.
        clock_error_s: largest error of times that two clocks measured; None if it is not known.
        router: what a router did; None if no record tells.
        first_token_s: when the first token was there; None if no record tells.
        offers: leases of all source ranks.
        pulls: pulls of all consumer ranks, by time.
        nbytes: bytes that all pulls have moved.
        reads: reads that moved them.
        gb_per_s: rate of all pulls together, in 10**9 bytes per second; 0 if nothing was moved.
    """

    request_id: str
    outcome: str
    start_at: float
    total_s: float
    phases: list[Phase]
    clock_error_s: float | None = None
    router: Routed | None = None
    first_token_s: float | None = None
    offers: list[Offer]
    pulls: list[PullTrace]
    nbytes: int = 0
    reads: int = 0
    gb_per_s: float = 0.0
    title: str = ""

    @property
    def failure(self) -> Failure | None:
        """Why the answer failed, or else the last pull; None if a pull has delivered."""
        if self.router is not None and self.router.failure is not None:
            return self.router.failure
        return self.pulls[-1].failure if self.outcome == "failed" else None


class ComparedClock(Struct, frozen=True):
    """The clock of one process beside a reference, which is one of the workers that it has met.

    References that have not met are taken as equal. That concerns no single request.

    Attributes:
        name: ``engine/rank/incarnation``, or a router.
        reference: worker whose clock it is compared with.
        ahead_s: seconds by which it is ahead.
        error_s: largest error of ``ahead_s``; None if nothing was measured and both clocks are taken as equal.
        basis: source of that knowledge: ``reference``, ``handshake``, ``file`` (a worker of the same machine),
            ``order`` (of events of both) or ``nothing``.
    """

    name: str
    reference: str
    ahead_s: float
    error_s: float | None
    basis: str


class Trace(Struct):
    """All requests of some logs.

    Attributes:
        requests: by their start.
        clocks: of all processes.
        reading: how much was read.
    """

    requests: list[RequestTrace]
    clocks: list[ComparedClock]
    reading: Reading
