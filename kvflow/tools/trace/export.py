"""A trace as files: a page for a browser, and JSON for Perfetto."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvflow.tools.trace.records import Failure, PullTrace, RequestTrace, Trace

REQUESTS_MAX: Final = 2000
"""Requests of a page: failed ones first, then the slowest."""

DETAILS_MAX: Final = 400_000
"""Chunks and runs of blocks of a page, some 10 MiB. Requests beyond have none."""

ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON may escape and that mean something to a browser."""


def page(trace: Trace) -> str:
    """Return a page for a browser, which loads nothing. Names in it come from outside: data, never markup."""
    template = files("kvflow.tools.trace").joinpath("page.html").read_text(encoding="utf-8")
    hashes = [f"{tag}-src {_hashes(template, tag)}" for tag in ("script", "style")]
    policy = "; ".join(["default-src 'none'", *hashes])
    before, _, rest = template.partition("POLICY")
    middle, _, after = rest.partition("DATA")
    return f"{before}{policy}{middle}{_data(trace)}{after}"


def _hashes(template: str, tag: str) -> str:
    """Return the hashes of our scripts or styles: a browser refuses all others."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _data(trace: Trace) -> str:
    """Return the trace as JSON in which no character ends a script."""
    order = sorted(trace.requests, key=lambda request: (request.outcome != "failed", -request.total_s))
    shown = {id(request) for request in order[:REQUESTS_MAX]}
    remaining = DETAILS_MAX
    requests: list[RequestTrace] = []
    for request in trace.requests:
        if id(request) in shown:
            details = sum(map(_num_details, request.pulls))
            requests.append(request if details <= remaining else _without_details(request))
            remaining -= details if details <= remaining else 0
    text = msgspec.json.encode(replace(trace, requests=requests)).decode()
    omitted = len(trace.requests) - len(requests)
    data = f'{{"omitted":{omitted},"trace":{text}}}'
    return re.sub("[<>&\u2028\u2029]", lambda found: ESCAPES[found[0]], data)


def _without_details(request: RequestTrace) -> RequestTrace:
    pulls = [replace(pull, groups=(), chunks=(), ranges=()) for pull in request.pulls]
    return replace(request, pulls=pulls)


def _num_details(pull: PullTrace) -> int:
    return len(pull.chunks) + len(pull.ranges) + sum(len(group.pairs) for group in pull.groups)


TraceEvent = dict[str, Any]
Place = tuple[int, int]
"""Numbers of a process and of one of its lanes."""

LANES_MAX = 4096
"""Lanes of one process. Requests that do not overlap share one."""


def perfetto(trace: Trace) -> bytes:
    """Return the JSON of Chrome's trace viewer, which Perfetto reads, with arrows from prefill to decode."""
    tracks = _Tracks(min((request.start_at for request in trace.requests), default=0.0))
    for request in trace.requests:
        tracks.add(request)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": tracks.events})


