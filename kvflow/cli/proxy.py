"""``kvflow proxy``: one server for clients, disaggregated prefill behind it."""

import argparse
import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvflow.cli.arguments import address
from kvflow.observability.logs import configure_logging

if TYPE_CHECKING:
    from kvflow.demo.proxy import ProxyConfig

    # What argparse calls the object is private; this is its only use.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

LISTEN = "127.0.0.1:8000"
PREFILL_TIMEOUT_S = 300.0


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
    parser.add_argument(
        "--prefill-timeout-s",
        type=_seconds,
        default=PREFILL_TIMEOUT_S,
        metavar="SECONDS",
        help="after which the next prefill server is asked (default: %(default)s)",
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

    from kvflow.demo.proxy import ProxyConfig  # noqa: PLC0415

    configure_logging(options.log)
    config = ProxyConfig(
        prefill=tuple(options.prefill),
        decode=tuple(options.decode),
        prefill_timeout_s=options.prefill_timeout_s,
    )
    return uvloop.run(_serve(config, options.listen))


async def _serve(config: "ProxyConfig", listen: str) -> int:
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
