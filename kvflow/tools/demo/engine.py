"""The demo's engine: a model, its cache, and one thread that computes."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, cast

import torch

from kvflow.memory.cache import allocate
from kvflow.tools.demo.blocks import BlockPool, BlockTable
from kvflow.tools.demo.model import Model, ModelShape
from kvflow.tools.demo.paged import PagedKV

NUM_BLOCKS = 1024
"""64 MiB when packed: three of the longest requests at once, and dozens of the short ones."""

KVFormat = Literal["content", "split"]


class Engine:
    """Computes tokens for requests whose blocks someone else manages.

    Args:
        layout: of the cache, as ``kvflow.allocate`` takes it.
        kv: ``content`` or ``split``, as ``kvflow.allocate`` takes it.
        seed: of the order in which blocks are handed out.
        executor: the one thread that computes; its queue serves requests in turn, a token at a time.
        num_blocks: of the cache.

    Thread: the event loop's; it stays free while the model computes.
    """

    def __init__(
        self, *, layout: str, kv: KVFormat, seed: int, executor: ThreadPoolExecutor, num_blocks: int = NUM_BLOCKS
    ) -> None:
        shape = ModelShape()
        self.cache = allocate(shape.specs(), num_blocks=num_blocks, layout=layout, kv=kv)
        self.pool = BlockPool(num_blocks, seed)
        self._executor = executor
        self._model = Model(shape)
        views = cast("dict[str, torch.Tensor]", self.cache.views)  # attention only
        self._pages = {name: PagedKV(view, shape.head_size) for name, view in views.items()}

    async def prefill(self, table: BlockTable, prompt: bytes) -> int:
        """Compute a prompt and return the first token; its keys and values are in the cache then."""
        return await self._compute(table, list(prompt), 0)

    async def decode(self, table: BlockTable, num_computed: int, token: int, max_tokens: int) -> list[int]:
        """Continue a request one token after the other, and return what was generated.

        Args:
            table: blocks of the request, with room for what is generated.
            num_computed: tokens whose keys and values the cache has.
            token: the next one, computed but not yet in the cache.
            max_tokens: to be generated, ``token`` included.
        """
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
    """Start the thread that computes, and enter with an engine.

    It computes on one core: the demo runs two engines on small machines, and a sum that is split over cores may
    differ in its last bit.
    """
    with ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield Engine(layout=layout, kv=kv, seed=seed, executor=executor)
