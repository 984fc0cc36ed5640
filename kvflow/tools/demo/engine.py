"""The demo's engine: a model, its cache, a block manager, one thread that computes, and an HTTP server."""

import asyncio
import os
import random
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, cast

import msgspec
import torch
from aiohttp import web
from msgspec import Struct

import kvflow
from kvflow.addresses import host_and_port
from kvflow.errors import KvflowError
from kvflow.ids import ABSENT
from kvflow.layout.groups import Group, window_blocks
from kvflow.memory.cache import allocate
from kvflow.observability.logs import record_logger
from kvflow.tools.demo.messages import (
    COMPLETIONS,
    DRAIN,
    HEALTH,
    REQUEST_ID,
    Drained,
    GeneratedTokens,
    OfferedPrompt,
    PromptAnswer,
    PromptRequest,
)
from kvflow.tools.demo.model import ModelShape, PagedKV, TinyModel
from kvflow.tools.proxy.completions import error_body

NUM_BLOCKS = 1024  # 64 MiB when packed: three of the longest requests at once, and dozens of the short ones
DRAIN_S = 10.0  # releases come within milliseconds; an offer that is still open after this time was forgotten
GRACE_S = 2.0  # for requests in flight when the engine stops
BODY_BYTES_MAX = 1 << 20
REQUEST_ID_CHARACTERS_MAX = 256

KVFormat = Literal["content", "split"]

_log = record_logger("kvflow.demo")


class BlockPool:
    """A free list in an order that ``seed`` decides, so that block ids differ between two engines."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._freed = asyncio.Condition()

    @property
    def num_used(self) -> int:
        """Blocks that someone holds."""
        return self.num_blocks - len(self._free)

    async def take(self, count: int) -> list[int]:
        """Take blocks once there are enough; ``ValueError`` if there can never be. Cancellation: safe."""
        if count > self.num_blocks:
            raise ValueError(f"{count} blocks are wanted, and the pool has {self.num_blocks}")
        async with self._freed:
            await self._freed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    async def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks and wake the tasks that wait for them."""
        async with self._freed:
            self._free.extend(block_ids)
            self._freed.notify_all()


@dataclass(slots=True)
class BlockTable:
    """One list for each group: entry i is the block of tokens [i * block_size, (i + 1) * block_size).

    It is ABSENT if no token will look there.
    """

    rows: list[list[int]]

    def held(self) -> list[int]:
        """Return every block that the table names."""
        return [block for row in self.rows for block in row if block != ABSENT]


async def take_table(pool: BlockPool, groups: Sequence[Group], num_tokens: int, *, num_computed: int = 0) -> BlockTable:
    """Take the blocks for a request of ``num_tokens``, generated ones included.

    Blocks that lie behind a window once ``num_computed`` tokens are computed elsewhere are left out.
    """
    absent = [_first_visible(group, num_computed) for group in groups]
    total = [_num_blocks(group, num_tokens) for group in groups]
    blocks = iter(await pool.take(sum(total) - sum(absent)))
    rows = [
        [ABSENT] * skipped + [next(blocks) for _ in range(count - skipped)]
        for skipped, count in zip(absent, total, strict=True)
    ]
    return BlockTable(rows)


def visible_blocks(table: BlockTable, groups: Sequence[Group], num_tokens: int) -> list[list[int]]:
    """Return, group by group, the blocks of the first ``num_tokens`` tokens that the next token reads."""
    return [
        row[_first_visible(group, num_tokens) : _num_blocks(group, num_tokens)]
        for row, group in zip(table.rows, groups, strict=True)
    ]


async def drop_hidden_blocks(pool: BlockPool, table: BlockTable, groups: Sequence[Group], num_tokens: int) -> None:
    """Give back the blocks that lie behind the windows once ``num_tokens`` are computed."""
    hidden: list[int] = []
    for row, group in zip(table.rows, groups, strict=True):
        first = _first_visible(group, num_tokens)
        hidden += [block for block in row[:first] if block != ABSENT]
        row[:first] = [ABSENT] * first
    await pool.give_back(hidden)


