"""The demo's engine: a model, its cache, a block manager, and one thread that computes."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch

from kvflow.layout.groups import Group, window_blocks
from kvflow.memory.cache import allocate
from kvflow.tools.demo.model import Model, ModelShape, PagedKV

NUM_BLOCKS = 1024
"""64 MiB when packed: three of the longest requests at once, and dozens of the short ones."""

KVFormat = Literal["content", "split"]


ABSENT = -1
"""In a block table: no block, because no token will look there."""


class BlockPool:
    """A free list in random order, so that no block id is the same on two sides by accident.

    Args:
        num_blocks: ids are [0, num_blocks).
        seed: of the order.
    """

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
        """Take blocks, waiting until there are enough.

        Raises:
            ValueError: more than the pool will ever have.

        Cancellation: safe; nothing is taken.
        """
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
    """Where the cache of one request is, group by group.

    Attributes:
        rows: one list per group; entry i is the block of tokens [i * block_size, (i + 1) * block_size), or ABSENT.
    """

    rows: list[list[int]]

    def held(self) -> list[int]:
        """Return every block that the table names."""
        return [block for row in self.rows for block in row if block != ABSENT]


async def take_table(pool: BlockPool, groups: Sequence[Group], num_tokens: int, *, num_computed: int = 0) -> BlockTable:
    """Take the blocks for a request of ``num_tokens``.

    Args:
        pool: where from.
        groups: of the cache.
        num_tokens: of the whole request, what will be generated included.
        num_computed: tokens that are computed elsewhere: blocks that lie behind a window by then are left out.
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
