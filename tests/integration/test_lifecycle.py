"""Opening and closing workers, again and again: no thread, no file descriptor and no task is left behind."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest

import kvflow
from kvflow import errors
from tests.helpers.limits import open_files

from .consuming import consuming, until, works
from .producing import configured, producing
from .shapes import Shape

TIMES = 20


def descriptors():
    gc.collect()
    return open_files()


def foreign_threads():
    """Threads that Python does not know of: those of UCX, NIXL and ZeroMQ."""
    return sum(1 for _ in Path("/proc/self/task").iterdir()) - threading.active_count()


@pytest.mark.both_loops
async def test_open_and_close_twenty_times():
    await leaves_nothing("loopback")


@pytest.mark.nixl
async def test_open_and_close_twenty_times_over_nixl():
    await leaves_nothing("nixl")


async def leaves_nothing(transport):
    async def once():
        async with producing(Shape(), transport=transport) as producer, consuming(transport=transport) as consumer:
            await works(producer, consumer)

    for _ in range(2):  # what libraries load and keep for ever, and the executor's threads
        await once()
    tasks, open_before, threads_before = asyncio.all_tasks(), descriptors(), foreign_threads()
    for _ in range(TIMES):
        await once()
    assert asyncio.all_tasks() == tasks
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvflow")]
    # A foreign library's threads may take a moment to end after they were told to.
    await until(lambda: foreign_threads() <= threads_before)
    await until(lambda: descriptors() <= open_before)


async def test_twenty_peers_come_and_go(near_world):
    async with near_world.consuming() as consumer:
        known = len(asyncio.all_tasks())
        for number in range(TIMES):
            async with near_world.producing(engine_id=f"prefill-{number}") as producer:
                await works(producer, consumer)
            await until(lambda: len(asyncio.all_tasks()) == known)
            consumer.at_rest()


async def test_a_worker_that_cannot_open_leaves_nothing(near_world):
    cache = Shape().build()
    async with near_world.producing() as occupant:
        known = asyncio.all_tasks()
        taken = configured("decode-0", transport="loopback", bind=occupant.endpoint)
        with pytest.raises(errors.ConfigInvalid) as caught:
            async with kvflow.open_worker(taken, cache):
                pytest.fail("two listeners at one address")
        assert caught.value.remedy
        assert asyncio.all_tasks() == known
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("kvflow")]) == 1
        async with near_world.consuming() as consumer:
            await works(occupant, consumer)
