"""The demo engine's block manager: nothing is lost, nothing is given twice, windows are cut where the model looks."""

import asyncio

import pytest

from kvflow.layout.groups import Group
from kvflow.tools.demo.engine import ABSENT, BlockPool, BlockTable, drop_hidden_blocks, take_table, visible_blocks

FULL = Group(("a",), "full", 16)
SLIDING = Group(("b",), "sliding", 16, window=32)
GROUPS = (FULL, SLIDING)


async def test_blocks_come_in_an_order_of_the_seed():
    first, again, other = [await BlockPool(64, seed).take(64) for seed in (1, 1, 2)]
    assert first == again != other
    assert sorted(first) == sorted(other) == list(range(64))


async def test_taking_waits_for_blocks():
    pool = BlockPool(4, seed=0)
    held = await pool.take(3)
    waiting = asyncio.ensure_future(pool.take(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await pool.give_back(held[:1])
    assert not set(await waiting) & set(held[1:])
    assert pool.num_used == 4


async def test_more_than_the_pool_has_is_refused():
    with pytest.raises(ValueError, match="5 blocks are wanted, and the pool has 4"):
        await BlockPool(4, seed=0).take(5)


async def test_a_cancelled_wait_takes_nothing():
    pool = BlockPool(4, seed=0)
    held = await pool.take(3)
    waiting = asyncio.ensure_future(pool.take(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await pool.give_back(held)
    assert pool.num_used == 0


async def test_a_prompt_has_blocks_for_all_tokens_until_the_window_has_passed():
    pool = BlockPool(32, seed=0)
    table = await take_table(pool, GROUPS, 100)
    assert [len(row) for row in table.rows] == [7, 7]
    assert pool.num_used == len(set(table.held())) == 14
    offered = visible_blocks(table, GROUPS, 100)
    await drop_hidden_blocks(pool, table, GROUPS, 100)
    # The next token, 100, sees tokens [69, 100]: blocks 4, 5 and 6.
    assert offered == [table.rows[0], table.rows[1][4:]]
    assert table.rows[1][:4] == [ABSENT] * 4
    assert sorted(table.held()) == sorted(offered[0] + offered[1])
    assert pool.num_used == 10


async def test_a_continued_request_has_no_blocks_behind_its_window():
    pool = BlockPool(32, seed=0)
    table = await take_table(pool, GROUPS, 100 + 32, num_computed=100)
    assert [len(row) for row in table.rows] == [9, 9]
    assert table.rows[1][:4] == [ABSENT] * 4
    assert ABSENT not in table.rows[0] + table.rows[1][4:]
    assert pool.num_used == 9 + 5
    assert visible_blocks(table, GROUPS, 100) == [table.rows[0][:7], table.rows[1][4:7]]
    await pool.give_back(table.held())
    assert pool.num_used == 0


def test_both_sides_hand_over_equally_many_blocks():
    for num_tokens in range(1, 200):
        rows = [list(range(20)), list(range(20, 40))]
        full, sliding = visible_blocks(BlockTable(rows), GROUPS, num_tokens)
        assert full == rows[0][: -(-num_tokens // 16)]
        first = max(0, num_tokens - 31) // 16
        assert sliding == rows[1][first : -(-num_tokens // 16)]
