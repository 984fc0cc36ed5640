"""Steady load with everything that happens to it, in rounds: what is left at rest after each must not grow."""

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle, islice

import msgspec

import kvflow
from kvflow import errors
from tests.integration.producing import configured
from tests.integration.recycling import NUM_BLOCKS, TARGET, THREADS, Path
from tests.integration.shapes import Shape
from tests.world.words import digests_of

from .hosting import AwayError, Engine, Host, answered, reading_beside
from .measuring import more, sample
from .reader import EVENTS, Lane, Station, Tally

READER_THREADS = 2
LANES = 12
BESIDE = 4
"""Pulls at once of the other reader."""
ABORTED = 0.25
"""Share of the pulls that may be given up: four of five after some turns of the loop, the others after an event."""
COMPUTING = 0.3
"""Share of the offers that are made before they are computed."""
RELEASED = 0.5
"""Share of those that were given up whose tickets are given back; leases of the others run out."""
LEASE_S = 3.0
"""Of those engines whose leases are not there to run out in the middle of a read."""
PROMPT_S = 1.0
"""Pulls that take longer, from their offer on, have met a stall of the machine, and may come too late."""
PRIORITIES = (0, 0, 0, 1, 5, -3)
PATIENCE_S = 60.0
STEADY_S = 20.0
"""Until whatever a restart has left open is closed."""
PAUSE_S = 0.02
ATTEMPTS = 3
"""A machine that stalls for ``LEASE_S`` may let one lease run out that its reader has given back."""
SPARE = 12
"""TCP connections that readers open beside their first to a peer when they ask for more at the same time: two readers,
six ranks."""
AT_ONCE = 1000
"""Offers that are awaited together."""
SHOWN = {digit * 10**power for power in range(3, 9) for digit in (1, 2, 5)}
"""Numbers of offers after which memory is looked at."""
MANY_PIECES = msgspec.structs.replace(TARGET, layout="LBNHC")


