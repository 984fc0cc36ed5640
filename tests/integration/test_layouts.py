"""Any layout into any other, between two processes: every byte of what was asked for, and no other byte."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from .conftest import ELSEWHERE
from .shapes import Shape

PER_LAYER_SPLIT = {"layout": "LBNHC", "kv": "split"}
PER_LAYER_HND = {"layout": "LBHNC", "kv": "content"}
PACKED_CONTENT = {"layout": "BLHNC", "kv": "content"}
PACKED_NHD = {"layout": "BLNHC", "kv": "split"}
HEADS_FIRST = {"layout": "BHLNC", "kv": "content"}
FAMILIES = {
    "LBNHC split": PER_LAYER_SPLIT,
    "LBHNC content": PER_LAYER_HND,
    "BLHNC content": PACKED_CONTENT,
    "BLNHC split": PACKED_NHD,
    "BHLNC content": HEADS_FIRST,
}

# Sources and targets in orders of their own.
SOURCES = [[5, 2, 9], [11, 0, 17]]
TARGETS = [[1, 7, 3], [20, 30, 12]]


@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize("world", [pytest.param("nixl", marks=ELSEWHERE)], indirect=True)
async def test_every_family_fills_every_other(world, source):
    async with world.producing(Shape(**FAMILIES[source])) as producer, AsyncExitStack() as stack:
        for target, family in FAMILIES.items():
            consumer = await stack.enter_async_context(world.consuming(Shape(**family, num_blocks=40)))
            params = await producer.offer(target, SOURCES, 11)
            report = await consumer.pull(params, TARGETS)
            assert report.transport == "cma"
            assert report.nbytes == 3 * consumer.cache.bytes_per_block * 2
            consumer.has(target, TARGETS, 11)
            consumer.untouched(but=TARGETS)
            assert await producer.outcome(target) == "released"


@pytest.mark.both_loops
async def test_requests_in_flight_together_keep_their_bytes_apart(world):
    big = Shape(num_blocks=512)
    async with world.producing(big) as producer, world.consuming(Shape(**PER_LAYER_SPLIT, num_blocks=512)) as consumer:
        lists = {f"r{n}": [list(range(n * 16, n * 16 + 8)), list(range(n * 16 + 8, n * 16 + 16))] for n in range(32)}
        params = [await producer.offer(request, blocks, 32) for request, blocks in lists.items()]
        # Everyone's target is the source blocks of the request after the next.
        targets = list(lists.values())[2:] + list(lists.values())[:2]
        await asyncio.gather(*(consumer.pull(one, blocks) for one, blocks in zip(params, targets, strict=True)))
        for request, blocks in zip(lists, targets, strict=True):
            consumer.has(request, blocks, 32)
        assert [await producer.outcome(request) for request in lists] == ["released"] * 32


async def test_groups_in_another_order_are_matched_by_layer(world):
    async with world.producing(Shape(window_first=True)) as producer, world.consuming() as consumer:
        params = await producer.offer("r", [[11, 0, 17], [5, 2, 9]], 12)
        assert [group.kind for group in consumer.cache.groups] == ["full", "sliding"]
        await consumer.pull(params, TARGETS)
        consumer.has("r", TARGETS, 12)
