"""A wire between a consumer and a producer's control endpoint that can be delayed, stalled, cut and worse."""

import asyncio
import random
import socket
import struct
from contextlib import asynccontextmanager, suppress

PIECE = 65536
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: closing then sends a reset, and drops what was not sent."""


class Wire:
    """One connection through the proxy, as two directions that are pumped.

    Args:
        proxy: that it belongs to.
        consumer: reader and writer of the side that has dialed.
        producer: reader and writer of the other.
    """

    def __init__(self, proxy, consumer, producer):
        self._proxy = proxy
        self._ends = (consumer, producer)

    async def run(self):
        """Carry bytes until both directions have ended, or one is broken."""
        (upward, to_consumer), (downward, to_producer) = self._ends
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(upward, to_producer))
                pumps.create_task(self._pump(downward, to_consumer))
        except* OSError:
            self.reset()
        finally:
            for _, writer in self._ends:
                writer.close()

    def reset(self):
        """Break it, as a host that reboots does."""
        for _, writer in self._ends:
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    def half_close(self, end):
        """Say to one end, 0 the consumer and 1 the producer, that nothing more will come; go on listening to it."""
        with suppress(OSError, RuntimeError):
            self._ends[end][1].write_eof()

    async def _pump(self, reader, writer):
        while piece := await reader.read(PIECE):
            for part in await self._proxy.treat(piece):
                with suppress(RuntimeError):  # half closed: what comes now is lost
                    writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        with suppress(OSError, RuntimeError):
            writer.write_eof()


class Proxy:
    """Listens for a producer, and passes on what it hears as it is told.

    Attributes:
        endpoint: what the producer advertises.
        delay_s: that every piece waits, with as much again by chance.
        garble: share of pieces of which one bit is turned.
        trickle: whether bytes go one by one, up to a hundred of each piece.
    """

    def __init__(self, backend, seed):
        self.endpoint = ""
        self.calm()
        self._backend = backend
        self._rng = random.Random(seed)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._wires = {}
        self._server = None

    def calm(self):
        """Pass everything on at once and unchanged."""
        self.delay_s, self.garble, self.trickle = 0.0, 0.0, False

    async def treat(self, piece):
        """Return the parts in which a piece is passed on, when it may be."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s * (1 + self._rng.random()))
        await self._flowing.wait()
        if self._rng.random() < self.garble:
            piece = bytearray(piece)
            piece[self._rng.randrange(len(piece))] ^= 1 << self._rng.randrange(8)
        if self.trickle:
            return [piece[at : at + 1] for at in range(min(100, len(piece)))] + [piece[100:]]
        return [piece]

    def connections(self):
        """Return how many connections go through it."""
        return len(self._wires)

    def stall(self):
        """Hold everything back."""
        self._flowing.clear()

    def flow(self):
        """Let it go."""
        self._flowing.set()

    def cut(self):
        """Break every connection; what was under way is lost."""
        for wire in self._wires:
            wire.reset()

    def half_close(self, end):
        """Half close every connection towards one end: 0 the consumer, 1 the producer."""
        for wire in self._wires:
            wire.half_close(end)

    def refuse(self):
        """Listen no more."""
        self._server.close()

    async def listen(self):
        """Listen, at the same address as before."""
        port = int(self.endpoint.rpartition(":")[2]) if self.endpoint else 0
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader, writer):
        try:
            producer = await asyncio.open_connection("127.0.0.1", self._backend)
        except OSError:
            writer.close()
            return
        wire = Wire(self, (reader, writer), producer)
        self._wires[wire] = asyncio.current_task()
        try:
            with suppress(asyncio.CancelledError):  # by ``aclose``; a cancelled task of a stream would be logged
                await wire.run()
        finally:
            del self._wires[wire]

    async def aclose(self):
        """End it with all its connections."""
        self.refuse()
        tasks = list(self._wires.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxy(backend, seed=0):
    """Open a proxy before a port of this host."""
    opened = Proxy(backend, seed)
    await opened.listen()
    try:
        yield opened
    finally:
        await opened.aclose()