def _num_blocks(group: Group, num_tokens: int) -> int:
    return -(-num_tokens // group.block_size)


def _first_visible(group: Group, num_tokens: int) -> int:
    return _num_blocks(group, num_tokens) - window_blocks(group, num_tokens)


class Engine:
    """Computes tokens in blocks that its caller manages. Thread: the event loop's, which does not wait for the model.

    Args:
        layout: of the cache, as ``kvflow.allocate`` takes it.
        kv: where keys and values lie, as ``kvflow.allocate`` takes it.
        seed: of the order in which blocks are handed out.
        executor: the one thread that computes. Its queue serves requests in turn, a token at a time.
        num_blocks: of the cache.
    """

    def __init__(
        self, *, layout: str, kv: KVFormat, seed: int, executor: ThreadPoolExecutor, num_blocks: int = NUM_BLOCKS
    ) -> None:
        shape = ModelShape()
        self.cache = allocate(shape.specs(), num_blocks=num_blocks, layout=layout, kv=kv)
        self.pool = BlockPool(num_blocks, seed)
        self._executor = executor
        self._model = TinyModel(shape)
        views = cast("dict[str, torch.Tensor]", self.cache.views)  # attention only
        self._pages = {name: PagedKV(view, shape.head_size) for name, view in views.items()}

    async def prefill(self, table: BlockTable, prompt: bytes) -> int:
        """Fill the cache with a prompt and return the first token."""
        return await self._compute(table, list(prompt), 0)

    async def decode(self, table: BlockTable, num_computed: int, token: int, max_tokens: int) -> list[int]:
        """Return ``max_tokens`` tokens: ``token``, which is not in the cache yet, and those after it."""
        tokens = [token]
        while len(tokens) < max_tokens:
            tokens.append(await self._compute(table, tokens[-1:], num_computed + len(tokens) - 1))
        return tokens

    async def _compute(self, table: BlockTable, tokens: list[int], first_token: int) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._forward, table, tokens, first_token)

    def _forward(self, table: BlockTable, tokens: list[int], first_token: int) -> int:
        block_tables = {
            layer: row
            for row, group in zip(map(torch.tensor, table.rows), self.cache.groups, strict=True)
            for layer in group.layers
        }
        return self._model.forward(tokens, first_token, self._pages, block_tables)


@asynccontextmanager
async def open_engine(*, layout: str, kv: KVFormat, seed: int) -> AsyncIterator[Engine]:
    """Enter with an engine on one core: a sum that is split over cores may differ in its last bit."""
    with ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield Engine(layout=layout, kv=kv, seed=seed, executor=executor)


class CompletionService:
    """Answers requests of every role, as their ``kv_transfer_params`` say. Without a worker, it computes alone."""

    def __init__(self, engine: Engine, worker: kvflow.Worker | None = None) -> None:
        self._engine = engine
        self._worker = worker
        self._offers: dict[str, asyncio.Task[None]] = {}

    async def complete(self, request_id: str, request: PromptRequest) -> PromptAnswer:
        """Serve one request; ``msgspec.ValidationError`` if this engine cannot do what it asks for."""
        if request.kv_transfer_params is None:
            return await self._compute(request_id, request)
        if self._worker is None:
            raise msgspec.ValidationError("this engine has no worker: leave kv_transfer_params out")
        offered = msgspec.convert(request.kv_transfer_params, OfferedPrompt)
        if offered.do_remote_decode:
            return await self._prefill(request_id, bytes(request.prompt), self._worker)
        if offered.first_token is None:
            raise msgspec.ValidationError("kv_transfer_params has no first_token")
        return await self._decode(request_id, request, offered.first_token, self._worker)

    async def drain(self) -> Drained:
        """Wait until no offer is open, and return what is still held."""
        if self._offers:
            await asyncio.wait(self._offers.values(), timeout=DRAIN_S)
        used = self._engine.pool.num_used
        if self._worker is None:
            return Drained(blocks_used=used)
        held = self._worker.snapshot()
        quarantined = sum(entry.num_blocks for entry in held.quarantined)
        return Drained(blocks_used=used, leases_held=held.leases, blocks_quarantined=quarantined)

    async def revoke_offers(self) -> None:
        """End every lease, and wait until its blocks are back."""
        for request_id in self._offers:
            cast("kvflow.Worker", self._worker).revoke(request_id)
        await asyncio.gather(*self._offers.values())

    async def _compute(self, request_id: str, request: PromptRequest) -> PromptAnswer:
        engine, num_tokens = self._engine, len(request.prompt)
        table = await take_table(engine.pool, engine.cache.groups, num_tokens + request.max_tokens)
        try:
            token = await engine.prefill(table, bytes(request.prompt))
            tokens = await engine.decode(table, num_tokens, token, request.max_tokens)
        finally:
            await engine.pool.give_back(table.held())
        return PromptAnswer(id=request_id, choices=_choices(tokens))

    async def _prefill(self, request_id: str, prompt: bytes, worker: kvflow.Worker) -> PromptAnswer:
        """Compute a prompt; its blocks are kept until its lease has ended."""
        engine, num_tokens, groups = self._engine, len(prompt), self._engine.cache.groups
        table = await take_table(engine.pool, groups, num_tokens)
        try:
            token = await engine.prefill(table, prompt)
            await drop_hidden_blocks(engine.pool, table, groups, num_tokens)
            block_ids = visible_blocks(table, groups, num_tokens)
            ticket = worker.offer(request_id, block_ids=block_ids, num_tokens=num_tokens)
        except BaseException:
            await engine.pool.give_back(table.held())
            raise
        self._offers[request_id] = asyncio.create_task(self._keep(request_id, table, worker))
        params = {"do_remote_prefill": True, "do_remote_decode": False, "first_token": token, **ticket.to_params()}
        return PromptAnswer(id=request_id, choices=_choices([token]), kv_transfer_params=params)

    async def _keep(self, request_id: str, table: BlockTable, worker: kvflow.Worker) -> None:
        await worker.wait_offer(request_id)
        await self._engine.pool.give_back(table.held())
        del self._offers[request_id]

    async def _decode(self, request_id: str, request: PromptRequest, token: int, worker: kvflow.Worker) -> PromptAnswer:
        """Fill blocks from a ticket and continue; nothing of the prompt is computed here."""
        engine, num_tokens, groups = self._engine, len(request.prompt), self._engine.cache.groups
        ticket = kvflow.Ticket.from_params(request.kv_transfer_params)
        table = await take_table(engine.pool, groups, num_tokens + request.max_tokens, num_computed=num_tokens)
        try:
            report = await worker.pull(ticket, block_ids=visible_blocks(table, groups, num_tokens))
            first = await engine.decode(table, num_tokens, token, min(2, request.max_tokens))
            _log.info("token.first", request_id=ticket.request_id)
            computed, remaining = num_tokens + len(first) - 1, request.max_tokens - len(first) + 1
            tokens = first[:-1] + await engine.decode(table, computed, first[-1], remaining)
        finally:
            # After a failed pull something may still write into the blocks; after a completed one this is immediate.
            await worker.quiesced(ticket.request_id)
            await engine.pool.give_back(table.held())
        return PromptAnswer(id=request_id, choices=_choices(tokens), report=report)


