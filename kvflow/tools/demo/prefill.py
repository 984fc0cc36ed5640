"""The prefill engine: computes prompts and offers their cache."""

import asyncio

import kvflow
from kvflow.tools.demo.channel import serve
from kvflow.tools.demo.engine import BlockTable, Engine, drop_hidden_blocks, take_table, visible_blocks
from kvflow.tools.demo.messages import Drain, Drained, Failed, Prefill, Prefilled, Reply, Request

DRAIN_S = 10.0
"""Releases come within milliseconds; an offer that is still open after this time was forgotten."""


async def serve_prefill(engine: Engine, config: kvflow.WorkerConfig, listen: str) -> None:
    """Serve ``Prefill`` requests until the process is told to stop; leases that are held then are revoked."""
    async with kvflow.open_worker(config, engine.cache) as worker, asyncio.TaskGroup() as tasks:
        prefill = PrefillEngine(engine, worker, tasks)
        await serve(listen, prefill.answer)
        prefill.revoke_offers()


class PrefillEngine:
    """Keeps the blocks of each prompt until its lease has ended."""

    def __init__(self, engine: Engine, worker: kvflow.Worker, tasks: asyncio.TaskGroup) -> None:
        self._engine = engine
        self._worker = worker
        self._tasks = tasks
        self._offers: dict[str, asyncio.Task[None]] = {}

    async def answer(self, request: Request) -> Reply:
        """Serve one request.

        Raises:
            KvflowError: the offer was refused.
        """
        match request:
            case Prefill():
                return await self._prefill(request)
            case Drain():
                return await self._drain()
            case _:
                return Failed(code="unsupported", detail=f"a prefill engine does not serve {type(request).__name__}")

    def revoke_offers(self) -> None:
        """End every lease that is still held."""
        for request_id in self._offers:
            self._worker.revoke(request_id)

    async def _prefill(self, request: Prefill) -> Prefilled:
        engine, num_tokens = self._engine, len(request.prompt)
        groups = engine.cache.groups
        table = await take_table(engine.pool, groups, num_tokens)
        try:
            token = await engine.prefill(table, request.prompt)
            await drop_hidden_blocks(engine.pool, table, groups, num_tokens)
            block_ids = visible_blocks(table, groups, num_tokens)
            ticket = self._worker.offer(request.request_id, block_ids=block_ids, num_tokens=num_tokens)
        except BaseException:
            await engine.pool.give_back(table.held())
            raise
        self._offers[request.request_id] = self._tasks.create_task(self._keep(request.request_id, table))
        return Prefilled(token=token, kv_transfer_params=ticket.to_params())

    async def _keep(self, request_id: str, table: BlockTable) -> None:
        await self._worker.wait_offer(request_id)
        await self._engine.pool.give_back(table.held())
        del self._offers[request_id]

    async def _drain(self) -> Drained:
        if self._offers:
            await asyncio.wait(self._offers.values(), timeout=DRAIN_S)
        return Drained(blocks_used=self._engine.pool.num_used, leases_held=self._worker.snapshot().leases)
