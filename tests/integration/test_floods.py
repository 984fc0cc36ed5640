"""Floods from another process: honest peers are served all the while, and memory does not grow with each flood."""

import asyncio
import ctypes
import gc
import resource
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvflow

from .consuming import PATIENCE_S, until, works
from .elsewhere import environment_of_children
from .flood_process import FLOODS
from .producing import SECRET
from .strangers import ticket_to

CONNECTIONS = 1000
SERVED_S = 10.0
"""A pull with its handshake takes some ten milliseconds in a flood, too. What is asked for is a second; a machine
that runs other tests meanwhile gets more."""
PATIENT = {"connect_s": 30.0, "handshake_s": 30.0}
GROWTH_KIB_MAX = 4096
"""Of one flood more, after the first: 1,000 connections that were kept would be that in ZeroMQ alone."""


@pytest.fixture(autouse=True)
def many_files():
    """Take as many file descriptors as we may have: both ends of a flood are of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + 1000:
        pytest.skip(f"{hard} open files are too few for a flood")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = Mallinfo


def in_use_kib():
    """Return what is allocated: what the allocator keeps for later comes and goes as it likes."""
    gc.collect()
    info = LIBC.mallinfo2()
    return (info.uordblks + info.hblkhd) >> 10


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def flood(kind, endpoint, *, leaving=None):
    """Hold a flood while the block runs; ``leaving`` this process so many file descriptors besides those in use."""
    child = subprocess.Popen(  # noqa: ASYNC220 - it takes a moment, once
        [sys.executable, "-m", "integration.flood_process", kind, endpoint, str(CONNECTIONS), SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_children(),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if leaving is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + leaving, hard))
    try:
        assert await asyncio.to_thread(child.stdout.readline) == "flooded\n"
        yield child
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        child.kill()
        await asyncio.to_thread(child.wait, PATIENCE_S)
        child.stdin.close()
        child.stdout.close()


async def serves(world, producer, consumer, name):
    """Serve a peer that is connected and one that is not; return the seconds that the slower one took."""
    begun_s = time.monotonic()
    await works(producer, consumer, request=f"{name} old")
    old_s = time.monotonic() - begun_s
    async with world.consuming(engine_id="decode-1", **PATIENT) as newcomer:
        begun_s = time.monotonic()
        await works(producer, newcomer, request=f"{name} new")
        return max(old_s, time.monotonic() - begun_s)


@pytest.mark.processes
@pytest.mark.parametrize("kind", FLOODS)
async def test_honest_peers_are_served_throughout_and_memory_is_flat(near_world, kind):
    in_use, worst_s = [], 0.0
    async with near_world.producing() as producer, near_world.consuming(**PATIENT) as consumer:
        await serves(near_world, producer, consumer, "before")
        calm = open_files()
        for wave in range(2):
            async with flood(kind, producer.endpoint):
                for turn in range(2):
                    worst_s = max(worst_s, await serves(near_world, producer, consumer, f"{wave} {turn}"))
            await until(lambda: open_files() <= calm + 8)  # it has gone, and everything with it
            in_use.append(in_use_kib())
        await serves(near_world, producer, consumer, "after")
        # ZeroMQ frees behind our back.
        await until(lambda: in_use_kib() - in_use[0] < GROWTH_KIB_MAX)
    assert worst_s < SERVED_S


@pytest.mark.processes
async def test_beside_a_member_that_never_stops_talking_the_others_are_served(near_world):
    async with near_world.producing() as producer, near_world.consuming(**PATIENT) as consumer:
        await serves(near_world, producer, consumer, "before")
        async with flood("a member that never stops talking", producer.endpoint):
            worst_s = max([await serves(near_world, producer, consumer, str(turn)) for turn in range(3)])
        assert worst_s < SERVED_S


@pytest.mark.processes
async def test_a_worker_without_file_descriptors_serves_connected_peers(near_world):
    async with near_world.producing() as producer, near_world.consuming(**PATIENT) as consumer:
        await works(producer, consumer)
        async with flood("connections that say nothing", producer.endpoint, leaving=8):
            for turn in range(3):
                await works(producer, consumer, request=f"while there are none {turn}")
            with pytest.raises(kvflow.errors.CapacityExceeded, match="open files"):  # whom it does not know it dials
                await consumer.pull(ticket_to("tcp://127.0.0.1:9"), [[0, 1], [2, 3]])
        await until_served(near_world, producer, consumer)


async def until_served(world, producer, consumer):
    """Wait until a newcomer is served: those that waited in the kernel come first, and are gone already."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await serves(world, producer, consumer, "when there are some again")
            except (kvflow.errors.DeadlineExceeded, kvflow.errors.PeerLost):
                continue
            return
