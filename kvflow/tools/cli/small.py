"""``kvflow trace``, ``keys``, ``bench``, ``demo`` and ``proxy``: their flags, and how they begin and end."""

import argparse
import asyncio
import importlib
import os
import resource
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic, sleep

import msgspec

from kvflow.addresses import host_and_port
from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from kvflow.errors import counted
from kvflow.observability.logs import configure_logging
from kvflow.tools.cli.arguments import (
    CommandFailed,
    ProgressLine,
    Subparsers,
    above_0,
    add_command,
    address,
    at_least,
    bound_address,
    keeper,
    missing_checkout,
    number_from,
    require_extra,
    server,
    with_default,
)
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.trace import export
from kvflow.tools.trace.joining import read_trace
from kvflow.tools.trace.records import Reading, RequestTrace, Trace
from kvflow.tools.trace.text import list_lines, reading_lines, waterfall_lines


def add_trace(commands: Subparsers) -> None:
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
    parser.set_defaults(run=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Read logs and show their requests; 1 if there is none, 2 if a file cannot be read or written."""
    line = ProgressLine(as_json=options.json)

    def show_progress(reading: Reading) -> None:
        line(f"{reading.lines:,} lines of {reading.files + 1} of {counted(len(options.files), 'file')}")

    try:
        with line:
            trace = read_trace(options.files, show_progress)
            line("joining records")
            if options.request is not None:
                trace.requests = [request for request in trace.requests if options.request in _names_of(request)]
            if options.html:
                options.html.write_text(export.page(trace), encoding="utf-8")
            if options.perfetto:
                options.perfetto.write_bytes(export.perfetto(trace))
    except OSError as error:
        raise CommandFailed(f"{error.filename}: {error.strerror}") from error
    if options.json:
        print(msgspec.json.encode(trace).decode())
    else:
        for text in _trace_lines(options, trace):
            print(text)
    if not trace.requests:
        which = "" if options.request is None else f" {options.request!r}"
        raise CommandFailed(f"the log has no request{which}", status=1)
    return 0


def _names_of(request: RequestTrace) -> set[str]:
    return {request.request_id, *(pull.local_request_id for pull in request.pulls)}


def _trace_lines(options: argparse.Namespace, trace: Trace) -> list[str]:
    if options.request is not None:
        return [line for request in trace.requests for line in waterfall_lines(request)]
    lines = list(reading_lines(trace) if options.html or options.perfetto else list_lines(trace))
    return lines + [f"written: {path}" for path in (options.html, options.perfetto) if path]


PRIVATE_KEY_BYTES = 32


def add_keys(commands: Subparsers) -> None:
    """Add ``keys`` to the command line."""
    parser = add_command(
        commands,
        "keys",
        summary="draw a cluster secret, or a key pair for one worker",
        description="Draw the secret that all workers of a cluster share, or a key pair for one worker beside it.",
        examples="kvflow keys secret >> kvflow.env",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    add_command(
        kinds,
        "secret",
        summary="draw a cluster secret and print it",
        description="Print KVFLOW_CLUSTER_SECRET= and a new secret of 256 bits, for every worker of the cluster.",
        examples="(umask 077; kvflow keys secret >> kvflow.env)",
    )
    add_command(
        kinds,
        "pair",
        summary="draw a key pair for one worker and print it",
        description="Print KVFLOW_PRIVATE_KEY= and a new private key for one worker. A comment above it holds the "
        "public key, which the other workers list in allowed_keys.",
        examples="(umask 077; kvflow keys pair >> prefill-0.env)",
    )
    add_command(
        kinds,
        "public",
        summary="read a private key from standard input and print its public key",
        description="Read a private key, or the output of kvflow keys pair, from standard input, and print its public "
        "key. A private key is no argument, because every user of the machine sees arguments.",
        examples="kvflow keys public < prefill-0.env",
    )
    parser.set_defaults(run=run_keys)


def run_keys(options: argparse.Namespace) -> int:
    """Print a new cluster secret or key pair as lines of an environment file, or the public key of a private one."""
    from kvflow.rendezvous.issuer import draw_pair, draw_secret, public_key  # noqa: PLC0415 - --help needs no ZeroMQ

    match options.kind:
        case "secret":
            print(f"{SECRET_VARIABLE}={draw_secret()}")
        case "pair":
            private, public = draw_pair()
            print(f"# public key, for allowed_keys of the others: {public}")
            print(f"{KEY_VARIABLE}={private}")
        case "public":
            print(public_key(_private_key()))
    return 0


def _private_key() -> bytes:
    """Read a private key from standard input: never an argument, because every user of the machine sees those."""
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    try:
        (text,) = lines
        private = bytes.fromhex(text.removeprefix(f"{KEY_VARIABLE}="))
    except ValueError:
        private = b""
    if len(private) != PRIVATE_KEY_BYTES:
        raise CommandFailed("standard input holds no private key. Give one line of 64 hexadecimal digits.")
    return private


BENCHMARKS = {
    "descriptors": (15, "speed of direct against staged reads, by count and size of descriptors"),
    "layouts": (15, "speed of packed against per-layer caches, by block count and half-page size"),
    "pull": (300, "latency and throughput of one pull by size, with its fence, by phase"),
    "beside": (15, "time of reads with kvflow, bare NIXL, plain sockets and Mooncake's engine, and of NixlConnector"),
    "fence": (300, "cost that the fence and the release add to a pull"),
    "loop": (5, "lag of the event loop while 1 GiB moves, and idle"),
    "idle": (5, "CPU of an idle worker, alone and with 50 peers"),
}
"""Name -> default of --rounds, and what it measures. Those not in PACKAGED are in a checkout's tests/benchmarks."""

AT_SOURCES = ("pull", "descriptors")

ON_DEVICES = ("pull", "layouts")

PACKAGED = {"pull": "kvflow.tools.bench.pull"}

CONNECT_S = 10.0
"""A network that drops packets would have us wait for minutes."""

SOURCE_START_S = 15.0


def add_bench(commands: Subparsers) -> None:
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
        with_default(kind, "--rounds", rounds, "most paired rounds", type=at_least(1))
        with_default(kind, "--seed", 0, "seed of the block ids", type=int)
        kind.add_argument("--json", action="store_true", help="print JSON instead of tables")
        if name in AT_SOURCES:
            kind.add_argument(
                "--source",
                type=address,
                metavar="HOST:PORT",
                help="address of a running source (python -m kvflow.tools.bench.source --listen HOST:PORT)",
            )
        if name == "beside":
            kind.add_argument("--vllm", metavar="PYTHON", help="Python with vLLM (default: .venv-vllm/bin/python)")
        if name in ON_DEVICES:
            with_default(kind, "--device", "cpu", "where our cache lies: cpu, cuda or cuda:1")
            kind.add_argument("--source-device", help="where the source's cache lies (default: that of --device)")
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
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
    import uvloop  # noqa: PLC0415

    from kvflow.memory.device import require_device  # noqa: PLC0415
    from kvflow.tools.bench import Result, header  # noqa: PLC0415
    from kvflow.tools.bench.source import Devices  # noqa: PLC0415

    about = header()
    benchmark = importlib.import_module(module)
    extra = {"source_address": source} if options.benchmark in AT_SOURCES else {}
    if options.benchmark == "beside":
        extra["vllm"] = options.vllm
    with ProgressLine(as_json=options.json) as progress:
        if options.benchmark in ON_DEVICES:
            extra["devices"] = devices = Devices(here=options.device, there=options.source_device or options.device)
            for device in {devices.here, *([] if source else [devices.there])}:
                require_device(device)
        tables = uvloop.run(benchmark.run(options.rounds, options.seed, progress, **extra))
    result = Result(name=options.benchmark, header=about, tables=tables)
    print(msgspec.json.encode(result).decode() if options.json else result)
    return 0


def _why_unreachable(source: str) -> str:
    """Return why a source accepts no connection; empty if it does. One that was just started may not listen yet."""
    deadline = monotonic() + SOURCE_START_S
    while True:
        try:
            socket.create_connection(host_and_port(source), timeout=CONNECT_S).close()
        except ConnectionRefusedError as error:
            if monotonic() >= deadline:
                return str(error)
            sleep(0.2)
        except (OSError, UnicodeError) as error:  # a name that no resolver would take is a UnicodeError
            return str(error)
        else:
            return ""


NUM_PROMPTS = 24

ENGINES = {"prefill": "KVFLOW_DEMO_PREFILL", "decode": "KVFLOW_DEMO_DECODE"}
"""Engines that may run elsewhere -> the variable that can name each."""


def add_demo(commands: Subparsers) -> None:
    """Add ``demo`` to the command line."""
    parser = add_command(
        commands,
        "demo",
        summary="run a tiny engine over kvflow and compare its tokens",
        description="Start a prefill and a decode process of a tiny model, send prompts through both, and compare "
        "every token with a process that does both. All parts run on the CPU of this machine.",
        examples="kvflow demo --prompts 8",
    )
    prompts = number_from(int, 2, "too few: prompts are short and long, so give 2 or more")
    with_default(parser, "--prompts", NUM_PROMPTS, "number of prompts, 2 or more", type=prompts)
    parser.add_argument("--texts", type=Path, help="folder with README.md and docs/ for prompts; default: own code")
    with_default(parser, "--out", Path("out/demo"), "folder for logs", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, and no progress")
    for role, variable in ENGINES.items():
        parser.add_argument(
            f"--{role}",
            type=address,
            default=os.environ.get(variable),
            metavar="HOST:PORT",
            help=f"address of a running {role} engine; give both or none [{variable}]",
        )
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; 0 if every token is equal and nothing was left leased or quarantined."""
    require_extra(rich="demo", aiohttp="demo")
    if (options.prefill is None) != (options.decode is None):
        raise CommandFailed("give both --prefill and --decode, or neither")
    # Loaded here, so that other commands and --help do not wait for it.
    from kvflow.tools.demo.run import Engines, run_and_show  # noqa: PLC0415

    logs: Path = options.out
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (*logs.glob("*.jsonl"), *logs.glob("*.stderr")):
        stale.unlink()
    configure_logging(logs / "driver.jsonl")
    engines = Engines(prefill=options.prefill, decode=options.decode) if options.prefill else None
    return run_and_show(options.texts, options.prompts, logs, engines, as_json=options.json)


LISTEN = "127.0.0.1:8000"

FILES_MAX = 1 << 16
"""Open files that the proxy asks for: more than its settings need by default, and what many systems allow."""

SETTINGS = {
    "prefill_timeout_s": "seconds before the proxy asks the next prefill server",
    "requests_max": "most requests at once; further requests get 503",
    "headers_timeout_s": "timeout for the headers of a request, and for an idle connection",
    "body_timeout_s": "timeout for a body, plus the time for its announced bytes at --body-rate-min",
    "body_rate_min": "slowest rate of a body, in bytes per second",
    "body_bytes_max": "most bytes of a request, or of an answer that is not streamed",
    "write_timeout_s": "timeout for a client to read 64 KiB of an answer",
}
"""Numbers of ``ProxyConfig``, each a flag of that name."""


def add_proxy(commands: Subparsers) -> None:
    """Add ``proxy`` to the command line."""
    parser = add_command(
        commands,
        "proxy",
        summary="send completions to a prefill server, then to a decode server",
        description="Serve the APIs of OpenAI and Anthropic. Send each request to a prefill server first, and then, "
        "with the transfer parameters of its answer, to a decode server. Servers of one kind take turns.",
        examples="kvflow proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --listen 127.0.0.1:8000",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=server,
            action="append",
            required=True,
            metavar="URL",
            help=f"a {role} server, http://HOST:PORT; repeat it for more servers, which take turns",
        )
    parser.add_argument(
        "--keeper",
        type=keeper,
        action="append",
        default=[],
        metavar="URL=ENDPOINT",
        help="the control endpoint, tcp://HOST:PORT, of a decode server that keeps: prefill servers whose sources name "
        "it are told which texts it has answered",
    )
    fields = {field.name: field for field in msgspec.structs.fields(ProxyConfig)}
    with_default(parser, "--listen", LISTEN, "address for clients", type=bound_address, metavar="HOST:PORT")
    meaning = (
        "ask both servers at once, if prefill servers offer prompts while they compute them, or one after the other"
    )
    with_default(parser, "--dispatch", fields["dispatch"].default, meaning, choices=("serial", "concurrent"))
    for name, meaning in SETTINGS.items():
        kind, metavar = (float, "SECONDS") if fields[name].type is float else (int, "N")
        flag = f"--{name.replace('_', '-')}"
        with_default(parser, flag, fields[name].default, meaning, type=above_0(kind), metavar=metavar)
    parser.add_argument("--log", type=Path, help="file for the log, as JSON lines; standard error if not given")
    parser.set_defaults(run=run_proxy)


def run_proxy(options: argparse.Namespace) -> int:
    """Serve until told to stop; 0 then, 1 if the address is taken, 2 without aiohttp or a log that can be written."""
    require_extra(aiohttp="proxy")
    # Loaded here, so that other commands and --help do not wait for it.
    import uvloop  # noqa: PLC0415

    try:
        configure_logging(options.log)
    except OSError as error:
        raise CommandFailed(f"--log {options.log} cannot be written: {error.strerror}") from error
    for url, _ in options.keeper:
        if url not in options.decode:
            servers = " ".join(options.decode)
            raise CommandFailed(f"--keeper names {url}, which is none of the --decode servers: {servers}")
    config = ProxyConfig(
        prefill=tuple(options.prefill),
        decode=tuple(options.decode),
        keepers=dict(options.keeper),
        dispatch=options.dispatch,
        **{name: getattr(options, name) for name in SETTINGS},
    )
    _raise_file_limit()
    return uvloop.run(_serve(config, options.listen))


def _raise_file_limit() -> None:
    """Raise the soft limit, which is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: ProxyConfig, listen: str) -> int:
    from kvflow.tools.proxy.server import open_proxy  # noqa: PLC0415

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host, port = host_and_port(listen)
    async with AsyncExitStack() as stack:
        try:
            listening_at = await stack.enter_async_context(open_proxy(config, host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise CommandFailed(f"cannot listen on {listen}: {reason}", status=1) from error
        print(f"listening at http://{listening_at}", flush=True)
        await stopped.wait()
    return 0
