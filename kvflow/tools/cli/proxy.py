"""``kvflow proxy``: one server for clients, disaggregated prefill behind it."""

import argparse
import asyncio
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvflow.observability.logs import configure_logging
from kvflow.tools.cli.arguments import above_0, add_command, address, server
from kvflow.tools.proxy import ProxyConfig

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

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


def add_parser(commands: "Subparsers") -> None:
    """Add ``proxy`` to the command line."""
    parser = add_command(
        commands,
        "proxy",
        summary="send completions to a prefill server, then to a decode server",
        description="Serve the completions API of OpenAI. Send each request to a prefill server first, and then, with "
        "the transfer parameters of its answer, to a decode server. Servers of one kind take turns.",
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
        "--listen",
        type=listening,
        default=LISTEN,
        metavar="HOST:PORT",
        help="address for clients (default: %(default)s)",
    )
    fields = {field.name: field for field in msgspec.structs.fields(ProxyConfig)}
    for name, meaning in SETTINGS.items():
        seconds = fields[name].type is float
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=above_0(float if seconds else int),
            default=fields[name].default,
            metavar="SECONDS" if seconds else "N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument("--log", type=Path, help="file for the log, as JSON lines; standard error if not given")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop; 0 then, 1 if the address is taken, 2 without aiohttp or a log that can be written."""
    if find_spec("aiohttp") is None:
        print("kvflow proxy: aiohttp is not installed. Install it with pip install 'kvflow[proxy]'", file=sys.stderr)
        return 2
    # Loaded here, so that other commands and --help do not wait for it.
    import uvloop  # noqa: PLC0415

    try:
        configure_logging(options.log)
    except OSError as error:
        print(f"kvflow proxy: --log {options.log} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    config = ProxyConfig(
        prefill=tuple(options.prefill),
        decode=tuple(options.decode),
        **{name: getattr(options, name) for name in SETTINGS},
    )
    _raise_file_limit()
    return uvloop.run(_serve(config, options.listen))


def _raise_file_limit() -> None:
    """Allow this process as many open files as it may allow itself; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: ProxyConfig, listen: str) -> int:
    from kvflow.tools.proxy.server import open_proxy  # noqa: PLC0415

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host, _, port = listen.rpartition(":")
    async with AsyncExitStack() as stack:
        try:
            listening_at = await stack.enter_async_context(open_proxy(config, host, int(port)))
        except OSError as error:
            print(
                f"kvflow proxy: cannot listen on {listen}: {os.strerror(error.errno) if error.errno else error}",
                file=sys.stderr,
            )
            return 1
        print(f"listening at http://{listening_at}", flush=True)
        await stopped.wait()
    return 0


def listening(text: str) -> str:
    """Check ``host:port`` and return it; port 0 takes a free one.

    Raises:
        ArgumentTypeError: it is something else.
    """
    return address(text, port_min=0)
