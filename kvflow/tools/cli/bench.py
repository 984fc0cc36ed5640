"""``kvflow bench``: what kvflow costs beside bare NIXL, measured between two processes."""

import argparse
import importlib
import socket
import sys
from time import monotonic, sleep
from typing import TYPE_CHECKING

from kvflow.errors import KvflowError
from kvflow.tools.cli.arguments import ProgressLine, add_command, address, at_least, missing_checkout, print_failure

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

BENCHMARKS = {
    "descriptors": (15, "speed of direct against staged reads, by count and size of descriptors"),
    "layouts": (15, "speed of packed against per-layer caches, by block count and half-page size"),
    "pull": (300, "latency and throughput of one pull by size, with its fence, by phase"),
    "fence": (300, "cost that the fence and the release add to a pull"),
    "loop": (5, "lag of the event loop while 1 GiB moves, and idle"),
    "idle": (5, "CPU of an idle worker, alone and with 50 peers"),
}
"""Name -> rounds unless told otherwise, and what it measures."""

AT_SOURCES = ("pull", "descriptors")
"""Benchmarks that can read from a source elsewhere."""

ON_DEVICES = ("pull", "layouts", "descriptors")
"""Benchmarks whose caches may lie on a device."""

PACKAGED = {"pull": "kvflow.tools.bench.pull"}
"""Benchmarks that users run on their own machines. All others are in ``tests/benchmarks`` of a checkout."""

CONNECT_S = 10.0
"""How long a source elsewhere may take to accept. A network that drops packets would have us wait for minutes."""

SOURCE_START_S = 15.0
"""How long a source that was started at the same time may take until it listens."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``bench`` to the command line."""
    parser = add_command(
        commands,
        "bench",
        summary="measure kvflow beside bare NIXL, between two processes",
        description="Measure what kvflow costs beside bare NIXL, plain TCP and memcpy, between two processes.",
        examples="kvflow bench pull --rounds 50",
    )
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (rounds, summary) in BENCHMARKS.items():
        kind = add_command(
            kinds, name, summary=summary, description=f"Measure the {summary}.", examples=f"kvflow bench {name}"
        )
        kind.add_argument(
            "--rounds", type=at_least(1), default=rounds, help="most paired rounds (default: %(default)s)"
        )
        kind.add_argument("--seed", type=int, default=0, help="seed of the block ids (default: %(default)s)")
        kind.add_argument("--json", action="store_true", help="print JSON instead of tables")
        if name in AT_SOURCES:
            kind.add_argument(
                "--source",
                type=address,
                metavar="HOST:PORT",
                help="address of a running source (python -m kvflow.tools.bench.source --listen HOST:PORT)",
            )
        if name in ON_DEVICES:
            kind.add_argument(
                "--device", default="cpu", help="where our cache lies: cpu, cuda or cuda:1 (default: %(default)s)"
            )
            kind.add_argument("--source-device", help="where the source's cache lies (default: that of --device)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run one benchmark and print its tables; 1 if it, or its source, is not there."""
    module = PACKAGED.get(options.benchmark, f"tests.benchmarks.{options.benchmark}")
    if problem := missing_checkout(module, f"kvflow bench {options.benchmark}"):
        print(problem, file=sys.stderr)
        return 1
    source = options.source if options.benchmark in AT_SOURCES else None
    # Asked before torch and NIXL are loaded, which takes seconds.
    if source is not None and (reason := _why_unreachable(source)):
        remedy = "start one with python -m kvflow.tools.bench.source --listen HOST:PORT"
        print(f"no source at {source}: {reason}; {remedy}", file=sys.stderr)
        return 1
    # Loaded here, so that other commands and --help wait for neither torch nor NIXL.
    import msgspec  # noqa: PLC0415
    import uvloop  # noqa: PLC0415

    from kvflow.memory.device import require_device  # noqa: PLC0415
    from kvflow.tools.bench.geometry import Devices  # noqa: PLC0415
    from kvflow.tools.bench.result import Result, header  # noqa: PLC0415

    about = header()
    benchmark = importlib.import_module(module)
    extra = {"source_address": source} if options.benchmark in AT_SOURCES else {}
    progress = ProgressLine(as_json=options.json)
    try:
        if options.benchmark in ON_DEVICES:
            extra["devices"] = devices = Devices(here=options.device, there=options.source_device or options.device)
            for device in {devices.here, *([] if source else [devices.there])}:
                require_device(device)
        tables = uvloop.run(benchmark.run(options.rounds, options.seed, progress, **extra))
    except KvflowError as error:
        progress("")
        return print_failure(f"kvflow bench {options.benchmark}", error, as_json=options.json)
    finally:
        progress("")
    result = Result(name=options.benchmark, header=about, tables=tables)
    print(msgspec.json.encode(result).decode() if options.json else result)
    return 0


def _why_unreachable(address: str) -> str:
    """Connect to ``host:port`` and hang up, which a source ignores; return why that failed, or an empty string.

    A source that was started together with the benchmark may not listen yet, so a refusal is repeated.
    """
    host, _, port = address.rpartition(":")
    deadline = monotonic() + SOURCE_START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except ConnectionRefusedError as error:
            if monotonic() >= deadline:
                return str(error)
            sleep(0.2)
        except (OSError, UnicodeError) as error:  # a name that no resolver would take is a UnicodeError
            return str(error)
        else:
            return ""
