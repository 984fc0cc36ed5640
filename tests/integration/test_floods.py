"""Floods from another process: honest peers are served all the while, and memory does not grow with each flood."""

import asyncio
import ctypes
import gc
import logging
import os
import re
import resource
import statistics
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

import kvflow
from kvflow.reads.tcp.access import BUFFERED_OF_ONE_MAX, Access, Accounts
from tests.helpers.limits import files_limited, many_files, open_files
from tests.ports import free_port
from tests.world.node import Node, hosted

from .conftest import World
from .consuming import PATIENCE_S, consuming, until, works
from .flooding import FLOODS, OF_DATA, flooding
from .harming import harming
from .producing import SECRET, producing
from .shapes import Shape
from .starving import starving
from .strangers import ticket_to

CONNECTIONS = 1000
PATIENT = {"connect_s": 30.0, "handshake_s": 30.0}
"""A pull with its handshake takes some ten milliseconds in a flood, too. What is asked for is a second; a machine
that runs other tests meanwhile gets more."""
HERD_S = 300.0
"""A reader over TLS costs both sides some 11 ms of processor time at the door, beside its worker: 256 take seconds of a
host that has nothing else to do, and minutes of one that has little left."""
GROWTH_KIB_MAX = 4096
"""Of one flood more, after the first: 1,000 connections that were kept would be that in ZeroMQ alone."""


@pytest.fixture(autouse=True)
def files():
    """Both ends of a flood are of this machine."""
    with many_files(CONNECTIONS + 1000):
        yield


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


@asynccontextmanager
async def flood(kind, endpoint, *, leaving=None):
    """Hold a flood while the block runs; ``leaving`` this process so many file descriptors besides those in use."""
    node = await asyncio.to_thread(partial(Node, forked=False))
    try:
        with nullcontext() if leaving is None else files_limited(open_files() + leaving):
            await node.open(flooding, kind, endpoint, CONNECTIONS, SECRET)
            yield node
    finally:
        await asyncio.to_thread(node.end)  # closing thousands of sockets takes time, and no test waits for it


async def serves(world, producer, consumer, name):
    """Serve a peer that is connected and one that is not, each within its budgets."""
    await works(producer, consumer, request=f"{name} old")
    async with world.consuming(engine_id="decode-1", **PATIENT) as newcomer:
        await works(producer, newcomer, request=f"{name} new")


@pytest.mark.processes
@pytest.mark.parametrize("kind", FLOODS)
async def test_honest_peers_are_served_throughout_and_memory_is_flat(near_world, kind):
    in_use = []
    async with near_world.producing() as producer, near_world.consuming(**PATIENT) as consumer:
        await serves(near_world, producer, consumer, "before")
        calm = open_files()
        for wave in range(2):
            async with flood(kind, producer.endpoint):
                for turn in range(2):
                    await serves(near_world, producer, consumer, f"{wave} {turn}")
            await until(lambda: open_files() <= calm + 8)  # it has gone, and everything with it
            in_use.append(in_use_kib())
        await serves(near_world, producer, consumer, "after")
        # ZeroMQ frees behind our back.
        await until(lambda: in_use_kib() - in_use[0] < GROWTH_KIB_MAX)


@pytest.mark.processes
async def test_beside_a_member_that_never_stops_talking_the_others_are_served(near_world):
    async with near_world.producing() as producer, near_world.consuming(**PATIENT) as consumer:
        await serves(near_world, producer, consumer, "before")
        async with flood("a member that never stops talking", producer.endpoint):
            for turn in range(3):
                await serves(near_world, producer, consumer, str(turn))


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


ENCRYPTIONS = ["off", "tls"]
BLOCKS = [[0, 1], [2, 3]]


