"""Compare the clocks of several machines, join records by request, and divide the time of each request into phases."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from kvflow.events import LeaseEnded, OfferAdmitted, PeerConnected, TransferCompleted, TransferTraced
from kvflow.report import PHASES, TransferReport
from kvflow.tools.proxy.completions import RequestRecord
from kvflow.tools.trace.records import (
    ComparedClock,
    Failure,
    FirstToken,
    Logged,
    Offer,
    Phase,
    PullEnded,
    PullTrace,
    Reading,
    RequestTrace,
    Routed,
    Trace,
    read_files,
)
from kvflow.tools.trace.text import title_of

Edges = dict[str, list[tuple[float, str, float]]]
"""Worker -> of each handshake with it: error, the other worker, and by how much that one's clock is ahead."""


class Clocks:
    """How far each clock is ahead of a reference: the worker with most pulls among those that have met."""

    def __init__(self, records: Sequence[Logged]) -> None:
        self._by_name: dict[str, ComparedClock] = {}
        self._of_file: dict[int, str] = {}
        self._routers: dict[tuple[int, str], ComparedClock] = {}
        edges: Edges = {}
        pulls: dict[str, int] = {}
        files: dict[str, int] = {}
        for each in records:
            event, worker = each.event, each.worker
            if not worker:
                continue
            files.setdefault(worker, each.file)
            self._of_file.setdefault(each.file, worker)
            pulls[worker] = pulls.get(worker, 0) + isinstance(event, PullEnded)
            if isinstance(event, PeerConnected) and event.clock_ahead_s is not None:
                ahead_s, error_s = event.clock_ahead_s, abs(event.clock_error_s or 0.0)
                edges.setdefault(worker, []).append((error_s, event.peer, ahead_s))
                edges.setdefault(event.peer, []).append((error_s, worker, -ahead_s))
        for worker in sorted(pulls, key=lambda worker: -pulls[worker]):
            if worker not in self._by_name and not self._share(worker, files):
                self._by_name[worker] = ComparedClock(worker, worker, 0.0, 0.0, "reference")
                self._follow(worker, edges)

    def _follow(self, reference: str, edges: Edges) -> None:
        """Reach workers over handshakes, those with the smallest sum of errors first."""
        waiting = [(0.0, reference, 0.0)]
        done: set[str] = set()
        while waiting:
            error_s, worker, ahead_s = heappop(waiting)
            if worker in done:
                continue
            done.add(worker)
            if worker != reference:
                self._by_name[worker] = ComparedClock(worker, reference, ahead_s, error_s, "handshake")
            best: dict[str, tuple[float, str, float]] = {}
            for edge in edges.get(worker, ()):
                if edge[1] not in done and (edge[1] not in best or edge < best[edge[1]]):
                    best[edge[1]] = edge
            for edge_s, peer, step_s in best.values():
                heappush(waiting, (error_s + edge_s, peer, ahead_s + step_s))

    def _share(self, worker: str, files: dict[str, int]) -> bool:
        """Give a worker the clock of another one that writes into the same file, so on the same machine."""
        of_file = self._by_name.get(self._of_file[files[worker]])
        if of_file is not None:
            self._by_name[worker] = ComparedClock(worker, of_file.reference, of_file.ahead_s, of_file.error_s, "file")
        return of_file is not None

    def of(self, worker: str) -> ComparedClock:
        """Return the clock of a worker."""
        return self._by_name.get(worker) or ComparedClock(worker, worker, 0.0, None, "nothing")

    def of_router(self, file: int, reference: str) -> ComparedClock:
        """Return the clock of the router of a file, compared with a reference; empty if none is concerned."""
        if file in self._of_file:
            return self.of(self._of_file[file])
        found = self._routers.get((file, reference))
        return found or ComparedClock(
            f"router of file {file + 1}", reference, 0.0, 0.0 if not reference else None, "nothing"
        )

    def add_router(self, file: int, reference: str, bounds: Iterable[tuple[float, float]]) -> None:
        """Compare the clock of a router with a reference.

        ``bounds`` are the least and largest offset that each request allows: its offer comes before the end of its
        prefill, and that before its pull.
        """
        low, high = float("-inf"), float("inf")
        for least, most in bounds:
            low, high = max(low, least), min(high, most)
        if low <= high and low > float("-inf") and high < float("inf"):
            ahead_s = 0.0 if low <= 0.0 <= high else (low + high) / 2
            name, error_s = f"router of file {file + 1}", max(high - ahead_s, ahead_s - low)
            self._routers[file, reference] = ComparedClock(name, reference, ahead_s, error_s, "order")

    def all(self) -> list[ComparedClock]:
        """Return all clocks."""
        return [*self._by_name.values(), *self._routers.values()]


