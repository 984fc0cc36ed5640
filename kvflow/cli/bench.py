"""``kvflow bench``: what kvflow costs beside bare NIXL, measured between two processes."""

import argparse
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kvflow
from kvflow.bench.writing import try_to_write
from kvflow.cli.arguments import address
from kvflow.config import CALIBRATION_VARIABLE
from kvflow.errors import KvflowError

if TYPE_CHECKING:
    # What argparse calls the object is private; this is its only use.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

BENCHMARKS = {
    "descriptors": (15, "cost of descriptors by count and size, and direct against staged reads"),
    "layouts": (15, "packed against per-layer, by block count and half-page size"),
    "pull": (300, "latency and throughput of one pull by size, with its fence, by phase"),
    "fence": (300, "what the fence and the release add to a pull, paired"),
    "loop": (5, "lag of the event loop while 1 GiB moves, and idle"),
    "idle": (5, "CPU of an idle worker, alone and with 50 peers"),
}
"""Name -> rounds unless told otherwise, and what it measures."""

AT_SOURCES = ("pull", "descriptors")
"""Benchmarks that can read from a source elsewhere."""

CHECKOUT = Path(kvflow.__file__).parents[1]
"""Where kvflow's repository is, if this runs from one."""

FROM_A_CHECKOUT = {"fence": "tests.benchmarks.fence"}
"""Benchmarks that the package does not contain: a worker without a fence must not be had by installing it."""

CALIBRATION_FILE = "kvflow-calibration.json"

CONNECT_S = 10.0
"""How long a source elsewhere may take to accept. A network that drops packets would have us wait for minutes."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser("bench", help="measure kvflow beside bare NIXL, between two processes")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (rounds, summary) in BENCHMARKS.items():
        kind = kinds.add_parser(name, help=summary)
        kind.add_argument("--rounds", type=int, default=rounds, help="paired rounds (default: %(default)s)")
        kind.add_argument("--seed", type=int, default=0, help="of block ids (default: %(default)s)")
        kind.add_argument("--json", action="store_true", help="print JSON instead of tables")
        if name in AT_SOURCES:
            kind.add_argument(
                "--source",
                type=address,
                metavar="HOST:PORT",
                help="a source that runs already: python -m kvflow.bench.source --listen HOST:PORT",
            )
        if name == "descriptors":
            kind.add_argument(
                "--calibrate", action="store_true", help="write the measured constants into a file, and stop"
            )
            kind.add_argument("--output", default=CALIBRATION_FILE, help="that file (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run one benchmark and print its tables; 1 if it, or its source, is not there, or a file not written."""
    module = FROM_A_CHECKOUT.get(options.benchmark)
    if module is not None and not CHECKOUT.joinpath(*module.split(".")).with_suffix(".py").exists():
        where = "a checkout of kvflow's repository"
        print(f"kvflow bench {options.benchmark} runs from {where} only; this is {CHECKOUT}", file=sys.stderr)
        return 1
    source = options.source if options.benchmark in AT_SOURCES else None
    output = options.output if getattr(options, "calibrate", False) else None
    # Asked before torch and NIXL are loaded, which takes seconds.
    if problem := _problem(source, output):
        print(problem, file=sys.stderr)
        return 1
    # What is measured is direct, and the file that is named may be the one that is to be written. Source processes
    # that are started here inherit it.
    os.environ.pop(CALIBRATION_VARIABLE, None)
    # Loaded here, so that other commands and --help wait for neither torch nor NIXL.
    import msgspec  # noqa: PLC0415
    import uvloop  # noqa: PLC0415

    from kvflow.bench.result import Result, header  # noqa: PLC0415

    about = header()
    benchmark = importlib.import_module(module or f"kvflow.bench.{options.benchmark}")
    extra = [source] if options.benchmark in AT_SOURCES else []
    if options.benchmark == "descriptors":
        extra.append(output)
    try:
        tables = uvloop.run(benchmark.run(options.rounds, options.seed, _show_progress, *extra))
    except KvflowError as error:
        _show_progress("")
        print(error, file=sys.stderr)
        return 1
    _show_progress("")
    result = Result(name=options.benchmark, header=about, tables=tables)
    print(msgspec.json.encode(result).decode() if options.json else result)
    return 0


def _problem(source: str | None, output: str | None) -> str:
    """Say what would end the benchmark in vain: a source that is not there, a file that cannot be written."""
    if source is not None and (reason := _why_unreachable(source)):
        remedy = "start one with python -m kvflow.bench.source --listen HOST:PORT"
        return f"no source at {source}: {reason}; {remedy}"
    if output is not None:
        try:
            try_to_write(Path(output))
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            return f"{output} cannot be written: {error}"
    return ""


def _why_unreachable(address: str) -> str:
    """Connect to ``host:port`` once and hang up, which a source takes no notice of; return what failed, or nothing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # a name that no resolver would take is a UnicodeError
        return str(error)
    return ""


def _show_progress(text: str) -> None:
    """Show one line that replaces itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
