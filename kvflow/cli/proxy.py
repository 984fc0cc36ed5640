"""``kvflow proxy``: one server for clients, disaggregated prefill behind it."""

import argparse
import asyncio
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from kvflow.cli.arguments import address
from kvflow.demo.intake import ProxyConfig
from kvflow.observability.logs import configure_logging

if TYPE_CHECKING:
    # What argparse calls the object is private; this is its only use.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

LISTEN = "127.0.0.1:8000"

FILES_MAX = 1 << 16
"""Open files that the proxy asks for: more than its settings need by default, and what many systems allow."""

SETTINGS = {
    "prefill_timeout_s": "after which the next prefill server is asked",
    "requests_max": "requests that are with a server at once; more are answered 503",
    "connections_max": "connections of clients; above, the oldest without a whole request is closed",
    "headers_timeout_s": "for the headers of a request, and for an idle connection",
    "body_timeout_s": "for a body, in addition to its bytes at --body-rate-min",
    "body_rate_min": "bytes a second that a body must come with",
    "body_bytes_max": "bytes of a request, and of an answer that is not streamed",
    "held_bytes_max": "bytes of all requests and answers together; above, a large and slow body is refused",
    "write_timeout_s": "for a client to take 64 KiB of an answer",
}
"""Numbers of ``ProxyConfig``, each a flag of that name."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``proxy`` to the command line."""
    parser = commands.add_parser("proxy", help="send completions to a prefill server, then to a decode server")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=server,
            action="append",
            required=True,
            metavar="URL",
            help=f"a {role} server, http://HOST:PORT; several are taken in turn",
        )
    parser.add_argument(
        "--listen", type=listening, default=LISTEN, metavar="HOST:PORT", help="for clients (default: %(default)s)"
    )
    fields = {field.name: field for field in msgspec.structs.fields(ProxyConfig)}
    for name, meaning in SETTINGS.items():
        seconds = fields[name].type is float
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_above_0(float if seconds else int),
            default=fields[name].default,
            metavar="SECONDS" if seconds else "N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument("--log", type=Path, help="file for the log, JSON lines; standard error by default")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop; 0 then, 1 if there is no listening there, 2 without aiohttp."""
    if find_spec("aiohttp") is None:
        print("the proxy speaks HTTP with aiohttp: pip install 'kvflow[proxy]'", file=sys.stderr)
        return 2
    # Loaded here, so that other commands and --help do not wait for it.
    import uvloop  # noqa: PLC0415

    configure_logging(options.log)
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
    from kvflow.demo.proxy import open_proxy  # noqa: PLC0415

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host, _, port = listen.rpartition(":")
    async with AsyncExitStack() as stack:
        try:
            listening_at = await stack.enter_async_context(open_proxy(config, host, int(port)))
        except OSError as error:
            print(f"there is no listening at {listen}: {error}", file=sys.stderr)
            return 1
        print(f"listening at http://{listening_at}", flush=True)
        await stopped.wait()
    return 0


def server(text: str) -> str:
    """Check the base URL of a server and return it, without a slash at its end.

    Raises:
        ArgumentTypeError: it is something else.
    """
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT")
    return text.rstrip("/")


def listening(text: str) -> str:
    """Check ``host:port`` and return it; port 0 takes a free one.

    Raises:
        ArgumentTypeError: it is something else.
    """
    return text if text.rpartition(":")[0] and text.endswith(":0") else address(text)


def _above_0(kind: type[float] | type[int]) -> Callable[[str], float]:
    """Return what reads a number above 0."""

    def read(text: str) -> float:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return number

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read