FAILED_IN: Final = {"check": "handshake", "connect": "handshake", "plan": "handshake"}
"""Phases that fail before the reads are built, and that timings count as the handshake."""

WRAPPED: Final = re.compile(r"^(?:\d+_)?(?:cmpl|chatcmpl)-")
"""What vLLM puts before the name that a router gave a request."""

SUFFIXES_MAX: Final = 3
"""Parts that vLLM puts behind it: the number of a prompt, and eight random digits."""


@dataclass(slots=True)
class _Gathered:
    """Records of one request; ``answered`` is the router's."""

    request_id: str
    pulls: list[Logged] = field(default_factory=list)
    offers: dict[str, list[Logged]] = field(default_factory=dict)
    answered: Logged | None = None


def read_trace(paths: Iterable[Path], progress: Callable[[Reading], None] = lambda _: None) -> Trace:
    """Read logs and return what is known of each request.

    Raises:
        OSError: a file cannot be read.
    """
    records, reading = read_files(paths, progress)
    clocks = Clocks(records)
    requests = list(_gather(records))
    bounds: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for request in requests:
        if request.answered is not None and (workers := _workers(request)):
            key = request.answered.file, clocks.of(workers[0]).reference
            bounds.setdefault(key, []).append(_bounds(request, request.answered, clocks))
    for (file, reference), each in bounds.items():
        clocks.add_router(file, reference, each)
    traced = {
        (each.worker, each.event.pull_id): each.event for each in records if isinstance(each.event, TransferTraced)
    }
    tokens = {(each.file, each.event.request_id): each for each in records if isinstance(each.event, FirstToken)}
    found = [_Builder(request, clocks, traced, tokens).request() for request in requests]
    found.sort(key=lambda request: request.start_at)
    return Trace(found, clocks.all(), reading)


def _gather(records: Sequence[Logged]) -> Iterable[_Gathered]:
    """Sort records by the producer's engine and its name of the request, and add those of routers."""
    found: dict[tuple[str, str], _Gathered] = {}
    routed: dict[str, Logged] = {}
    for each in records:
        event = each.event
        if isinstance(event, PullEnded):
            name = event.request_id or event.local_request_id or f"pull {event.pull_id} of {each.worker}"
            found.setdefault((event.remote_engine_id, name), _Gathered(name)).pulls.append(each)
        elif isinstance(event, OfferAdmitted | LeaseEnded):
            key = (each.worker.rsplit("/", 2)[0], event.request_id)
            offers = found.setdefault(key, _Gathered(event.request_id)).offers
            offers.setdefault(each.worker, []).append(each)
        elif isinstance(event, RequestRecord) and event.request_id and _is_routed(each, event):
            routed[event.request_id] = each
    used: set[str] = set()
    for request in found.values():
        names = [request.request_id, *(_pull_of(each).local_request_id for each in request.pulls)]
        match = next((other for each in names for other in _router_names(each) if other in routed), None)
        if match is not None:
            request.answered = routed[match]
            used.add(match)
    yield from found.values()
    yield from (_Gathered(name, answered=answered) for name, answered in routed.items() if name not in used)


def _is_routed(each: Logged, record: RequestRecord) -> bool:
    """Return whether a router wrote a record: engines of the demo write some of that name, without these times."""
    return each.called_at is not None or record.prefill_s is not None


