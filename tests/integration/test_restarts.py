"""Either side is killed and started again, under load: whoever survives loses nothing, and soon serves the successor.

``KVFLOW_TEST_KILLS=100`` kills a hundred times, over shared memory and over TCP, where ``make test`` does it once; it
takes some minutes, and prints what it has measured.
"""

import asyncio
import math
import os
import random
import statistics
import time
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest

from kvflow import errors
from tests.ports import free_port

from .conftest import ELSEWHERE, OVER_TCP
from .consuming import consuming
from .elsewhere import Child
from .shapes import Shape

KILLS = int(os.environ.get("KVFLOW_TEST_KILLS", "0"))
WIRES = {"shared memory": {}, "tcp": OVER_TCP}
SHAPE = Shape(num_blocks=512, block_size=16, heads=2, head_size=64)
LOAD = 4
"""Pulls that are under way when one side is killed, of 64 blocks each."""
LISTS = [[list(range(64 * n, 64 * n + 32)), list(range(64 * n + 32, 64 * n + 64))] for n in range(LOAD)]
TOKENS = 32 * 16
BESIDE = [[500, 501], [502, 503]]
FIRST_PULL_S = 2.0
LEASE_S = 2.0
PAUSE_S = 0.01
"""Between pulls beside: they are there to be disturbed, and not to take the cores of everybody else."""
ONCE_MORE = {errors.StaleLease.code, errors.PeerLost.code, errors.PeerUnavailable.code}

pytestmark = [*ELSEWHERE, pytest.mark.timeout(120 + 30 * KILLS)]


class Beside:
    """Pulls between two that are never killed, one after the other, while others are."""

    def __init__(self):
        self.seconds = []
        self.stopped = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self, producer, consumer):
        while not self._stop.is_set():
            request = f"beside {len(self.seconds)}"
            params = await producer.offer(request, BESIDE, 32)
            begun_s = time.monotonic()
            await consumer.pull(params, BESIDE)
            consumer.has(request, BESIDE, 32)
            self.seconds.append(time.monotonic() - begun_s)
            await asyncio.sleep(PAUSE_S)
        self.stopped.set()

    def stop(self):
        self._stop.set()


@asynccontextmanager
async def load_beside(producer, consumer):
    """Keep pulling between two others; what fails there fails the test."""
    beside = Beside()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(beside.run(producer, consumer))
        yield beside
        beside.stop()


@asynccontextmanager
async def ready(number, spawn_one):
    """Start so many processes, each ahead of its time: a restart then takes no longer than opening a worker."""
    coming, started = [], 0

    def start():
        nonlocal started
        if started < number:
            started += 1
            coming.append(asyncio.create_task(asyncio.to_thread(spawn_one)))

    async def take():
        child = await coming.pop()
        start()
        return child

    start()
    yield take
    for task in coming:  # of a test that has failed
        (await task).go()


def say(capsys, text):
    if KILLS:
        with capsys.disabled():
            print(f"\n{text}", end="")  # noqa: T201


def progress(capsys, what, restarts):
    if len(restarts) % 10 == 1:
        say(capsys, f"{what}: {len(restarts) - 1}, the last first pull took {restarts[-1]:.3f} s")


def percentile(values, share):
    return sorted(values)[math.ceil(share * len(values)) - 1]


