"""What a worker serves over HTTP: its metrics, its health, and what it holds.

One thread accepts connections, collects their requests, and answers what needs no work; four threads make the large
pages. A client that sends nothing, sends slowly or takes nothing holds a connection, some kilobytes and some seconds,
and delays no answer about health.
"""

import asyncio
import logging
import selectors
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import Any, Final, NamedTuple

from kvflow.config import is_loopback
from kvflow.errors import ConfigInvalid
from kvflow.events import Hook
from kvflow.observability.logs import to_json
from kvflow.observability.metrics import Metrics, exposition, require_client
from kvflow.version import __version__

_log = logging.getLogger("kvflow.http")

THREADS: Final = 4
HEAD_BYTES_MAX: Final = 8 << 10  # of a request line and headers, as most servers take them
REQUEST_S: Final = 5.0  # from the connection to the end of its request, which fits in one packet
ANSWER_S: Final = 5.0  # in which the event loop must make a page, and in which a client must take it
# Connections that have not sent their request: above it, the oldest is closed. As many may wait for a thread.
CONNECTIONS_MAX: Final = 128
ACCEPTS: Final = 32  # connections that are accepted before those that ask are answered
BEAT_S: Final = 1.0
ALIVE_S: Final = 5.0  # the event loop is alive if it has run within this time
ACCEPT_PAUSE_S: Final = 0.05  # if no connection can be accepted, because the process has no file descriptor left

TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"

# Status of the standard library's handler -> status and message that are answered.
_MALFORMED = (400, "this is not a request of HTTP/1.1")
REFUSALS: Final = {400: _MALFORMED, 505: _MALFORMED, 501: (405, "only GET and HEAD are answered")}


class Page(NamedTuple):
    """What one path answers."""

    body: bytes
    content_type: str = TEXT
    status: int = 200


Pages = Mapping[str, Callable[[], Page]]


class _Handler(BaseHTTPRequestHandler):
    """Reads one request and makes its answer; ``PageServer`` receives and sends them."""

    protocol_version = "HTTP/1.1"
    command = ""

    def __init__(self, request: bytes, pages: Pages, *, local_only: bool) -> None:
        self.rfile = BytesIO(request)
        self.wfile: BytesIO = BytesIO()
        self._pages = pages
        self._local_only = local_only
        self.asked = ""  # path of the page to make; empty if the request is refused
        if len(request) > HEAD_BYTES_MAX:
            self.send_error(431, f"the headers have more than {HEAD_BYTES_MAX} bytes")
            return
        self.handle_one_request()
        if not (self.asked or self.wfile.getvalue()):
            self.send_error(400)

    def do_GET(self) -> None:
        hosts = self.headers.get_all("host", []) if self._local_only else []
        path = self.path.partition("?")[0]
        if not self.request_version.startswith("HTTP/1.") or not path.startswith("/"):
            self.send_error(400)
        elif not all(is_loopback(_without_port(host.strip())) for host in hosts):
            self.send_error(403, "this server listens on a loopback address; ask for it by that address")
        elif path not in self._pages:
            self.send_error(404, f"there is no {path[:100]!r}; there are {', '.join(sorted(self._pages))}")
        else:
            self.asked = path

    do_HEAD = do_GET  # noqa: N815 - named by the standard library

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        status, message = REFUSALS.get(code, (code, message))
        self._write(Page(f"{message}\n".encode("ascii", "backslashreplace"), status=status))

    def answer(self) -> bytes:
        """Make the page that was asked for, if any, and return the whole answer."""
        try:
            if self.asked:
                self._write(self._pages[self.asked]())
        except TimeoutError:
            self.send_error(503, "the event loop of the worker does not answer")
        except Exception:  # noqa: BLE001 - a defect of a page must not stop the server
            _log.exception("a page failed")
            self.send_error(500, "kvflow could not make this page; its log says why")
        return self.wfile.getvalue()

    def _write(self, page: Page) -> None:
        self.request_version = self.protocol_version  # a request of HTTP/0.9 would get no status
        self.send_response_only(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


class PageServer:
    """Serves pages over a listening socket until it is closed: one request for each connection.

    Args:
        listening: the socket.
        pages: path -> what makes its page.
        slow: paths of pages that one of the ``THREADS`` makes. The others must not wait for anything.
        local_only: refuse requests that name another host than a loopback address: those of web pages whose name
            resolves to this machine.
    """

    def __init__(self, listening: socket.socket, pages: Pages, *, slow: frozenset[str], local_only: bool) -> None:
        self._listening = listening
        self._slow = slow
        self._read = partial(_Handler, pages=pages, local_only=local_only)
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}  # what was received, and its deadline
        self._answered: set[socket.socket] = set()  # a thread makes their pages, or will
        self._makers = ThreadPoolExecutor(THREADS, "kvflow-pages")
        self._closing, self._closer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (listening, self._closing):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._receiver = threading.Thread(target=self._run, name="kvflow-http", daemon=True)
        self._receiver.start()

    def close(self) -> None:
        """End every connection and thread, after at most ``ANSWER_S`` if a page waits for the event loop."""
        self._closer.close()
        self._receiver.join()
        for connection in list(self._answered):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._makers.shutdown(cancel_futures=True)
        for connection in self._answered:
            connection.close()

    def _run(self) -> None:
        with self._selector, self._listening, self._closing:
            while self._turn():
                pass
            for connection in list(self._silent):
                self._take(connection).close()

    def _turn(self) -> bool:
        """Handle what has happened; return False when the server closes."""
        deadline = next((deadline for _, deadline in self._silent.values()), None)
        for key, _ in self._selector.select(deadline and max(0.0, deadline - time.monotonic())):
            if key.fileobj is self._closing:
                return False
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj in self._silent:
                self._receive(key.fileobj)
        now = time.monotonic()
        for connection in [each for each, (_, deadline) in self._silent.items() if deadline <= now]:
            self._take(connection).close()
        return True

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(ACCEPT_PAUSE_S)
                return
            connection.setblocking(False)
            self._silent[connection] = bytearray(), time.monotonic() + REQUEST_S
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._silent) > CONNECTIONS_MAX:
                self._take(next(iter(self._silent))).close()

    def _receive(self, connection: socket.socket) -> None:
        request, _ = self._silent[connection]
        try:
            received = connection.recv(2 * HEAD_BYTES_MAX)
        except OSError:  # the client has gone
            received = b""
        request += received
        head, end, _ = request.partition(b"\r\n\r\n")
        if not received:
            self._take(connection).close()
        elif end or len(request) > HEAD_BYTES_MAX:
            self._take(connection)
            try:
                self._answer(connection, self._read(bytes(head + end)))
            except Exception:  # noqa: BLE001 - a defect must not end the thread
                _log.exception("a request failed")
                connection.close()

    def _take(self, connection: socket.socket) -> socket.socket:
        """Return a connection that is no longer silent, or must end."""
        del self._silent[connection]
        self._selector.unregister(connection)
        return connection

    def _answer(self, connection: socket.socket, request: _Handler) -> None:
        if request.asked not in self._slow:
            self._give(connection, request, timeout_s=0.0)
        elif len(self._answered) < CONNECTIONS_MAX:
            self._answered.add(connection)
            self._makers.submit(self._give, connection, request, timeout_s=ANSWER_S)
        else:
            connection.close()

    def _give(self, connection: socket.socket, request: _Handler, *, timeout_s: float) -> None:
        with connection, suppress(OSError):  # the client has gone, or takes nothing
            connection.settimeout(timeout_s)
            connection.sendall(request.answer())
        self._answered.discard(connection)


