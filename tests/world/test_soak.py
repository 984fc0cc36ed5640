"""Every kind of disturbance once, and a look at everybody after each: the short form of ``make soak``."""

import asyncio

import pytest

from .measuring import PLANES, thread_pool
from .report import missed, unbounded
from .soak import AT_ONCE, DISTURBANCES, offer_and_release, run

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.processes,
    pytest.mark.timeout(600),  # seconds, unless others are busy
    pytest.mark.usefixtures("few_words"),
]

OF_ROUND = 75
THREADS = 8


@pytest.mark.parametrize("transport", PLANES)
async def test_pulls_that_are_disturbed_in_every_way_leave_nothing_behind(transport):
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))
    soak = await run(OF_ROUND * len(DISTURBANCES), of_round=OF_ROUND, transport=transport)
    assert missed(soak) == []
    assert set(soak.restarts) == set(DISTURBANCES)
    assert soak.undisturbed > 0
    assert soak.tally.points
    assert soak.tally.followed["completed"]


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
async def test_offers_end_released_and_memory_is_looked_at(read):
    memory = await offer_and_release(2 * AT_ONCE, read=read)
    assert list(memory) == [AT_ONCE, 2 * AT_ONCE]
    assert unbounded(memory) == []


def test_memory_that_does_not_level_off_is_missed():
    full = {50_000: 60, 100_000: 100}
    assert unbounded(full | {10_000_000: 104}) == []
    assert unbounded(full | {10_000_000: 106}) == ["memory grew by 6.0% between 100,000 and 10,000,000 offers"]
    assert unbounded({1000: 50, 2000: 60}) == []
