"""A small HTTP server for one worker: bounded, read-only, on the worker's event loop.

It answers GET and HEAD of a fixed set of paths, one request for each connection. A client can hold a connection, some
kilobytes and some seconds, and nothing else.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from kvflow.config import is_loopback
from kvflow.errors import ConfigInvalid

_log = logging.getLogger("kvflow.http")

HEAD_BYTES_MAX: Final = 8 << 10
"""Longest request line and headers, as most servers take them."""

HEAD_S: Final = 5.0
"""Longest time from the connection to the end of the headers, which fit in one packet."""

WRITE_S: Final = 10.0
"""Longest time in which a client must take an answer."""

CONNECTIONS_MAX: Final = 32
"""Connections at once. Above it, the oldest one that has not sent its request is closed."""

REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
TEXT: Final = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What one path answers.

    Attributes:
        body: the content.
        content_type: its type.
        status: of HTTP.
    """

    body: bytes
    content_type: str = TEXT
    status: int = 200


class _Refused(Exception):
    """A request is not served.

    Args:
        status: of HTTP.
        message: for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Page = Callable[[], Answer]


class HttpServer:
    """Serve some pages.

    Args:
        pages: path -> what answers it.
        local_only: whether to refuse requests that name another host than a loopback address: those of web pages whose
            name resolves to this machine.

    Thread: the event loop.
    """

    def __init__(self, pages: Mapping[str, Page], *, local_only: bool) -> None:
        self._pages = pages
        self._local_only = local_only
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.StreamWriter, None] = {}  # have sent no request yet, in the order of their arrival

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection. Cancellation: closes it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._silent[writer] = None
        if len(self._tasks) > CONNECTIONS_MAX:
            (next(iter(self._silent))).transport.abort()
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass  # the client has gone, or takes nothing
        except Exception:  # noqa: BLE001 - a defect of a page must not stop the worker
            _log.exception("a request failed")
        finally:
            self._silent.pop(writer, None)
            self._tasks.discard(task)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            writer.close()

    async def close(self) -> None:
        """End every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What is left in the buffer of a transport lives as long as the client likes: drain waits for all of it.
        writer.transport.set_write_buffer_limits(high=0)
        method = "GET"
        try:
            method, path = await self._receive(reader)
            self._silent.pop(writer, None)
            answer = self._page(path)
        except _Refused as refused:
            answer = Answer(f"{refused}\n".encode("ascii", "backslashreplace"), status=refused.status)
        writer.write(_head(answer) + (answer.body if method == "GET" else b""))
        async with asyncio.timeout(WRITE_S):
            await writer.drain()

    def _page(self, path: str) -> Answer:
        """Return the answer of a path.

        Raises:
            _Refused: there is none.
        """
        if path not in self._pages:
            raise _Refused(404, f"there is no {path[:100]!r}; there are {', '.join(sorted(self._pages))}")
        try:
            return self._pages[path]()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("a page failed")
            return Answer(b"kvflow could not make this page; its log says why\n", status=500)

    async def _receive(self, reader: asyncio.StreamReader) -> tuple[str, str]:
        """Read a request; return its method and its path.

        Raises:
            _Refused: it is malformed or not allowed.
            EOFError: it is incomplete.
            TimeoutError: it takes too long.
        """
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise _Refused(431, f"the headers have more than {HEAD_BYTES_MAX} bytes") from error
        line, *lines = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            raise _Refused(400, "this is no request of HTTP/1.1")
        if words[0] not in {"GET", "HEAD"}:
            raise _Refused(405, "only GET and HEAD are answered")
        if self._local_only:
            named = [
                value.strip() for name, _, value in (each.partition(":") for each in lines) if name.lower() == "host"
            ]
            if any(not is_loopback(_without_port(host)) for host in named):
                raise _Refused(403, "this server listens on a loopback address; ask for it by that address")
        return words[0], words[1].partition("?")[0]


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Content-Security-Policy: default-src 'none'; frame-ancestors 'none'",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def listened(host: str) -> str:
    """Return the host to listen on: an address of one family, because port 0 would be another port in each."""
    return {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host.removeprefix("[").removesuffix("]"))  # noqa: S104


@asynccontextmanager
async def open_http(address: str, pages: Mapping[str, Page]) -> AsyncGenerator[str, None]:
    """Serve pages while the context is open.

    Args:
        address: ``HOST:PORT`` to listen on; port 0 takes a free one.
        pages: see ``HttpServer``.

    Yields:
        ``HOST:PORT``, with the port that was taken.

    Raises:
        ConfigInvalid: there is no listening there.
    """
    host, _, port = address.rpartition(":")
    http = HttpServer(pages, local_only=is_loopback(host))
    try:
        server = await asyncio.start_server(
            http.serve, listened(host), int(port), limit=HEAD_BYTES_MAX, backlog=CONNECTIONS_MAX
        )
    except OSError as error:
        raise ConfigInvalid(
            f"http is {address!r}, and the worker cannot listen there: {error.strerror or error}",
            remedy="Give an address of this machine and a free port, or port 0.",
        ) from error
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await http.close()
