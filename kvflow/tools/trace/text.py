"""A trace as text: where the time of a request went in one sentence, all requests in lines, one as a waterfall."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from kvflow.errors import counted
from kvflow.tools.trace.records import Failure, PullTrace, RequestTrace, Routed, Trace

ONE: Final = {"post": "wire", "scatter": "wire"}
"""Phases that the sentence counts with another one."""


def title_of(request: RequestTrace) -> str:
    """Return the title of a request."""
    whole, parts = shown_ms(_merged(request), request.total_s)
    moved = _moved(request)
    if moved and "wire" in parts:
        parts["wire"] = parts["wire"] or "0"
    spent = [
        f"{text} {name}{f' ({moved})' if name == 'wire' and moved else ''}" for name, text in parts.items() if text
    ]
    sentence = f"{_beginning(request, whole)}: {', '.join(spent)}" if spent else _beginning(request, whole)
    failure = request.failure
    if failure is None:
        return sentence
    remedy = f". {printable(failure.remedy)}" if failure.remedy else ""
    return f"{sentence}{remedy}"


def _beginning(request: RequestTrace, whole: str) -> str:
    since = "request" if request.router else "offer" if _has(request, "ticket") else "call of pull"
    failure = request.failure
    if failure is not None:
        after = f"{whole} ms after the {since}"
        verb = "answered without the cache" if request.router else "failed"
        if request.router and request.router.failure:
            verb, sent = "failed", request.router.sent_bytes
            after += f" and {shown_bytes(sent)} of the answer" if sent else ""
        return f"{verb} {after}, {printable(failure.code)} in {printable(failure.phase)}"
    if request.outcome == "offered" and not request.router:
        ends = [offer for offer in request.offers if offer.held_s is not None]
        if not ends:
            return "offered, and no pull is recorded"
        held_s = max(offer.held_s or 0.0 for offer in ends)
        return f"offered for {held_s:.3g} s, {printable(ends[-1].outcome)}, and no pull is recorded"
    if request.first_token_s is not None:
        return f"first token {whole} ms after the {since}"
    if request.router is not None:
        return f"answered {whole} ms after the request"
    return f"cache delivered {whole} ms after the {since}"


def _has(request: RequestTrace, name: str) -> bool:
    return any(phase.name == name for phase in request.phases)


def _merged(request: RequestTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase in request.phases:
        name = ONE.get(phase.name, phase.name)
        found[name] = found.get(name, 0.0) + phase.seconds
    return found


def _moved(request: RequestTrace) -> str:
    if not request.nbytes:
        return ""
    rate = f", {shown_rate(request.gb_per_s)}" if request.gb_per_s else ""
    reads = f" in {counted(request.reads, 'read')}" if request.reads else ""
    return f"{shown_bytes(request.nbytes)}{reads}{rate}"


def shown_ms(seconds: Mapping[str, float], total_s: float) -> tuple[str, dict[str, str]]:
    """Return a time in milliseconds, and its parts, which add up to it as they are shown; parts of zero are empty."""
    total_ms = total_s * 1e3
    digits = min(3, max(0, 2 - math.floor(math.log10(total_ms)))) if total_ms > 0 else 0
    scale = 1e3 * 10**digits
    units = {name: int(each * scale) for name, each in seconds.items()}
    missing = round(total_s * scale) - sum(units.values())
    by_rest = sorted(units, key=lambda name: seconds[name] * scale - units[name], reverse=True)
    for name in by_rest[: max(0, missing)]:
        units[name] += 1
    shown = {name: f"{each / 10**digits:.{digits}f}" if each else "" for name, each in units.items()}
    return f"{round(total_s * scale) / 10**digits:.{digits}f}", shown


def shown_rate(gb_per_s: float) -> str:
    """Return a rate with three digits."""
    return f"{gb_per_s:.{0 if gb_per_s >= 100 else 1 if gb_per_s >= 10 else 2}f} GB/s"


def shown_bytes(nbytes: int) -> str:
    """Return a size in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.{1 if nbytes < 100 * size else 0}f} {unit}"
    return f"{nbytes} B"


