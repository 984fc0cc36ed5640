"""The source process and its handle: it offers blocks on command.

A benchmark starts one, or ``python -m kvflow.tools.bench.source --listen HOST:PORT`` serves one client after another.
The source trusts its clients: listen on a private network only.
"""

import argparse
import asyncio
import multiprocessing
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import uvloop
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvflow.addresses import host_and_port
from kvflow.config import SECRET_VARIABLE, Tuning, WorkerConfig
from kvflow.errors import PeerLost
from kvflow.leases.tickets import RUN_MAX, BlockId, ShortName, Ticket
from kvflow.memory.cache import KVCache
from kvflow.reads.nixl.binding import Agent, load_binding
from kvflow.reads.reach import host_facts
from kvflow.tools.bench.ceilings import Opened, StreamSource, enter_device
from kvflow.tools.doctor.probe import Geometry
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

LINE_BYTES_MAX = 256 << 20
"""A thousand tickets of a thousand blocks each, as JSON."""


class OpenCache(Struct, frozen=True, tag="open"):
    """Open one more worker with a cache."""

    name: ShortName
    geometry: Geometry


class OfferBlocks(Struct, frozen=True, tag="offer"):
    """Offer the same blocks of one worker several times."""

    name: ShortName
    block_ids: Annotated[list[Annotated[list[BlockId], Meta(max_length=RUN_MAX)]], Meta(max_length=256)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    count: Annotated[int, Meta(ge=1, le=1 << 14)]


class CloseCaches(Struct, frozen=True, tag="close"):
    """Close all workers."""


SourceRequest = OpenCache | OfferBlocks | CloseCaches


LEASE_S = 600.0
"""Longer than any benchmark: a lease that runs out would measure something else."""

LEASE_SLOTS = 1 << 14


class WorkerSet:
    """Workers of this process, by name; peers reach them at ``host``."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()
        self._workers: dict[str, Worker] = {}

    async def answer(self, request: SourceRequest) -> Opened | list[dict[str, Any]] | None:
        """Do what is asked; tickets are returned as a router would carry them."""
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
                return self._opened(name, cache)
            case OfferBlocks(name=name, block_ids=block_ids, num_tokens=num_tokens, count=count):
                worker = self._workers[name]
                tickets = (worker.offer(secrets.token_hex(8), block_ids, num_tokens) for _ in range(count))
                return [ticket.to_params() for ticket in tickets]
            case CloseCaches():
                await self.aclose()
                return None

    async def aclose(self) -> None:
        """Close all workers."""
        await self._stack.aclose()
        self._workers.clear()

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
        return Opened(host_facts(), encoded, agent_name, agent.metadata(), endpoint)


async def serve(source: WorkerSet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests until there are no more, then close all workers."""
    decoder, encoder = msgspec.json.Decoder(SourceRequest), msgspec.json.Encoder()
    async with aclosing(source):
        while line := await reader.readline():
            reply = await source.answer(decoder.decode(line))
            writer.write(encoder.encode(reply) + b"\n")


async def _serve_socket(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES_MAX)
    await serve(WorkerSet("127.0.0.1"), reader, writer)
    writer.close()


def _serve_parent(connection: socket.socket) -> None:
    uvloop.run(_serve_socket(connection))


async def serve_network(listen: str) -> None:
    """Serve one client after the other until the process ends."""
    one_client = asyncio.Lock()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Where we were reached, our workers are reached as well; what we listen on may be a wildcard.
        host = writer.get_extra_info("sockname")[0]
        try:
            async with one_client:
                await serve(WorkerSet(host), reader, writer)
        finally:
            writer.close()

    host, port = host_and_port(listen)
    async with await asyncio.start_server(on_connection, host, port, limit=LINE_BYTES_MAX) as server:
        await server.serve_forever()


class Devices(Struct, frozen=True, kw_only=True):
    """The devices that the caches of a benchmark lie on, by torch's names: of the reader, and of the source."""

    here: str = "cpu"
    there: str = "cpu"

    @property
    def in_host_memory(self) -> bool:
        """Whether both caches lie in host memory, so that sockets and the kernel may copy them."""
        return self.here == self.there == "cpu"


HOST = Devices()


T = TypeVar("T")


class SourceProcess:
    """Ask a source process for caches and tickets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, devices: Devices = HOST) -> None:
        self._reader = reader
        self._writer = writer
        self.devices = devices

    async def open(self, name: str, geometry: Geometry) -> Opened:
        """Open a worker there."""
        return await self._ask(OpenCache(name, replace(geometry, device=self.devices.there)), Opened)

    async def offer(self, name: str, block_ids: list[list[int]], *, num_tokens: int, count: int = 1) -> list[Ticket]:
        """Have the same blocks offered ``count`` times."""
        offered = await self._ask(OfferBlocks(name, block_ids, num_tokens, count), list[dict[str, Any]])
        return [Ticket.from_params(params) for params in offered]

    async def close_caches(self) -> None:
        """Close all workers there and free their memory."""
        await self._ask(CloseCaches(), None)

    async def _ask(self, request: SourceRequest, reply: type[T] | None) -> T:
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
    """Start a source process that shares our cluster secret, and end it on leaving; or use the one at ``HOST:PORT``.

    Raises:
        OSError: nothing listens there.
        PeerLost: it ended before it had answered.
    """
    process = None
    if address is None:
        os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
        connection, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(target=_serve_parent, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES_MAX)
    else:
        host, port = host_and_port(address)
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
    try:
        yield SourceProcess(reader, writer, devices)
    finally:
        writer.close()
        if process is not None:
            await asyncio.to_thread(process.join)


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m kvflow.tools.bench.source", description=__doc__)
    parser.add_argument("--listen", metavar="HOST:PORT", required=True, help="address for clients")
    uvloop.run(serve_network(parser.parse_args().listen))


if __name__ == "__main__":
    main()
