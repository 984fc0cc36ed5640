"""The decode engine: pulls the cache of a prompt and continues it."""

import kvflow
from kvflow.observability.logs import record_logger
from kvflow.tools.demo.channel import serve
from kvflow.tools.demo.engine import Engine, take_table, visible_blocks
from kvflow.tools.demo.messages import Decode, Drain, Drained, Failed, Generated, Reply, Request

_log = record_logger("kvflow.demo")


async def serve_decode(engine: Engine, config: kvflow.WorkerConfig, listen: str) -> None:
    """Serve ``Decode`` requests until the process is told to stop."""
    async with kvflow.open_worker(config, engine.cache) as worker:
        await serve(listen, DecodeEngine(engine, worker).answer)


class DecodeEngine:
    """Fills its own blocks from a ticket; nothing of the prompt is computed here."""

    def __init__(self, engine: Engine, worker: kvflow.Worker) -> None:
        self._engine = engine
        self._worker = worker

    async def answer(self, request: Request) -> Reply:
        """Serve one request.

        Raises:
            KvflowError: the cache could not be pulled.
        """
        match request:
            case Decode():
                return await self._decode(request)
            case Drain():
                quarantined = sum(entry.num_blocks for entry in self._worker.snapshot().quarantined)
                return Drained(blocks_used=self._engine.pool.num_used, blocks_quarantined=quarantined)
            case _:
                return Failed(code="unsupported", detail=f"a decode engine does not serve {type(request).__name__}")

    async def _decode(self, request: Decode) -> Generated:
        engine, num_prompt_tokens = self._engine, request.num_prompt_tokens
        groups = engine.cache.groups
        ticket = kvflow.Ticket.from_params(request.kv_transfer_params)
        table = await take_table(
            engine.pool, groups, num_prompt_tokens + request.max_tokens, num_computed=num_prompt_tokens
        )
        try:
            report = await self._worker.pull(ticket, block_ids=visible_blocks(table, groups, num_prompt_tokens))
            first = await engine.decode(table, num_prompt_tokens, request.token, min(2, request.max_tokens))
            _log.info("token.first", request_id=ticket.request_id)
            computed, remaining = num_prompt_tokens + len(first) - 1, request.max_tokens - len(first) + 1
            tokens = first[:-1] + await engine.decode(table, computed, first[-1], remaining)
        finally:
            # After a failed pull something may still write into the blocks; after a completed one this is immediate.
            await self._worker.quiesced(ticket.request_id)
            await engine.pool.give_back(table.held())
        return Generated(tokens=tokens, report=report)