def printable(text: str, length: int = 200) -> str:
    """Return text for a terminal, where it can move no cursor and end no line."""
    shown = "".join(each if each.isprintable() else "\ufffd" for each in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."


BAR: Final = 40
NAME: Final = 22
ID_MAX: Final = 48
OVERLAP_MAX: Final = 256  # lines of what was computed and read at the same time
PARTS: Final = " ▏▎▍▌▋▊▉"


def list_lines(trace: Trace) -> Iterator[str]:
    """Return one line for each request, and what was read."""
    width = max((len(printable(request.request_id, ID_MAX)) for request in trace.requests), default=0)
    for request in trace.requests:
        yield f"{printable(request.request_id, ID_MAX):<{width}}  {request.title}"
    yield from reading_lines(trace)


def reading_lines(trace: Trace) -> Iterator[str]:
    """Say how much was read, what was skipped, and how clocks compare."""
    reading = trace.reading
    yield (
        f"{counted(len(trace.requests), 'request')} in {counted(reading.lines, 'line')} of "
        f"{counted(reading.files, 'file')}"
    )
    if reading.broken:
        yield f"{counted(reading.broken, 'line')} skipped: not records, or longer than a record may be"
    if reading.skipped:
        yield f"{counted(reading.skipped, 'record')} skipped: the files have too many"
    for clock in sorted(trace.clocks, key=lambda clock: clock.name):
        if clock.name != clock.reference:
            compared = f"clock of {printable(clock.name)} beside {printable(clock.reference)}"
            yield f"{compared}: {_shown_clock(clock.ahead_s, clock.error_s)}"


def _shown_clock(ahead_s: float, error_s: float | None) -> str:
    if error_s is None:
        return "not measured, taken as equal"
    return f"{ahead_s * 1e3:+.3f} ms, error at most {error_s * 1e3:.3f} ms"


def waterfall_lines(request: RequestTrace) -> Iterator[str]:
    """Return one request as a waterfall."""
    yield printable(request.request_id)
    yield request.title
    if request.clock_error_s is None:
        yield "times of other machines: the clocks were not compared"
    elif request.clock_error_s:
        yield f"times of other machines: error at most {request.clock_error_s * 1e3:.3f} ms"
    yield ""
    end_s = max(
        [
            request.total_s,
            *(pull.end_s for pull in request.pulls),
            *((request.router.elapsed_s,) if request.router else ()),
        ]
    )
    for phase in request.phases:
        yield _bar(phase.name, phase.start_s, phase.seconds, end_s)
    yield _bar("whole", 0.0, request.total_s, end_s)
    for bar in sorted(_overlap(request), key=lambda bar: bar[1] + bar[2])[:OVERLAP_MAX]:
        yield _bar(*bar, end_s)
    if request.router is not None:
        yield from _router_lines(request.router)
    for offer in request.offers:
        held = "" if offer.held_s is None else f", held for {offer.held_s:.3f} s, {printable(offer.outcome)}"
        yield f"offer of {printable(offer.worker)}: {_at(offer.start_s)}{held}"
    for pull in request.pulls:
        yield from _pull_lines(pull)


def _overlap(request: RequestTrace) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and seconds of what was computed of open offers, and of what was read meanwhile."""
    for offer in request.offers:
        before_s = 0.0
        for at_s, tokens in offer.advances:
            yield f"computed to {tokens:,}", offer.start_s + before_s, max(0.0, at_s - before_s)
            before_s = at_s
    for pull in request.pulls:
        for _, end, posted_s, arrived_s in pull.ranges:
            yield f"read to {end:,}", pull.start_s + posted_s, max(0.0, arrived_s - posted_s)


def _router_lines(router: Routed) -> Iterator[str]:
    used = [
        f"{name} {printable(value)}"
        for name, value in (
            ("client", router.client),
            ("prefill server", router.prefill_server),
            ("decode server", router.decode_server),
        )
        if value
    ]
    if used:
        yield f"router: {', '.join(used)}, {shown_bytes(router.sent_bytes)} of the answer"
    for attempt in router.failed_attempts:
        yield f"  {printable(attempt.role)} server {printable(attempt.server)} failed: {printable(attempt.error)}"
    if router.failure is not None:
        yield from _failure_lines(router.failure)


def _failure_lines(failure: Failure) -> Iterator[str]:
    at = f" at {printable(failure.peer)}" if failure.peer else ""
    yield f"  {printable(failure.code)} in {printable(failure.phase)}{at}: {printable(failure.detail)}"
    if failure.remedy:
        yield f"  {printable(failure.remedy)}"


def _bar(name: str, start_s: float, seconds: float, end_s: float) -> str:
    scale = BAR / end_s if end_s > 0 else 0.0
    first, width = int(start_s * scale), seconds * scale
    whole, part = int(width), PARTS[int(width % 1 * 8)].strip()
    bar = " " * first + "█" * whole + (part or ("" if whole else "▏"))
    return f"{printable(name, NAME):<{NAME}} {bar[: BAR + 1]:<{BAR + 1}} {seconds * 1e3:10.3f} ms"


def _at(seconds: float) -> str:
    return f"{seconds * 1e3:+.3f} ms"


def _pull_lines(pull: PullTrace) -> Iterator[str]:
    over = " over " + printable(f"{pull.transport} ({pull.plane})") if pull.transport else ""
    moved = f"in {counted(pull.reads, 'read')} of {counted(pull.descriptors, 'descriptor')}"
    if pull.failure is not None:
        moved = f"of {shown_bytes(pull.nbytes_wanted)}"
    times = f"{_at(pull.start_s)}, {pull.total_s * 1e3:.3f} ms"
    yield f"pull of {printable(pull.worker)}: {times}, {shown_bytes(pull.nbytes)} {moved}{over}"
    if pull.failure is not None:
        yield from _failure_lines(pull.failure)
    if pull.early:
        yield f"  {counted(pull.early, 'read')} came before the lease was held, and were repeated"
    for number, group in enumerate(pull.groups):
        chunks = [chunk for chunk in pull.chunks if chunk[0] == number]
        nbytes = sum(chunk[3] for chunk in chunks)
        busy_s = sum(max(0.0, chunk[2] - chunk[1]) for chunk in chunks)
        rate = f", {shown_rate(nbytes / busy_s / 1e9)}" if busy_s > 0 else ""
        units = counted(sum(count for _, _, count in group.pairs), "unit")
        yield (
            f"  group {group.source_group} of {printable(pull.peers[group.peer])} to group {group.target_group}: "
            f"{units} in {counted(len(group.pairs), 'run')}, {counted(group.descriptors, 'descriptor')}, "
            f"{shown_bytes(nbytes)} in {counted(len(chunks), 'chunk')}{rate}"
        )
    if not pull.traced and pull.failure is None:
        yield "  no single reads and blocks: set the logger kvflow.transfer to DEBUG to record them"