def _pull_of(each: Logged) -> PullEnded:
    assert isinstance(each.event, PullEnded)
    return each.event


def _router_names(name: str) -> Iterable[str]:
    """Yield what a router may have called the request of an engine."""
    yield name
    inner = WRAPPED.sub("", name)
    for _ in range(SUFFIXES_MAX + 1):
        yield inner
        inner, dash, _ = inner.rpartition("-")
        if not dash:
            return


def _workers(request: _Gathered) -> list[str]:
    """Return the workers of a request, consumers first."""
    return [*(each.worker for each in request.pulls), *request.offers]


def _bounds(request: _Gathered, answered: Logged, clocks: Clocks) -> tuple[float, float]:
    """Return the least and the largest offset of a router's clock that a request allows."""
    low, high = float("-inf"), float("inf")
    assert isinstance(answered.event, RequestRecord)
    if answered.event.prefill_s is None:
        return low, high
    prefilled_at = _called_at(answered) + answered.event.prefill_s
    for each in request.pulls:
        clock = clocks.of(each.worker)
        low = max(low, prefilled_at - _called_at(each) + clock.ahead_s - (clock.error_s or 0.0))
    for worker, records in request.offers.items():
        clock = clocks.of(worker)
        high = min(high, prefilled_at - _offer_times(records)[0] + clock.ahead_s + (clock.error_s or 0.0))
    return low, high


def _called_at(each: Logged) -> float:
    """Return when a pull was called, or a request had arrived, by the clock of its process."""
    if each.called_at is not None:
        return each.called_at
    return each.written_at - (_total_s(each.event) if isinstance(each.event, PullEnded) else each.elapsed_s)


def _total_s(pull: PullEnded) -> float:
    return _report_of(pull).timings_s.get("total", 0.0)


def _report_of(pull: PullEnded) -> TransferReport:
    """Return what a pull has moved, also if it has failed."""
    if isinstance(pull, TransferCompleted):
        return pull.report
    return TransferReport(
        request_id=pull.request_id,
        nbytes=pull.nbytes,
        descriptors=0,
        reads=0,
        transport=pull.transport,
        plane=pull.plane,
        timings_s=pull.timings_s,
    )


def _offer_times(records: Sequence[Logged]) -> tuple[float, float | None, str]:
    """Return when a lease was offered, by its worker's clock, how long it was held, and how it ended."""
    at, held_s, outcome = records[0].written_at, None, ""
    for each in records:
        event = each.event
        if isinstance(event, LeaseEnded):
            # A record may be written late, never early.
            at, held_s, outcome = min(at, each.written_at - event.held_s), event.held_s, event.outcome
    return at, held_s, outcome