class _Tracks:
    """Events so far, and the lanes of each process, from a moment since 1970 on."""

    def __init__(self, origin: float) -> None:
        self.events: list[TraceEvent] = []
        self._origin = origin
        self._processes: dict[str, int] = {}
        self._free_at: dict[int, list[int]] = {}
        self._enclosing: dict[Place, list[int]] = {}
        self._arrows = 0

    def add(self, request: RequestTrace) -> None:
        arguments = {"request_id": request.request_id, "title": request.title}
        start_at = request.start_at - self._origin
        if request.router is not None:
            end_s = request.router.elapsed_s
            place = self._lane("router", start_at, end_s)
            servers = {"prefill_server": request.router.prefill_server, "decode_server": request.router.decode_server}
            failed = _failed(request.router.failure)
            self._span(place, request.request_id, start_at, end_s, {**arguments, **servers, **failed})
            for phase in request.phases:
                self._span(place, phase.name, start_at + phase.start_s, phase.seconds, {})
        begun: list[tuple[Place, float]] = []
        for offer in request.offers:
            place = self._lane(f"prefill {offer.worker}", start_at + offer.start_s, offer.held_s or 0.0)
            held = {"outcome": offer.outcome, **arguments}
            self._span(place, "lease", start_at + offer.start_s, offer.held_s or 0.0, held)
            before_s = 0.0
            for at_s, tokens in offer.advances:
                at = start_at + offer.start_s + before_s
                self._span(place, f"to token {tokens}", at, max(0.0, at_s - before_s), {})
                before_s = at_s
            begun.append((place, start_at + offer.start_s))
        for pull in request.pulls:
            (process, lane), moving_at = self._pull(pull, start_at, arguments)
            for (from_process, from_lane), offered_at in begun:
                self._arrows += 1
                flow = {"cat": "kvflow", "name": "cache", "id": self._arrows}  # Perfetto drops arrows with other ids
                end = {"pid": process, "tid": lane, "ts": _micro(max(moving_at, offered_at))}
                self.events.append({**flow, "ph": "s", "pid": from_process, "tid": from_lane, "ts": _micro(offered_at)})
                self.events.append({**flow, "ph": "f", "bp": "e", **end})

    def _pull(self, pull: PullTrace, start_at: float, arguments: TraceEvent) -> tuple[Place, float]:
        """Add a pull, and return its place, and when its bytes begin to move."""
        called_at = start_at + pull.start_s
        place = self._lane(f"decode {pull.worker}", called_at, pull.total_s)
        numbers = {"nbytes": pull.nbytes, "descriptors": pull.descriptors, "reads": pull.reads}
        self._span(place, "pull", called_at, pull.total_s, {**arguments, **numbers, **_failed(pull.failure)})
        for phase in pull.phases:
            self._span(place, phase.name, start_at + phase.start_s, phase.seconds, {})
        for _, end, posted_s, arrived_s in pull.ranges:
            row = self._lane(f"ranges of {pull.worker}", called_at + posted_s, max(0.0, arrived_s - posted_s))
            self._span(row, f"to token {end}", called_at + posted_s, max(0.0, arrived_s - posted_s), {})
        for group, posted_s, arrived_s, nbytes, descriptors in pull.chunks:
            known = {"group": pull.groups[group].target_group, "nbytes": nbytes, "descriptors": descriptors}
            seconds = max(0.0, arrived_s - posted_s)
            row = self._lane(f"reads of {pull.worker}", called_at + posted_s, seconds)
            self._span(row, f"group {known['group']}", called_at + posted_s, seconds, known)
        return place, start_at + pull.moving[0]

    def _span(self, place: Place, name: str, at: float, seconds: float, arguments: TraceEvent) -> None:
        """Add a span. One that encloses others of its lane comes before them.

        Perfetto drops a span that overlaps another one by a nanosecond, which rounding can cause. It is cut there.
        """
        start, end = _nano(at), _nano(at + seconds)
        enclosing = self._enclosing.setdefault(place, [])
        while enclosing and (enclosing[-1] <= start or enclosing[-1] - start < end - enclosing[-1]):
            start = max(start, enclosing.pop())
        end = max(start, min(end, enclosing[-1]) if enclosing else end)
        enclosing.append(end)
        at_place = {"pid": place[0], "tid": place[1], "ts": start / 1e3, "dur": (end - start) / 1e3}
        self.events.append({"ph": "X", "cat": "kvflow", "name": name, **at_place, "args": arguments})

    def _lane(self, process: str, at: float, seconds: float) -> Place:
        """Return a process and a lane of it that is free for a span."""
        number = self._processes.get(process)
        if number is None:
            number = self._processes[process] = len(self._processes) + 1
            self.events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}})
        lanes = self._free_at.setdefault(number, [])
        lane = next((lane for lane, free_at in enumerate(lanes) if free_at <= _nano(at)), len(lanes))
        if lane == len(lanes) and lane < LANES_MAX:
            lanes.append(0)
        lane = min(lane, LANES_MAX - 1)
        lanes[lane] = max(lanes[lane], _nano(at + seconds))
        return number, lane + 1


def _failed(failure: Failure | None) -> TraceEvent:
    return {} if failure is None else {"code": failure.code, "remedy": failure.remedy}


def _nano(seconds: float) -> int:
    return round(seconds * 1e9)


def _micro(seconds: float) -> float:
    return _nano(seconds) / 1e3