@pytest.mark.processes
@pytest.mark.parametrize("encryption", ENCRYPTIONS)
@pytest.mark.parametrize("kind", OF_DATA)
async def test_a_flooded_data_port_serves_readers_and_lets_newcomers_in(elsewhere, kind, encryption):
    world, data = World("tcp", elsewhere.producing), f"tcp://127.0.0.1:{free_port()}"
    settings = {"tcp_encryption": encryption}
    async with (
        world.producing(tcp_bind=data, **settings) as producer,
        world.consuming(**PATIENT, **settings) as consumer,
    ):
        await works(producer, consumer, request="before")
        async with flood(kind, data) as child:
            for turn in range(3):
                await works(producer, consumer, request=f"old {turn}")
                async with world.consuming(engine_id=f"decode-{turn + 1}", **PATIENT, **settings) as newcomer:
                    await works(producer, newcomer, request=f"new {turn}")
            assert not await child.is_over(), "the flood was over too early"
        await works(producer, consumer, request="after")


async def arrive(world, count, settings):
    """Have so many readers read at once; return how they ended, and how many each way."""

    async def pulled(consumer, params):
        try:
            await consumer.pull(params, BLOCKS)
        except kvflow.errors.KvflowError as error:
            return str(error).partition(": ")[2]
        consumer.has("r", BLOCKS, 8)
        return "right"

    async with world.producing(**settings) as producer, AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(world.consuming(engine_id=f"decode-{number}", **settings))
            for number in range(count)
        ]
        await producer.write("r", BLOCKS, 8)
        tickets = [await producer.offer_as_is(f"r{number}", BLOCKS, 8) for number in range(count)]
        begun_s = time.monotonic()
        ends = Counter(await asyncio.gather(*map(pulled, readers, tickets)))
        print(f"{count} readers, {settings}: {dict(ends)}, {time.monotonic() - begun_s:.2f} s")  # noqa: T201 - a figure
        return ends


SAMPLES = 400


async def times_of(producer, consumer):
    """Pull one after the other, and return the median and the 99th percentile in milliseconds."""
    times = []
    for number in range(SAMPLES):
        params = await producer.offer_as_is(f"{len(times)} {number}", BLOCKS, 8)
        begun_s = time.perf_counter()
        await consumer.pull(params, BLOCKS)
        times.append((time.perf_counter() - begun_s) * 1e3)
    return statistics.median(times), statistics.quantiles(times, n=100)[-1]


@pytest.mark.processes
@pytest.mark.parametrize("encryption", ENCRYPTIONS)
@pytest.mark.parametrize("kind", OF_DATA)
async def test_a_reader_that_is_in_is_delayed_and_not_stopped_by_a_flood(elsewhere, kind, encryption):
    world, data = World("tcp", elsewhere.producing), f"tcp://127.0.0.1:{free_port()}"
    settings = {"tcp_encryption": encryption, **PATIENT}
    async with world.producing(tcp_bind=data, **settings) as producer, world.consuming(**settings) as consumer:
        await works(producer, consumer, request="before")
        quiet = await times_of(producer, consumer)
        async with flood(kind, data) as child:
            beside = await times_of(producer, consumer)
            assert not await child.is_over(), "the flood was over too early"
        pairs = zip(("p50", "p99"), quiet, beside, strict=True)
        times = ", ".join(f"{name} {before:.2f} ms, {after / before:.1f} x" for name, before, after in pairs)
        print(f"{kind}, {encryption}: {times}; load {os.getloadavg()[0]:.1f}")  # noqa: T201 - a figure to read
        await works(producer, consumer, request="after")


@pytest.mark.processes
@pytest.mark.parametrize("encryption", ENCRYPTIONS)
@pytest.mark.parametrize("count", [1, 64, 256])
async def test_readers_that_arrive_together_all_read(elsewhere, count, encryption):
    budgets = dict.fromkeys(("connect_s", "handshake_s", "wire_s", "fence_s", "lease_s"), HERD_S)
    settings = {"tcp_encryption": encryption, **budgets}
    assert await arrive(World("tcp", elsewhere.producing), count, settings) == {"right": count}


@pytest.mark.processes
@pytest.mark.parametrize("patience", [{}, PATIENT], ids=["usual", "patient"])
async def test_a_herd_at_a_door_with_a_tenth_of_a_core_is_late_or_hears_why(spawn, patience, caplog):
    caplog.set_level(logging.CRITICAL)
    world = World("tcp", partial(spawn().producing, there=starving))
    ends = await arrive(world, 256, {"tcp_encryption": "tls", **patience})
    # Where the host gives the door nothing at all, a reader's own time is over before it hears that the door is busy.
    late = re.compile(r".* \[deadline_exceeded\] Check the peer's load")
    assert [end for end in ends if end != "right" and not late.match(end)] == []
    assert ends["right"] >= 32