def _choices(tokens: list[int]) -> tuple[GeneratedTokens]:
    return (GeneratedTokens(token_ids=tokens, text=bytes(tokens).decode("latin-1")),)


async def serve(service: CompletionService, listen: str) -> None:
    """Answer requests until SIGTERM or SIGINT, then revoke leases; the first line of output has the address."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)

    async def complete(request: web.Request) -> web.Response:
        request_id = request.headers.get(REQUEST_ID) or secrets.token_hex(8)
        return await answer_completion(service, request_id, await request.read())

    async def drain(_request: web.Request) -> web.Response:
        return _json(200, await service.drain())

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.add_routes([web.post(COMPLETIONS, complete), web.post(DRAIN, drain), web.get(HEALTH, health)])
    # A client that hangs up cancels no request: the model may still write into the blocks of that request.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=False, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, *host_and_port(listen)).start()
        host, port = runner.addresses[0][:2]
        _announce(f"{host}:{port}")
        _log.info("engine.started", listen=f"{host}:{port}")
        await stopped.wait()
    finally:
        await runner.cleanup()
        await service.revoke_offers()
    _log.info("engine.stopped")


def _announce(address: str) -> None:
    """Print the address of this engine. The parent may stop reading then: later output goes to stderr."""
    sys.stdout.write(f"listening at {address}\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


async def answer_completion(service: CompletionService, request_id: str, body: bytes) -> web.Response:
    """Answer a request. ``KvflowError`` is 4xx, which a router shows to the client from a prefill engine too."""
    started = monotonic()
    log = _log.bind(request_id=request_id)
    try:
        if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
            raise msgspec.ValidationError(f"{REQUEST_ID} has more than {REQUEST_ID_CHARACTERS_MAX} characters")
        request = msgspec.json.decode(body, type=PromptRequest)
        answer = await service.complete(request_id, request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _failed(400, str(error))
    except KvflowError as error:
        log.warning("completion.failed", code=error.code, detail=str(error))
        return _failed(409, str(error))
    except Exception as error:  # one request must not end an engine; the traceback is in its log
        log.exception("completion.crashed")
        return _failed(500, repr(error))
    log.info("completion.served", elapsed_s=round(monotonic() - started, 6))
    return _json(200, answer)


def _json(status: int, content: Struct) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")


def _failed(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.Response(status=status, body=error_body(message, kind), content_type="application/json")
