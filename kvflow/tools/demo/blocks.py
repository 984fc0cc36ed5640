"""Which blocks of the cache are whose: the demo engine's own block manager.

Thread: the event loop's.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.layout.groups import Group, window_blocks

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