class _Builder:
    """Builds one request out of its records."""

    def __init__(
        self,
        gathered: _Gathered,
        clocks: Clocks,
        traced: dict[tuple[str, int], TransferTraced],
        tokens: dict[tuple[int, str], Logged],
    ) -> None:
        self._gathered = gathered
        self._clocks = clocks
        self._traced = traced
        self._used = [clocks.of(worker) for worker in _workers(gathered)]
        self._start_at = 0.0
        self._offered = {worker: _offer_times(records) for worker, records in gathered.offers.items()}
        self._pulls = sorted(gathered.pulls, key=self._ended_at)
        self._first_token_at = self._token_at(tokens)

    def request(self) -> RequestTrace:
        answered = self._gathered.answered
        offered_at = self._offered_at()
        if answered is not None:
            clock = self._clocks.of_router(answered.file, self._used[0].reference if self._used else "")
            self._used.append(clock)
            self._start_at = _called_at(answered) - clock.ahead_s
        else:
            times = [self._called(each) for each in self._pulls[-1:]] + ([] if offered_at is None else [offered_at])
            self._start_at = min(times, default=0.0)
        pulls = [self._pull(each) for each in self._pulls]
        router = None if answered is None else _routed(answered)
        first_token_s = self._first_token_s(router)
        delivered = [pull for pull in pulls if pull.failure is None]
        ending = (delivered or pulls)[-1:]
        phases = list(self._phases(ending, router, first_token_s, offered_at))
        request = RequestTrace(
            request_id=self._gathered.request_id,
            outcome=_outcome(pulls, delivered, bool(self._offered), router),
            start_at=self._start_at,
            total_s=sum(phase.seconds for phase in phases),
            phases=phases,
            clock_error_s=_error_s(self._used),
            router=router,
            first_token_s=first_token_s,
            offers=[self._offer(worker) for worker in self._offered],
            pulls=pulls,
            nbytes=sum(pull.nbytes for pull in pulls),
            reads=sum(pull.reads for pull in pulls),
            gb_per_s=_rate(delivered),
        )
        request.title = title_of(request)
        return request

    def _called(self, each: Logged) -> float:
        return _called_at(each) - self._clocks.of(each.worker).ahead_s

    def _ended_at(self, each: Logged) -> float:
        return self._called(each) + _total_s(_pull_of(each))

    def _token_at(self, tokens: dict[tuple[int, str], Logged]) -> float | None:
        for each in self._pulls:
            found = tokens.get((each.file, self._gathered.request_id))
            if found is not None:
                return found.written_at - self._clocks.of(each.worker).ahead_s
        return None

    def _first_token_s(self, router: Routed | None) -> float | None:
        if self._first_token_at is not None:
            return self._first_token_at - self._start_at
        return None if router is None else router.first_bytes_s

    def _offered_at(self) -> float | None:
        """Return when the cache was offered: when the last rank held the lease, or when the ticket was signed."""
        if self._offered:
            return max(at - self._clocks.of(worker).ahead_s for worker, (at, _, _) in self._offered.items())
        for each in self._pulls[-1:]:
            peer = next(iter(self._traced_of(each).peers), getattr(each.event, "peer", ""))
            if each.issued_at is not None:
                clock = self._clocks.of(peer)
                self._used.append(clock)
                return each.issued_at - clock.ahead_s
        return None

    def _traced_of(self, each: Logged) -> TransferTraced:
        pull_id = _pull_of(each).pull_id
        return self._traced.get((each.worker, pull_id), TransferTraced(pull_id, "", (), (), ()))

    def _offer(self, worker: str) -> Offer:
        at, held_s, outcome = self._offered[worker]
        start_s = at - self._clocks.of(worker).ahead_s - self._start_at
        ends = [each.event for each in self._gathered.offers[worker] if isinstance(each.event, LeaseEnded)]
        advances = ends[-1].advances if ends else ()
        return Offer(worker=worker, start_s=start_s, held_s=held_s, outcome=outcome, advances=advances)

    def _pull(self, each: Logged) -> PullTrace:
        event = _pull_of(each)
        report, traced = _report_of(event), self._traced_of(each)
        start_s = self._called(each) - self._start_at
        groups = [group for group in traced.groups if group.peer < len(traced.peers)]
        complete = len(groups) == len(traced.groups)
        return PullTrace(
            worker=each.worker,
            local_request_id=event.local_request_id,
            start_s=start_s,
            total_s=max(0.0, _total_s(event)),
            phases=list(_pull_phases(event, start_s)),
            nbytes=report.nbytes,
            nbytes_wanted=0 if isinstance(event, TransferCompleted) else event.nbytes_wanted,
            descriptors=report.descriptors,
            merged=report.merged,
            reads=report.reads,
            early=report.early,
            transport=report.transport,
            plane=report.plane,
            failure=_failure_of(event),
            traced=bool(groups) and complete,
            peers=traced.peers,
            groups=traced.groups if complete else (),
            chunks=tuple(chunk for chunk in traced.chunks if complete and chunk[0] < len(groups)),
            chunks_omitted=traced.chunks_omitted,
            ranges=traced.ranges,
        )

    def _phases(
        self, ending: Sequence[PullTrace], router: Routed | None, first_token_s: float | None, offered_at: float | None
    ) -> Iterable[Phase]:
        """Divide the time from the start to the first token, or to the last that is known."""
        last_s = 0.0
        for pull in ending:
            offered_s = router.prefill_s if router and offered_at is None else (offered_at or 0.0) - self._start_at
            offered_s = min(max(0.0, offered_s), max(0.0, pull.start_s))
            if router is not None:
                yield Phase("prefill", 0.0, offered_s)
            if router is not None or offered_at is not None:
                yield Phase("ticket", offered_s, max(0.0, pull.start_s) - offered_s)
            yield from pull.phases
            last_s = pull.end_s
        if not ending and router is not None:
            yield Phase("prefill", 0.0, router.prefill_s)
            last_s = router.prefill_s
        if first_token_s is not None:
            yield Phase("decode step", last_s, max(0.0, first_token_s - last_s))
            if router is not None and router.failure is not None:
                last_s = max(last_s, first_token_s)
                yield Phase("answer", last_s, max(0.0, router.elapsed_s - last_s))
        elif router is not None:
            yield Phase("decode", last_s, max(0.0, router.elapsed_s - last_s))


