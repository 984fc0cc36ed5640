"""The source process: ``python -m kvflow.tools.bench.source``. It opens workers and offers blocks on command.

Commands arrive on standard input, or with ``--listen HOST:PORT`` from one client after another. The source trusts its
clients: listen on a private network only.
"""

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing

import msgspec
import uvloop
from msgspec import Struct

from kvflow.config import Tuning, WorkerConfig
from kvflow.memory.cache import KVCache
from kvflow.reads.nixl.binding import Agent, load_binding
from kvflow.tools.bench.ceilings import enter_device, pid_namespace
from kvflow.tools.bench.messages import (
    LINE_BYTES_MAX,
    CloseCaches,
    Closed,
    OfferBlocks,
    Offered,
    OpenCache,
    Opened,
    Request,
)
from kvflow.tools.bench.streams import StreamSource
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

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
                return Closed()

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


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m kvflow.tools.bench.source", description=__doc__)
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve clients that connect, instead of standard input")
    listen = parser.parse_args().listen
    uvloop.run(serve_network(listen) if listen else serve_pipe())


if __name__ == "__main__":
    main()
