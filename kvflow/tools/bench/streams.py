"""Plain TCP streams from the source's memory into ours: what sockets and the kernel alone can do between the two."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_ASKED = struct.Struct("<QQ")
"""First byte and number of bytes that a connection asks for."""


class StreamSource:
    """Sends bytes of a cache over each connection that asks for some. It believes every process that connects.

    Attributes:
        endpoint: where it listens, ``host:port``.
    """

    def __init__(self, host: str, memory: memoryview) -> None:
        self._memory = memory
        self._listener = socket.create_server((host, 0))
        self._connections: list[socket.socket] = []
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close every connection, and return when nothing reads the cache any longer."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._threads[0].join()
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while len(asked := connection.recv(_ASKED.size, socket.MSG_WAITALL)) == _ASKED.size:
                first, nbytes = _ASKED.unpack(asked)
                connection.sendall(self._memory[first : first + nbytes])


class Streams:
    """Read a source's memory over plain connections: each has a share, and a thread on both sides.

    Args:
        endpoint: of the source.
        connections: how many.
        memory: ours, which the bytes go into.
    """

    def __init__(self, endpoint: str, connections: int, memory: memoryview) -> None:
        host, _, port = endpoint.rpartition(":")
        self._memory = memory
        self._connections = [socket.create_connection((host, int(port))) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def read(self, nbytes: int) -> float:
        """Read the first ``nbytes``; return seconds."""
        started = time.perf_counter()
        share = -(-nbytes // len(self._connections))
        firsts = range(0, nbytes, share)
        shares = [(first, min(share, nbytes - first)) for first in firsts]
        list(self._threads.map(self._read, self._connections, shares))
        return time.perf_counter() - started

    def close(self) -> None:
        """Close them all."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _read(self, connection: socket.socket, share: tuple[int, int]) -> None:
        first, nbytes = share
        connection.sendall(_ASKED.pack(first, nbytes))
        left = self._memory[first : first + nbytes]
        while left:
            count = connection.recv_into(left)
            if not count:
                raise ConnectionError("the source has closed a plain stream")
            left = left[count:]