HARM = [
    *[(kind, encryption) for kind in ("half_requests", "answers_unread", "leases_shown") for encryption in ENCRYPTIONS],
    ("key_updates", "tls"),
]
HARMFUL = 200
"""Connections of one member."""
HARM_S = 3.0
SAMPLED_S = 0.01
BESIDE_BYTES_MAX = 1 << 20
"""What the honest reader has half sent, and what has arrived when the bound is looked at."""
HELD_MIB_MAX = 40
"""Of resident memory: what one key may have half sent, what is kept beside each connection, and the allocator's."""


class Samples(threading.Thread):
    """Looks at what an exporter of this process holds for its readers, every ``SAMPLED_S``.

    Attributes:
        buffered: most bytes of requests and answers.
        resident: most bytes of this process, beyond those at the start.
    """

    def __init__(self):
        super().__init__(daemon=True)
        (self._accounts,) = (each for each in gc.get_objects() if type(each) is Accounts and each.count)
        self._status = Path("/proc/self/statm")
        self._before = self._resident()
        self._over = threading.Event()
        self.buffered = self.resident = 0
        self.start()

    def run(self):
        while not self._over.wait(SAMPLED_S):
            self.buffered = max(self.buffered, self._accounts.buffered)
            self.resident = max(self.resident, self._resident() - self._before)

    def end(self):
        self._over.set()
        self.join()

    def _resident(self):
        return int(self._status.read_text().split()[1]) * resource.getpagesize()


async def works_beside(producer, consumer):
    """Have an honest consumer read for ``HARM_S``."""
    until_s, turn = time.monotonic() + HARM_S, 0
    while time.monotonic() < until_s:
        await works(producer, consumer, f"beside {turn}", [[4, 5], [6, 7]])
        turn += 1


OPENING_MS_MAX = 30
"""Of CPU: a busy machine counts up to three times as much as a quiet one."""


@pytest.mark.processes
@pytest.mark.parametrize("encryption", ENCRYPTIONS)
async def test_a_member_that_opens_connections_over_and_over_costs_milliseconds(encryption, monkeypatch):
    settings, spent, go_on = {"transport": "tcp", "tcp_encryption": encryption}, [], Access._go_on

    def counted(access, place):
        before_s = time.thread_time()
        go_on(access, place)
        spent.append(time.thread_time() - before_s)

    async with producing(Shape(), **settings) as producer, consuming(**PATIENT, **settings) as consumer:
        await works(producer, consumer, "before")
        monkeypatch.setattr(Access, "_go_on", counted)
        async with hosted(harming, "openings", HARMFUL, await producer.offer("harm", BLOCKS, 8), settings) as member:
            await works_beside(producer, consumer)
            did = await member.done()
        each_ms = sum(spent) / did["connections"] * 1e3
        print(f"{encryption}: {did['connections']} openings, {each_ms:.2f} ms; load {os.getloadavg()[0]:.1f}")  # noqa: T201
        assert did["connections"] > 10
        assert each_ms <= OPENING_MS_MAX


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "encryption"), HARM)
async def test_a_member_that_means_harm_makes_a_producer_hold_little(kind, encryption):
    settings = {"transport": "tcp", "tcp_encryption": encryption}
    async with producing(Shape(), **settings) as producer, consuming(**PATIENT, **settings) as consumer:
        await works(producer, consumer, "before")
        async with hosted(harming, kind, HARMFUL, await producer.offer("harm", BLOCKS, 8), settings) as member:
            samples = Samples()
            await works_beside(producer, consumer)
            did = await member.done()
            samples.end()
        print(f"{kind}, {encryption}: {did}, {samples.buffered} B buffered, {samples.resident} B more")  # noqa: T201
        assert did["connections"] >= 1
        assert did["sent"] > 10_000
        assert samples.buffered <= BUFFERED_OF_ONE_MAX + BESIDE_BYTES_MAX
        assert samples.resident <= HELD_MIB_MAX << 20
        await works(producer, consumer, "after", [[4, 5], [6, 7]])
