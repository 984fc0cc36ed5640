"""A trace on a terminal: one line for each request, and one request as a waterfall."""

from collections.abc import Iterator
from typing import Final

from kvflow.reprs import counted
from kvflow.tools.trace.model import Failure, PullTrace, RequestTrace, Routed, Trace
from kvflow.tools.trace.title import printable, shown_bytes, shown_rate

BAR: Final = 40
"""Characters of a bar."""

NAME: Final = 22
"""Characters of the name of a bar."""

ID_MAX: Final = 48
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
            beside = f"clock of {printable(clock.name)} beside {printable(clock.reference)}"
            yield f"{beside}: {_shown_clock(clock.ahead_s, clock.error_s)}"


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
    if request.router is not None:
        yield from _router_lines(request.router)
    for offer in request.offers:
        held = "" if offer.held_s is None else f", held for {offer.held_s:.3f} s, {printable(offer.outcome)}"
        yield f"offer of {printable(offer.worker)}: {_at(offer.start_s)}{held}"
    for pull in request.pulls:
        yield from _pull_lines(pull)


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
