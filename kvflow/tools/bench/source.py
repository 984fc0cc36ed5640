"""The source process, ``python -m kvflow.tools.bench.source``, and its handle: it offers blocks on command.

Commands arrive on standard input, or with ``--listen HOST:PORT`` from one client after another. The source trusts its
clients: listen on a private network only.
"""

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import uvloop
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvflow.config import SECRET_VARIABLE, Tuning, WorkerConfig
from kvflow.errors import PeerLost
from kvflow.leases.tickets import Ticket
from kvflow.memory.cache import KVCache
from kvflow.reads.nixl.binding import Agent, load_binding
from kvflow.tools.bench.ceilings import Opened, StreamSource, enter_device, pid_namespace
from kvflow.tools.doctor.probe import Geometry
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

LINE_BYTES_MAX = 256 << 20
"""A thousand tickets of a thousand blocks each, as JSON."""


Name = Annotated[str, Meta(min_length=1, max_length=256)]
BlockId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
BlockIds = Annotated[list[BlockId], Meta(max_length=1 << 20)]


class OpenCache(Struct, frozen=True, tag="open"):
    """Open one more worker with a cache."""

    name: Name
    geometry: Geometry


class OfferBlocks(Struct, frozen=True, tag="offer"):
    """Offer the same blocks of one worker several times."""

    name: Name
    block_ids: Annotated[list[BlockIds], Meta(max_length=256)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    count: Annotated[int, Meta(ge=1, le=1 << 14)]


class CloseCaches(Struct, frozen=True, tag="close"):
    """Close all workers."""


class Offered(Struct, frozen=True):
    """Tickets, as a router would carry them."""

    params: list[dict[str, Any]]


class CachesClosed(Struct, frozen=True):
    """All workers are closed."""


Request = OpenCache | OfferBlocks | CloseCaches


LEASE_S = 600.0
"""Longer than any benchmark: a lease that runs out would measure something else."""

LEASE_SLOTS = 1 << 14


class WorkerSet:
    """Workers of this process, by name.

    Args:
        host: that peers reach them at.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()
        self._workers: dict[str, Worker] = {}
        self._caches: dict[str, KVCache] = {}

    async def answer(self, request: Request) -> Struct:
        """Do what is asked."""
        match request:
            case OpenCache(name=name, geometry=geometry):
                cache = geometry.build()
                config = WorkerConfig(
                    engine_id=f"source-{name}",
                    bind=f"tcp://{self._host}:0",
                    lease_s=LEASE_S,
                    tuning=Tuning(lease_slots=LEASE_SLOTS),
                )
                self._workers[name] = await self._stack.enter_async_context(open_worker(config, cache))
                self._caches[name] = cache
                return self._opened(name, cache)
            case OfferBlocks(name=name, block_ids=block_ids, num_tokens=num_tokens, count=count):
                worker = self._workers[name]
                tickets = (worker.offer(secrets.token_hex(8), block_ids, num_tokens) for _ in range(count))
                return Offered([ticket.to_params() for ticket in tickets])
            case CloseCaches():
                await self.aclose()
                return CachesClosed()

    async def aclose(self) -> None:
        """Close all workers."""
        await self._stack.aclose()
        self._workers.clear()
        self._caches.clear()

    def _opened(self, name: str, cache: KVCache) -> Opened:
        manifest = cache.manifest()
        agent_name = f"bare-{name}-{secrets.token_hex(8)}"
        enter_device(manifest.regions)
        agent = Agent(load_binding(), agent_name, progress=True)
        agent.register(manifest.regions)
        self._stack.callback(agent.destroy)
        endpoint = ""
        if cache.backing.device.type == "cpu":
            streams = StreamSource(self._host, cache.backing.numpy().data.cast("B"))
            self._stack.callback(streams.close)
            endpoint = streams.endpoint
        encoded = msgspec.msgpack.encode(manifest)
        return Opened(os.getpid(), pid_namespace(), encoded, agent_name, agent.metadata(), endpoint)


async def serve(source: WorkerSet, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], object]) -> None:
    """Answer requests until there are no more, then close all workers."""
    decoder, encoder = msgspec.json.Decoder(Request), msgspec.json.Encoder()
    async with aclosing(source):
        while line := await read():
            reply = await source.answer(decoder.decode(line))
            write(encoder.encode(reply) + b"\n")


async def serve_pipe() -> None:
    """Serve the parent process."""

    def write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    await serve(WorkerSet("127.0.0.1"), lambda: asyncio.to_thread(sys.stdin.buffer.readline), write)


async def serve_network(listen: str) -> None:
    """Serve one client after the other until the process ends."""
    one_client = asyncio.Lock()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Where we were reached, our workers are reached as well; what we listen on may be a wildcard.
        host = writer.get_extra_info("sockname")[0]
        try:
            async with one_client:
                await serve(WorkerSet(host), reader.readline, writer.write)
        finally:
            writer.close()

    host, port = listen.rsplit(":", 1)
    async with await asyncio.start_server(on_connection, host, int(port), limit=LINE_BYTES_MAX) as server:
        await server.serve_forever()


class Devices(Struct, frozen=True, kw_only=True):
    """The devices that the caches of a benchmark lie on, by torch's names.

    Attributes:
        here: of the process that reads.
        there: of the source process.
    """

    here: str = "cpu"
    there: str = "cpu"

    @property
    def in_host_memory(self) -> bool:
        """Whether both caches lie in host memory, so that sockets and the kernel may copy them."""
        return self.here == self.there == "cpu"

    @property
    def alike(self) -> bool:
        """Whether both caches lie in host memory, or both on a device: only then reads are staged."""
        return (self.here == "cpu") == (self.there == "cpu")


HOST = Devices()


R = TypeVar("R", Opened, Offered, CachesClosed)


class SourceProcess:
    """Ask a source process for caches and tickets.

    Attributes:
        devices: that the caches of a benchmark lie on.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, devices: Devices = HOST) -> None:
        self._reader = reader
        self._writer = writer
        self.devices = devices

    async def open(self, name: str, geometry: Geometry) -> Opened:
        """Open a worker there."""
        return await self._ask(OpenCache(name, replace(geometry, device=self.devices.there)), Opened)

    async def offer(self, name: str, block_ids: list[list[int]], *, num_tokens: int, count: int = 1) -> list[Ticket]:
        """Have the same blocks offered ``count`` times."""
        reply = await self._ask(OfferBlocks(name, block_ids, num_tokens, count), Offered)
        return [Ticket.from_params(params) for params in reply.params]

    async def close_caches(self) -> None:
        """Close all workers there and free their memory."""
        await self._ask(CloseCaches(), CachesClosed)

    async def _ask(self, request: Struct, reply: type[R]) -> R:
        try:
            self._writer.write(msgspec.json.encode(request) + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except ConnectionError:  # it ended before it had read the request
            line = b""
        if not line.endswith(b"\n"):
            name = type(request).__name__
            remedy = "Read what the source process itself has printed."
            raise PeerLost(f"the source process ended before it had answered {name}", peer="source", remedy=remedy)
        return msgspec.json.decode(line, type=reply)


@asynccontextmanager
async def open_source(address: str | None = None, devices: Devices = HOST) -> AsyncIterator[SourceProcess]:
    """Start a source process that shares our cluster secret; end it on leaving.

    Args:
        address: ``host:port`` of one that runs already, with our cluster secret. It is not ended.
        devices: that the caches lie on.

    Raises:
        OSError: nothing listens there.
        PeerLost: it ended before it had answered.
    """
    if address is not None:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES_MAX)
        try:
            yield SourceProcess(reader, writer, devices)
        finally:
            writer.close()
        return
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvflow.tools.bench.source",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield SourceProcess(process.stdout, process.stdin, devices)
    finally:
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m kvflow.tools.bench.source", description=__doc__)
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve clients that connect, instead of standard input")
    listen = parser.parse_args().listen
    uvloop.run(serve_network(listen) if listen else serve_pipe())


if __name__ == "__main__":
    main()
