"""The measuring side's handle of a source process, started here or reached over the network."""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvflow.config import SECRET_VARIABLE
from kvflow.errors import PeerLost
from kvflow.leases.tickets import Ticket
from kvflow.tools.bench.geometry import HOST, Devices, Geometry
from kvflow.tools.bench.messages import LINE_BYTES_MAX, CloseCaches, Closed, OfferBlocks, Offered, OpenCache, Opened

R = TypeVar("R", Opened, Offered, Closed)


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
        await self._ask(CloseCaches(), Closed)

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
