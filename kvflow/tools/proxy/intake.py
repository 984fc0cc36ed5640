"""What clients of a proxy may hold while they send: connections, time and bytes. It knows no HTTP.

A client that sends nothing costs the proxy one connection. When there are too many, the one that has waited for longest
without a whole request is closed. When too many bytes are held, a large and slow body on its way is refused. So clients
that keep silent, or are slow, keep nobody else from being served.
"""

import asyncio
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, cast

from msgspec import Struct

FILES_SPARE: Final = 64
"""File descriptors of the process that serve no client: the listener, the event loop, the log, health checks."""


class ProxyConfig(Struct, frozen=True, kw_only=True):
    """The servers, and the limits of clients.

    Attributes:
        prefill: base URLs of prefill servers, at least one; they take turns.
        decode: base URLs of decode servers, at least one; they take turns.
        prefill_timeout_s: seconds before the proxy asks the next prefill server.
        requests_max: most requests at servers at once; further requests get 503. A server accepts as many by default.
        connections_max: most client connections. Four times ``requests_max`` leaves room for clients that are idle or
            still send. The limit on open files may lower both.
        headers_timeout_s: timeout from the connection, or from the previous answer, to the end of a request's headers.
            They fit in one or two packets, so this is mostly the timeout of an idle connection.
        body_timeout_s: timeout for a body, plus the time for its bytes at ``body_rate_min``.
        body_rate_min: slowest rate of a body, in bytes per second. The slowest mobile links reach 16 KiB.
        body_bytes_max: most bytes of a request, or of an answer that is not streamed. A million token ids are 8 MiB; a
            picture may be larger.
        held_bytes_max: most bytes of all requests and answers together, from their first byte to the end of the answer.
            The default is 256 KiB, or 32,000 token ids, for each of 1,024 requests.
        write_timeout_s: timeout for a client to read 64 KiB of an answer, beyond what the kernels buffer.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_timeout_s: float = 300.0
    requests_max: int = 1024
    connections_max: int = 4096
    headers_timeout_s: float = 20.0
    body_timeout_s: float = 20.0
    body_rate_min: int = 16 << 10
    body_bytes_max: int = 64 << 20
    held_bytes_max: int = 256 << 20
    write_timeout_s: float = 30.0


def within_files(config: ProxyConfig, files: int) -> tuple[int, int]:
    """Return how many requests and connections are served with a limit on open files.

    A request takes two, one to its client and one to its server. Half of the connections are always left to clients
    that wait, so that one of them can be closed for a newcomer.
    """
    usable = max(files - FILES_SPARE, 3) if files >= 0 else 1 << 30  # a negative limit is none
    requests = min(config.requests_max, max(config.connections_max // 2, 1), usable // 3)
    return requests, min(config.connections_max, usable - requests)


class RequestRefused(Exception):
    """A request is not taken; the message says why.

    Args:
        status: of HTTP.
        message: for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class Holding:
    """The bytes that are held for one request.

    Attributes:
        begun: at what time of the loop.
        nbytes: so far.
        deadline: of the body that is on its way; None when nothing is.
        refused: its bytes were needed for others.
    """

    begun: float
    nbytes: int = 0
    deadline: asyncio.Timeout | None = None
    refused: bool = False