def _failure_of(pull: PullEnded) -> Failure | None:
    if isinstance(pull, TransferCompleted):
        return None
    return Failure(pull.code, pull.phase, pull.peer, pull.detail, pull.remedy)


def _pull_phases(pull: PullEnded, start_s: float) -> Iterable[Phase]:
    """Divide the time of a pull. What the phases of a failed pull lack belongs to the phase that failed."""
    timings_s = _report_of(pull).timings_s
    seconds = {name: max(0.0, timings_s.get(name, 0.0)) for name in PHASES}
    total_s = max(0.0, _total_s(pull))
    known_s = sum(seconds.values())
    if known_s > total_s:
        seconds = {name: each * total_s / known_s for name, each in seconds.items()}
    else:
        phase = "deliver" if isinstance(pull, TransferCompleted) else FAILED_IN.get(pull.phase, pull.phase)
        seconds[phase if phase in seconds else "deliver"] += total_s - known_s
    for name, each in seconds.items():
        if each:
            yield Phase(name, start_s, each)
            start_s += each


def _error_s(used: Sequence[ComparedClock]) -> float | None:
    """Return the largest error between clocks; None if some were not compared."""
    errors = [clock.error_s for clock in used]
    if None in errors or len({clock.reference for clock in used}) > 1:
        return None
    return max((error for error in errors if error is not None), default=0.0)


def _routed(each: Logged) -> Routed:
    record = each.event
    assert isinstance(record, RequestRecord)
    first, failure = record.first_bytes_s, None
    if each.code:
        server = record.prefill_server if record.phase == "prefill" else record.decode_server
        failure = Failure(each.code, record.phase, server, record.detail, each.remedy)
    return Routed(
        prefill_s=max(0.0, each.elapsed_s if record.prefill_s is None else record.prefill_s),
        first_bytes_s=None if first is None else max(0.0, first),
        elapsed_s=max(0.0, each.elapsed_s),
        client=record.client,
        prefill_server=record.prefill_server,
        decode_server=record.decode_server,
        failed_attempts=record.failed_attempts,
        status=record.status,
        sent_bytes=record.sent_bytes,
        failure=failure,
    )


def _outcome(pulls: Sequence[PullTrace], delivered: Sequence[PullTrace], offered: bool, router: Routed | None) -> str:
    if router is not None and router.failure is not None:
        return "failed"
    if delivered:
        return "completed"
    return "failed" if pulls else "offered" if offered else "answered"


def _rate(pulls: Sequence[PullTrace]) -> float:
    """Return the rate of pulls while at least one of them moved bytes, in 10**9 bytes per second."""
    moving_s, until = 0.0, float("-inf")
    for start, end in sorted(pull.moving for pull in pulls):
        moving_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return sum(pull.nbytes for pull in pulls) / moving_s / 1e9 if moving_s > 0 else 0.0
