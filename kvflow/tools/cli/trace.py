"""``kvflow trace``: joins the logs of a router and of workers by request, and shows where the time went."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvflow.reprs import counted
from kvflow.tools.cli.arguments import ProgressLine, add_command
from kvflow.tools.trace import page, perfetto
from kvflow.tools.trace.joining import read_trace
from kvflow.tools.trace.records import Reading, RequestTrace, Trace
from kvflow.tools.trace.text import list_lines, reading_lines, waterfall_lines

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Add ``trace`` to the command line."""
    parser = add_command(
        commands,
        "trace",
        summary="show where the time of each request went, from the logs of all sides",
        description="Join the JSON lines that a router, prefill workers and decode workers have logged, by request. "
        "Clocks of several machines are compared by their handshakes.",
        examples="kvflow trace out/demo/*.jsonl --html trace.html\nkvflow trace *.jsonl --request cmpl-7",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a log of a router or of workers")
    parser.add_argument("--request", metavar="ID", help="show one request as a waterfall, by any of its names")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page for a browser; it needs no network")
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT", help="write a trace for Perfetto or chrome://tracing, as JSON"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read logs and show their requests; 1 if there is none, 2 if a file cannot be read or written."""
    line = ProgressLine(as_json=options.json)

    def show_progress(reading: Reading) -> None:
        line(f"{reading.lines:,} lines of {reading.files + 1} of {counted(len(options.files), 'file')}")

    try:
        trace = read_trace(options.files, show_progress)
        line("joining records")
        if options.request is not None:
            trace.requests = [request for request in trace.requests if options.request in _names(request)]
        if options.html:
            options.html.write_text(page.render(trace), encoding="utf-8")
        if options.perfetto:
            options.perfetto.write_bytes(perfetto.encode(trace))
    except OSError as error:
        line("")
        print(f"kvflow trace: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        line("")
    if options.json:
        print(msgspec.json.encode(trace).decode())
    else:
        for text in _lines(options, trace):
            print(text)
    if not trace.requests:
        what = "has no request" if options.request is None else f"has no request {options.request!r}"
        print(f"kvflow trace: the log {what}", file=sys.stderr)
        return 1
    return 0


def _names(request: RequestTrace) -> set[str]:
    return {request.request_id, *(pull.local_request_id for pull in request.pulls)}


def _lines(options: argparse.Namespace, trace: Trace) -> list[str]:
    if options.request is not None:
        return [line for request in trace.requests for line in waterfall_lines(request)]
    lines = list(reading_lines(trace) if options.html or options.perfetto else list_lines(trace))
    return lines + [f"written: {path}" for path in (options.html, options.perfetto) if path]