def report(capsys, what, restarts, ends, beside):
    say(
        capsys,
        f"{what}: {len(restarts)} kills; pulls ended as {ends}; first good pull after a restart: "
        f"median {statistics.median(restarts):.3f} s, p99 {percentile(restarts, 0.99):.3f} s; "
        f"beside: {len(beside.seconds)} pulls, none failed, p99 {percentile(beside.seconds, 0.99) * 1000:.1f} ms",
    )


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("wire", WIRES)
async def test_a_producer_is_killed_and_started_again(elsewhere, wire, capsys):
    """At its old address, with tickets of its old life still on their way."""
    kills, rng = KILLS or 1, random.Random(5)
    restarts, ends, endpoint, old = [], {}, f"tcp://127.0.0.1:{free_port()}", None
    async with (
        ready(kills + 1, Child) as take,
        elsewhere.producing(SHAPE, engine_id="steady") as steady,
        consuming(SHAPE) as consumer,
        load_beside(steady, consumer) as beside,
    ):
        for kill in range(kills + 1):
            child = await take()
            try:
                life = child.producing(SHAPE, bind=endpoint, **WIRES[wire])
                victim = await life.__aenter__()
                first = await victim.offer(f"first {kill}", [[510], [511]], 16)
                begun_s = time.monotonic()
                await consumer.pull(first, [[510], [511]])
                restarts.append(time.monotonic() - begun_s)
                consumer.has(f"first {kill}", [[510], [511]], 16)
                if old is not None:
                    with pytest.raises(errors.StaleLease):
                        await consumer.pull(old, LISTS[0])
                if kill == 0:
                    fds = descriptors()
                params = [await victim.offer(f"{kill}/{n}", LISTS[n], TOKENS) for n in range(LOAD)]
                old = await victim.offer_as_is("old", LISTS[0], TOKENS)
                pulls = [asyncio.create_task(ending(consumer, f"{kill}/{n}", params[n], LISTS[n])) for n in range(LOAD)]
                for _ in range(rng.choice([1, 5, 20, 50, 100])):
                    await asyncio.sleep(0)
            finally:
                child.kill()
                child.go()
            async with asyncio.timeout(60):
                for end in await asyncio.gather(*pulls):
                    ends[end] = ends.get(end, 0) + 1
            progress(capsys, f"producers killed, {wire}", restarts)
            assert set(ends) <= ONCE_MORE | {"right"}
        report(capsys, f"producers killed, {wire}", restarts[1:], ends, beside)
    consumer.at_rest()
    consumer.worker._consumer._scheduler.check()
    assert not consumer.worker._consumer._scheduler.busy
    consumer.worker._consumer._destinations.check()
    assert len(consumer.worker._consumer._destinations) == 0
    assert beside.seconds
    assert not KILLS or percentile(restarts[1:], 0.99) < FIRST_PULL_S  # one measurement on a busy machine says nothing
    assert descriptors() <= fds, "a killed peer has left descriptors behind"


async def ending(consumer, request, params, blocks):
    """Pull, and say how that has ended once nothing may write any more."""
    try:
        await consumer.pull(params, blocks)
    except errors.TransferFailed as error:
        await consumer.worker.quiesced(request)
        return error.code
    consumer.has(request, blocks, TOKENS)
    return "right"


@pytest.mark.parametrize("wire", WIRES)
async def test_a_consumer_is_killed_and_started_again(elsewhere, wire, capsys):
    """What it has read and not released is the producer's again when the leases run out."""
    kills, rng = KILLS or 1, random.Random(5)
    restarts, ends = [], {}
    async with (
        ready(kills + 1, lambda: Child("consumer_process")) as take,
        elsewhere.producing(SHAPE, lease_s=LEASE_S, **WIRES[wire]) as producer,
        # In the same process, but for leases that outlast any stall of the machine.
        elsewhere.producing(SHAPE, engine_id="steady") as steady,
        consuming(SHAPE) as consumer,
        load_beside(steady, consumer) as beside,
    ):
        for kill in range(kills + 1):
            child = await take()
            try:
                await child.ask("open", shape=msgspec.to_builtins(SHAPE), settings={"engine_id": "victim"})
                begun_s = time.monotonic()
                for attempt in count():  # its lease may run out before the producer is met
                    name = f"first {kill} {attempt}"
                    first = await producer.offer(name, [[510], [511]], 16)
                    (end,) = await child.ask("pull", pulls=[[name, first, [[510], [511]], 16]])
                    if end != errors.StaleLease.code:
                        break
                restarts.append(time.monotonic() - begun_s)
                assert end == "right"
                pulls = [
                    [f"{kill}/{n}", await producer.offer(f"{kill}/{n}", LISTS[n], TOKENS), LISTS[n], TOKENS]
                    for n in range(LOAD)
                ]
                child.say("pull", pulls=pulls)
                for _ in range(rng.choice([1, 20, 100, 300])):
                    await asyncio.sleep(0)
            finally:
                child.kill()
                child.go()
            requests = {f"{kill}/{n}" for n in range(LOAD)}
            async with asyncio.timeout(60):
                # Not ``outcome``, which would keep the child from answering whoever pulls beside.
                while requests & set(await producer.held()):  # noqa: ASYNC110
                    await asyncio.sleep(PAUSE_S)
            for request in requests:
                end = await producer.outcome(request)
                ends[end] = ends.get(end, 0) + 1
            progress(capsys, f"consumers killed, {wire}", restarts)
            assert set(ends) <= {"released", "expired"}
            await producer.check()
        beside.stop()
        await beside.stopped.wait()
        assert await producer.leases() == 0
        await producer.check()
        report(capsys, f"consumers killed, {wire}", restarts[1:], ends, beside)
        assert elsewhere.process.poll() is None, "a reader that died took its producer with it"
    assert beside.seconds
    assert not KILLS or percentile(restarts[1:], 0.99) < FIRST_PULL_S  # one measurement on a busy machine says nothing