class Bodies:
    """Bytes of requests and answers. When they are too many, a body on its way is refused: many bytes, for a long time.

    Thread: the loop's.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._holdings: set[Holding] = set()
        self._held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Holding]:
        """Hold bytes while the context is open."""
        holding = Holding(asyncio.get_running_loop().time())
        self._holdings.add(holding)
        try:
            yield holding
        finally:
            self._holdings.discard(holding)
            self._held_bytes -= holding.nbytes

    def add(self, holding: Holding, nbytes: int) -> None:
        """Hold more bytes.

        Raises:
            RequestRefused: they are too many, for this request or together with the others.
        """
        holding.nbytes += nbytes
        self._held_bytes += nbytes
        now = asyncio.get_running_loop().time()
        while self._held_bytes > self._config.held_bytes_max:
            on_the_way = [other for other in self._holdings if other.deadline is not None]
            # One that is as large and comes fast has held them for milliseconds: it is served.
            first = max(on_the_way, key=lambda other: other.nbytes * (now - other.begun), default=holding)
            self._refuse(first)
            if first is holding:
                raise RequestRefused(503, self._no_room())

    async def receive(self, chunks: AsyncIterable[bytes], holding: Holding) -> bytes:
        """Read a whole body.

        Raises:
            RequestRefused: it is too long, comes too slowly, or there is no room for it.
        """
        config = self._config
        body = bytearray()
        try:
            async with asyncio.timeout(config.body_timeout_s) as holding.deadline:
                async for chunk in chunks:
                    if holding.refused:
                        raise RequestRefused(503, self._no_room())
                    if len(body) + len(chunk) > config.body_bytes_max:
                        raise RequestRefused(413, f"the body has more than {config.body_bytes_max} bytes")
                    body += chunk
                    self.add(holding, len(chunk))
                    patience_s = config.body_timeout_s + len(body) / config.body_rate_min
                    holding.deadline.reschedule(holding.begun + patience_s)
        except TimeoutError as error:
            if holding.refused:
                raise RequestRefused(503, self._no_room()) from error
            elapsed_s = asyncio.get_running_loop().time() - holding.begun
            raise RequestRefused(408, f"{len(body)} bytes of the body came in {elapsed_s:.0f} s") from error
        finally:
            holding.deadline = None
        return bytes(body)

    def _refuse(self, holding: Holding) -> None:
        """Count a body as gone, and have its reader end in the next iteration of the loop."""
        self._held_bytes -= holding.nbytes
        holding.nbytes = 0
        holding.refused = True
        if holding.deadline is not None:
            holding.deadline.reschedule(asyncio.get_running_loop().time())
            holding.deadline = None

    def _no_room(self) -> str:
        return f"requests of {self._config.held_bytes_max} bytes are held: try again"


class Connections:
    """Connections of clients. One is closed when its headers take too long, or to make room for a newcomer.

    Thread: the loop's.

    Args:
        count_max: how many may be open.
        headers_timeout_s: for the headers of each request.
    """

    def __init__(self, count_max: int, headers_timeout_s: float) -> None:
        self._count_max = count_max
        self._headers_timeout_s = headers_timeout_s
        self._open: set[asyncio.Transport] = set()
        # Without a whole request, in the order in which they began to wait; with a deadline while headers are missing.
        self._waiting: dict[asyncio.Transport, asyncio.TimerHandle | None] = {}

    def watched(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """Return a protocol that does what another one does, and whose connection is one of these."""
        return _Watched(protocol, self)

    def begin(self, transport: asyncio.Transport) -> None:
        """Wait for the headers of a request, on a new connection or after an answer."""
        if transport.is_closing():
            return
        self._open.add(transport)
        self._stop_waiting(transport)
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self._headers_timeout_s, transport.abort)
        if len(self._open) > self._count_max:
            oldest = next(iter(self._waiting))
            self.end(oldest)
            oldest.abort()

    def on_headers(self, transport: asyncio.Transport) -> None:
        """Wait for the rest of a request, however long; a newcomer may still need the connection's place."""
        if deadline := self._waiting.get(transport):
            deadline.cancel()
            self._waiting[transport] = None

    def on_request(self, transport: asyncio.Transport) -> None:
        """Keep a connection whose request is there as a whole."""
        self._stop_waiting(transport)

    def end(self, transport: asyncio.Transport) -> None:
        """Take a connection off the list."""
        self._open.discard(transport)
        self._stop_waiting(transport)

    def _stop_waiting(self, transport: asyncio.Transport) -> None:
        if deadline := self._waiting.pop(transport, None):
            deadline.cancel()


class _Watched(asyncio.Protocol):
    """Passes everything on to a protocol, and tells ``Connections`` when its connection begins and ends."""

    def __init__(self, protocol: asyncio.Protocol, connections: Connections) -> None:
        self._connections = connections
        self._protocol = protocol
        self._transport: asyncio.Transport | None = (
            None  # asyncio says it in connection_made, and not in connection_lost
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._protocol.connection_made(transport)
        self._connections.begin(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.end(self._transport)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
