"""The road between router and engines: a connection per request, one line of JSON each way."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from kvflow.clock import monotonic
from kvflow.errors import KvflowError
from kvflow.observability.logs import record_logger
from kvflow.tools.demo.messages import Failed, Listening, Reply, Request, reply_from_line, request_from_line, to_line

RETRY_S = 0.2
"""Between attempts to reach an engine that is starting."""

LINE_BYTES_MAX = 1 << 20
"""A prompt and a ticket of the demo stay below 32 KiB; asyncio's own limit of 64 KiB is close to that."""

Handler = Callable[[Request], Awaitable[Reply]]

_log = record_logger("kvflow.demo")


class EngineFailed(Exception):
    """An engine answered with a failure, or not at all."""


async def call(address: str, request: Request) -> Reply:
    """Ask an engine and return what it answers.

    Raises:
        EngineFailed: it cannot be reached, hung up, or answered with ``Failed``.
    """
    host, port = address.rsplit(":", 1)
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES_MAX)
        try:
            writer.write(to_line(request))
            line = await reader.readline()
        finally:
            writer.close()
    except OSError as error:
        raise EngineFailed(f"the engine at {address} cannot be reached: {error}") from error
    if not line:
        raise EngineFailed(f"the engine at {address} hung up; its log says why")
    reply = reply_from_line(line)
    if isinstance(reply, Failed):
        raise EngineFailed(f"the engine at {address} failed: {reply.detail}")
    return reply


async def wait_until_reachable(address: str, budget_s: float) -> None:
    """Wait until something listens at an address, whose name may not be known yet either.

    Raises:
        EngineFailed: nothing does within ``budget_s``.
    """
    host, port = address.rsplit(":", 1)
    reason = "no attempt was answered"
    with suppress(TimeoutError):
        async with asyncio.timeout(budget_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError as error:
                    reason = str(error)
                    await asyncio.sleep(RETRY_S)
                else:
                    writer.close()
                    return
    raise EngineFailed(f"the engine at {address} cannot be reached within {budget_s:.0f} s: {reason}")


async def serve(listen: str, handle: Handler) -> None:
    """Answer requests until the process is told to stop (SIGTERM or SIGINT).

    Args:
        listen: ``host:port``; port 0 takes a free one. The real one is printed as one line of JSON.
        handle: called once per request, many at a time.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if line := await reader.readline():
                writer.write(to_line(await _answer(line, handle)))
                await writer.drain()
        except (OSError, ValueError) as error:  # a line that is too long is a ValueError
            _log.info("router.hung_up", error=str(error))
        finally:
            writer.close()

    host, port = listen.rsplit(":", 1)
    server = await asyncio.start_server(on_connection, host, int(port), limit=LINE_BYTES_MAX)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        _announce(f"{host}:{port}")
        _log.info("engine.started", listen=f"{host}:{port}")
        await stopped.wait()
    _log.info("engine.stopped")


def _announce(address: str) -> None:
    """Print the address of this engine. The parent may stop reading then: later output goes to stderr."""
    sys.stdout.buffer.write(to_line(Listening(address=address)))
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


async def _answer(line: bytes, handle: Handler) -> Reply:
    try:
        request = request_from_line(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Failed(code="request_malformed", detail=str(error))
    started = monotonic()
    log = _log.bind(kind=type(request).__name__, request_id=getattr(request, "request_id", ""))
    try:
        reply = await handle(request)
    except KvflowError as error:
        log.warning("request.failed", code=error.code, detail=str(error))
        return Failed(code=error.code, detail=str(error))
    except Exception as error:  # one request must not end an engine; the traceback is in its log
        log.exception("request.crashed")
        return Failed(code="internal", detail=repr(error))
    log.info("request.answered", elapsed_s=round(monotonic() - started, 6))
    return reply