@asynccontextmanager
async def open_pages(address: str, pages: Pages, *, slow: frozenset[str] = frozenset()) -> AsyncGenerator[str, None]:
    """Serve pages while the context is open.

    Args:
        address: ``HOST:PORT`` to listen on; port 0 takes a free one.
        pages: path -> what makes its page.
        slow: paths of pages that one of the ``THREADS`` makes.

    Yields:
        ``HOST:PORT``, with the port that was taken.

    Raises:
        ConfigInvalid: it cannot listen there.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    try:
        # One family, because port 0 would be another port in each.
        bound = {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host.strip("[]"))  # noqa: S104
        (family, _, _, _, place), *_ = await loop.getaddrinfo(bound, int(port), type=socket.SOCK_STREAM)
        listening = socket.create_server(place, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        raise ConfigInvalid(
            f"http is {address!r}, and the worker cannot listen there: {error.strerror or error}",
            remedy="Give an address of this machine and a free port, or port 0.",
        ) from error
    taken = f"{host}:{listening.getsockname()[1]}"
    server = PageServer(listening, pages, slow=slow, local_only=is_loopback(host))
    try:
        yield taken
    finally:
        try:
            closed = loop.run_in_executor(None, server.close)  # meanwhile the loop answers the threads
        except RuntimeError:  # the interpreter is ending and starts no thread
            server.close()
        else:
            await asyncio.shield(closed)


class WorkerPages:
    """The pages of one worker, fed by hooks; raise as ``require_client``.

    Thread: the worker's event loop; the hooks from any thread.
    """

    def __init__(self, engine_id: str, rank: int) -> None:
        require_client()
        self._metrics = Metrics(engine_id=engine_id, rank=str(rank), version=__version__)

    def hooks(self) -> list[Hook]:
        """Return the hooks that feed the pages."""
        return self._metrics.hooks()

    @asynccontextmanager
    async def served(
        self, address: str, *, snapshot: Callable[[], Any], is_ready: Callable[[], bool]
    ) -> AsyncGenerator[str, None]:
        """Serve the pages, and yield and raise as ``open_pages``.

        Args:
            address: ``HOST:PORT`` to listen on.
            snapshot: ``Worker.snapshot``.
            is_ready: returns whether the worker takes new offers and pulls; called on another thread.
        """
        loop = asyncio.get_running_loop()
        pulse = _Pulse(loop)

        async def snapped() -> Any:
            return snapshot()

        def taken() -> Any:
            waiting = asyncio.run_coroutine_threadsafe(snapped(), loop)
            try:
                return waiting.result(ANSWER_S)
            finally:
                waiting.cancel()

        def health() -> Page:
            silent_s = time.monotonic() - pulse.at
            if silent_s <= ALIVE_S:
                return Page(b"alive\n")
            return Page(f"the event loop of the worker has not run for {silent_s:.0f} s\n".encode(), status=503)

        self._metrics.snapshot = taken
        pages: Pages = {
            "/metrics": lambda: Page(*exposition(self._metrics)),
            "/debug/kvflow": lambda: Page(to_json(taken()), JSON),
            "/healthz": health,
            "/readyz": lambda: Page(b"ready\n") if is_ready() else Page(b"the worker takes nothing new\n", status=503),
        }
        try:
            async with open_pages(address, pages, slow=frozenset({"/metrics", "/debug/kvflow"})) as found:
                yield found
        finally:
            pulse.end()


class _Pulse:
    """When an event loop last ran, in seconds of the monotonic clock, up to ``BEAT_S`` late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.beat()

    def beat(self) -> None:
        self.at = time.monotonic()
        self._next = self._loop.call_later(BEAT_S, self.beat)

    def end(self) -> None:
        self._next.cancel()
