"""The engine to compare with: one process computes prompts and continues them; nothing is moved."""

from kvflow.tools.demo.channel import serve
from kvflow.tools.demo.engine import Engine, take_table
from kvflow.tools.demo.messages import Drain, Drained, Failed, Generate, Generated, Reply, Request


async def serve_monolithic(engine: Engine, listen: str) -> None:
    """Serve ``Generate`` requests until the process is told to stop."""
    await serve(listen, MonolithicEngine(engine).answer)


class MonolithicEngine:
    """Runs the same model over the same kind of cache as the other two, and needs no worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: Request) -> Reply:
        """Serve one request."""
        match request:
            case Generate():
                return await self._generate(request)
            case Drain():
                return Drained(blocks_used=self._engine.pool.num_used)
            case _:
                return Failed(code="unsupported", detail=f"this engine does not serve {type(request).__name__}")

    async def _generate(self, request: Generate) -> Generated:
        engine, num_tokens = self._engine, len(request.prompt)
        table = await take_table(engine.pool, engine.cache.groups, num_tokens + request.max_tokens)
        try:
            token = await engine.prefill(table, request.prompt)
            return Generated(tokens=await engine.decode(table, num_tokens, token, request.max_tokens))
        finally:
            await engine.pool.give_back(table.held())
