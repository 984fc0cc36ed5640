"""Every kind of disturbance once, and a look at everybody after each: the short form of ``make soak``."""

import asyncio

import pytest

from .processes import thread_pool
from .report import missed
from .soak import DISTURBANCES, run

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.processes,
    pytest.mark.timeout(600),  # seconds, unless others are busy
    pytest.mark.usefixtures("few_words"),
]

OF_ROUND = 75
THREADS = 8


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_pulls_that_are_disturbed_in_every_way_leave_nothing_behind(transport):
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))
    soak = await run(OF_ROUND * len(DISTURBANCES), of_round=OF_ROUND, transport=transport)
    assert missed(soak) == []
    assert set(soak.restarts) == set(DISTURBANCES)
    assert soak.undisturbed > 0
    assert soak.tally.points