class Soak:
    """Everybody who takes part, and what becomes of it.

    Args:
        seed: of all that is random.
        transport: of all workers, as ``PLANES`` has it.

    Attributes:
        tally: of the pulls of all readers.
        pulls: how many have ended.
        took_s: seconds that all rounds took.
        blocks_left: blocks that were not free at the end.
        undisturbed: pulls that must have been delivered.
        unexplained: those of them that were not.
        unreleased: engines whose leases ran out although their readers had all they wanted.
        unsteady: whose files or threads were more than at the first rest.
        restarts: how often what was done.
        samples: of each process, one of each round.
    """

    def __init__(self, seed, transport):
        near, far = Host("producers", THREADS), Host("producer", THREADS)
        self.tally = Tally()
        self.pulls = 0
        self.took_s = 0.0
        self.blocks_left = 0
        self.undisturbed = 0
        self.unexplained = []
        self.unreleased = []
        self.unsteady = []
        self.restarts = Counter()
        self.samples = defaultdict(list)
        self._seed = seed
        self._transport = transport
        self._spare = 0 if transport == "auto" else SPARE
        self._rng = random.Random(f"soak {seed}")
        self._far, self._other = far, Host("reader", READER_THREADS)
        self._hosts = {"producer": near, "producer that is killed": far, "reader that is killed": self._other}
        early, pieces = {"computing": COMPUTING}, {"source": MANY_PIECES}
        self._engines = [
            Engine("steady", Path(**early, lease_s=LEASE_S, revoked=0.1), near, 6, certain=True, at_once=4),
            Engine("victim", Path(**early, **pieces, lease_s=LEASE_S, revoked=0.1), far, 3, certain=True, at_once=4),
            Engine("brief", Path(**early, ranks=2, lease_s=0.01, revoked=0.3), near, 1),
            Engine("late", Path(**early, ranks=2, minted=True, lease_s=0.06, revoked=0.1), near, 1),
        ]
        for engine in self._engines:
            engine.transport = transport
        self._station = Station("decode-0", transport, seeks=True)
        share = NUM_BLOCKS // LANES
        self._lanes = [
            Lane(self._station, range(n * share, (n + 1) * share), random.Random(f"lane {n} {seed}"), self.tally)
            for n in range(LANES)
        ]
        self._other_ready = asyncio.Event()
        self._beside = None
        self._left = 0
        self._delivered = 0

    @asynccontextmanager
    async def everybody(self):
        """Start them all, and end them all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._station.open())
                for host in self._hosts.values():
                    await host.start()
            for engine in self._engines:
                await engine.open(self._seed)
            await self._open_other()
            await self.rest()
            yield
        finally:
            for host in self._hosts.values():
                await host.end()
            await self._station.close()

    async def round(self, pulls, disturbance):
        """Pull so often, while something happens; then see that everybody can read everybody, and look at them."""
        self._left = pulls
        when = self._rng.uniform(0.3, 0.7) * pulls
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for lane in self._lanes:
                tasks.create_task(self._pull_on(lane, lambda: self._left < when and begun.set()))
            tasks.create_task(self._pull_beside())
            await begun.wait()
            self.restarts[disturbance] += 1
            await DISTURBANCES[disturbance](self)
        await self.rest()

    async def rest(self):
        """Let everybody meet everybody, and read who can be read; check the law of blocks, and measure."""
        for engine in self._engines:
            pulls = (partial(self._pull_once, self._lanes[0], engine, None), partial(self._pull_from_other, engine, 1))
            for pull in pulls:
                await (self._until_completed(pull) if engine.certain else pull())
            if engine.certain and not await self._is_released(engine):
                self.unreleased.append(engine.name)
            await self._station.worker.find(engine.endpoints[0], digests_of(0, 1))  # its connection is among the files
        await self._check()
        for name, pid in {"reader": None, **{name: host.node.pid for name, host in self._hosts.items()}}.items():
            self.samples[name].append(await self._steady_sample(name, pid or "self"))

    async def finish(self):
        """Wait until all leases have run out, and all blocks are free."""
        for lane in self._lanes:
            lane.look_again()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.blocks_left = sum([await engine.check() for engine in self._engines])
            if self.blocks_left == 0 or time.monotonic() > deadline:
                return
            await asyncio.sleep(PAUSE_S)

    async def kill_producer(self):
        """And start it again at its address."""
        (engine,) = (engine for engine in self._engines if engine.host is self._far)
        engine.lives += 1
        await self._far.restart()
        await engine.open(self._seed)

    async def reopen_engine(self):
        """Close one in its process, and open it again at its address."""
        engine = self._rng.choice(self._engines)
        await engine.close()
        await engine.open(self._seed)

    async def reopen_reader(self):
        """Close the worker that reads, in the middle of its pulls, and open another one."""
        await self._station.close()
        await self._station.open()

    async def kill_reader(self):
        """And start another one."""
        self._other_ready.clear()
        await self._other.restart()
        await self._open_other()

    async def _open_other(self):
        self._beside = await self._other.node.open_another(reading_beside, self._seed, self._transport)
        self._other_ready.set()

    async def _pull_on(self, lane, began):
        while self._left > 0:
            self._left -= 1
            began()
            await self._station.ready.wait()
            abort = None
            if self._rng.random() < ABORTED:
                abort = "turns" if self._rng.random() < 0.8 else self._rng.choice(EVENTS)
            if await self._pull_once(lane, self._choose(), abort) is None:
                self._left += 1

    async def _pull_beside(self):
        while self._left > 0:
            await self._other_ready.wait()
            ends = await self._pull_from_other(self._choose(), BESIDE)
            self._left -= len(ends)

    def _choose(self):
        """Choose whom to read from, of those who are not being restarted."""
        present = [engine for engine in self._engines if engine.is_open]
        return self._rng.choices(present, [engine.weight for engine in present])[0]

    async def _pull_once(self, lane, engine, abort):
        """Have something offered and pull it; return how that ended, or None if nobody was there to offer."""
        lives, worker = self._station.lives, self._station.worker
        try:
            offer = await engine.offer(self._rng)
        except AwayError:
            return None
        priority = self._rng.choice(PRIORITIES)
        end = await lane.pull(offer.number, offer.params, offer.num_blocks, priority=priority, abort=abort)
        self.pulls += 1
        if end == "completed":
            self._delivered = offer.number
        same = (offer.lives, lives) == (engine.lives, self._station.lives)
        prompt = time.monotonic() - offer.asked_s < PROMPT_S
        if engine.certain and same and prompt and abort is None and not offer.revoked:
            self.undisturbed += 1
            if end != "completed":
                self.unexplained.append(f"{engine.name}: {end}")
        if end == "cancelled" and self._rng.random() < RELEASED:
            with suppress(errors.KvflowError):  # its lease may have run out, its engine may be gone
                await worker.release(kvflow.Ticket.from_params(offer.params))
        return end

    async def _pull_from_other(self, engine, at_once):
        """Have the reader in a process of its own pull; return how its pulls ended."""
        try:
            offers = [await engine.offer(self._rng) for _ in range(at_once)]
        except AwayError:
            return []
        ends = ["killed"] * at_once
        try:
            told = [(offer.number, offer.params, offer.num_blocks) for offer in offers]
            ends, ledger = await answered(self._beside.pull(told))
        except AwayError:
            self.tally.ends["killed"] += at_once
        else:
            self.tally.add(ledger)
        self.pulls += at_once
        return ends

    async def _until_completed(self, pull):
        """Pull until one is delivered: at rest that is the first one which is not revoked."""
        async with asyncio.timeout(PATIENCE_S):
            while await pull() not in ("completed", ["completed"]):
                pass

    async def _is_released(self, engine):
        """Tell whether the lease of a delivered pull ends before its time, as its reader gives it back."""
        for _ in range(ATTEMPTS):
            await self._until_completed(partial(self._pull_once, self._lanes[0], engine, None))
            if await engine.outcome(self._delivered) != "expired":
                return True
        return False

    async def _check(self):
        self._station.worker.check()
        snapshot = self._station.worker.snapshot()
        assert (snapshot.pulls, snapshot.quarantined) == (0, ()), snapshot
        for engine in self._engines:
            await engine.check()

    async def _steady_sample(self, name, pid):
        """Measure when files and threads are no more than at the first rest, or do not become so few."""
        before, deadline = self.samples[name], time.monotonic() + STEADY_S
        now = sample(pid)
        while before and (text := more(now, before[0], self._spare)):
            if time.monotonic() > deadline:
                self.unsteady.append(f"{name}, round {len(before)}: {text}")
                break
            await asyncio.sleep(PAUSE_S)
            now = sample(pid)
        return now


async def run(pulls, *, of_round, seed=0, transport="auto", progress=lambda _: None):
    """Pull at least so often; return what became of it.

    Thread: its loop has all threads of its default executor, so that their number says something.
    """
    soak = Soak(seed, transport)
    async with soak.everybody():
        began_s = time.monotonic()
        for disturbance in islice(cycle(DISTURBANCES), -(-pulls // of_round)):
            await soak.round(of_round, disturbance)
            progress(soak)
        soak.took_s = time.monotonic() - began_s
        await soak.finish()
    return soak


async def offer_and_release(offers, *, read, progress=lambda _done, _rss: None):
    """Offer so often in one process with the reader, which releases each offer, after a read or without one.

    Returns:
        Bytes of resident memory after so many offers.
    """
    memory = {}
    settings = {"transport": "loopback", "lease_s": 3600.0}  # none runs out
    async with (
        kvflow.open_worker(configured("prefill-0", **settings), Shape().build()) as producer,
        kvflow.open_worker(configured("decode-0", **settings), Shape().build()) as reader,
    ):
        for first in range(0, offers, AT_ONCE):
            names = [str(first + at) for at in range(AT_ONCE)]
            for number, name in enumerate(names):
                size = 1 + number % 2  # blocks
                sources = [range(size), range(2, 2 + size)]
                ticket = producer.offer(name, sources, 4 * size)
                # A pull into absent blocks reads nothing, and its release goes with those of others in one message.
                await reader.pull(ticket, [range(4, 4 + size), range(6, 6 + size)] if read else [[-1], [-1]])
            async with asyncio.timeout(PATIENCE_S):
                for name in names:
                    assert await producer.wait_offer(name) == "released"
            done = first + AT_ONCE
            if done in SHOWN or done >= offers:
                memory[done] = sample(os.getpid()).rss
                progress(done, memory[done])
        producer.check()
        reader.check()
    return memory


DISTURBANCES = {
    "producer killed": Soak.kill_producer,
    "engine reopened": Soak.reopen_engine,
    "reader reopened": Soak.reopen_reader,
    "reader killed": Soak.kill_reader,
}
