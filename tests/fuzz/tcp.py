"""The TCP data plane: readers that lie to an exporter, beside an honest one; and exporters that lie to a reader."""

import asyncio
import json
import threading
import time
from collections import Counter, deque
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct
from tests.unit.kvflow.reads.tcp01.peers import EPOCH, PATIENCE_MS, Consumer, Leases, ScriptedExporter, credentials

from kvflow.reads.backend import BackendError
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.channel import ChannelClosed

from .mutations import Mutator
from .processes import PATIENCE_S, START_PATIENCE_S, Died, start
from .tcp_frames import Served, mutated_answer

ATTACKERS = 2
WARM = 0.2
"""Of the frames, as in ``listener``."""

BETWEEN_HONEST_S = 0.02
HONEST_BLOCKS_MAX = 16
ROUNDS_MAX = 20

BLOCK_BYTES = 512
GUARD = 0xA5
"""What is around the blocks that are read into."""


class Exported(Struct):
    """What came of an attack on an exporter.

    Attributes:
        frames: that the attackers said, most of them valid but strange.
        answered: of these, answers that the attackers heard.
        requests: that the exporter decoded, or refused to.
        invalid: those that it refused, hellos included.
        conversations: connections of the attackers.
        turned_away: those with a wrong hello.
        seconds: that it took.
        honest: seconds of each honest read meanwhile.
        warm: what the exporter's process had after the first fifth: ``rss``, ``files``, ``threads``.
        end: at the end, with all attackers gone.
    """

    frames: int = 0
    answered: int = 0
    requests: int = 0
    invalid: int = 0
    conversations: int = 0
    turned_away: int = 0
    seconds: float = 0.0
    honest: list[float] = []
    warm: dict[str, int] = {}
    end: dict[str, int] = {}


class Exporter:
    """The process that serves.

    Attributes:
        served: what it serves.
        cache: all of it.
    """

    def __init__(self, process, served, cache):
        self._process = process
        self.served = served
        self.cache = cache

    @classmethod
    async def start(cls, encryption):
        pipe = asyncio.subprocess.PIPE
        process = await start("tcp_served", encryption, stdin=pipe, stdout=pipe)
        async with asyncio.timeout(START_PATIENCE_S):
            served = msgspec.json.decode(await process.stdout.readline(), type=Served)
            cache = np.frombuffer(bytes.fromhex((await process.stdout.readline()).decode()), np.uint8)
        return cls(process, served, cache.reshape(2, served.blocks, served.block_bytes))

    async def counts(self):
        """Ask for what it has counted.

        Raises:
            Died: it has ended, or has logged a defect.
        """
        try:
            self._process.stdin.write(b"counts\n")
            await self._process.stdin.drain()
            async with asyncio.timeout(PATIENCE_S):
                said = json.loads(await self._process.stdout.readline())
        except (ConnectionError, ValueError) as error:
            raise Died(f"the exporter ended with {await self._process.wait()}") from error
        if said.pop("defects"):
            raise Died(str(said))
        return said

    async def stop(self):
        self._process.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                if code := await self._process.wait():
                    raise Died(f"the exporter ended with {code}")
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


class Honest:
    """A thread that reads leased blocks over and over, and compares them."""

    def __init__(self, served, cache):
        self.seconds = []
        self.failed = None
        self._stopping = threading.Event()
        self._served = served
        self._cache = cache
        self._thread = threading.Thread(target=self._run, name="honest")
        self._thread.start()

    def stop(self):
        self._stopping.set()
        self._thread.join()

    def _run(self):
        served = self._served
        consumer = Consumer(blocks=served.blocks, block_bytes=served.block_bytes, encryption=served.encryption)
        draw = np.random.default_rng(1)
        try:
            peer = consumer.add(served.endpoint, who=credentials(name="honest", incarnation="7" * 32))
            for group in (0, 1):
                consumer.prepare(peer, served.rows(group), list_id=group, group=group)
            while not self._stopping.wait(BETWEEN_HONEST_S):
                group, count = draw.integers(2), draw.integers(1, HONEST_BLOCKS_MAX)
                source, target = draw.integers(0, served.leased, count), draw.permutation(served.blocks)[:count]
                leases = [(0, served.epochs[0], int(count))]
                read = consumer.read(peer, source, target, leases, nbytes=served.block_bytes, list_id=int(group))
                begun_at = time.monotonic()
                consumer.wait(consumer.post(read))
                self.seconds.append(time.monotonic() - begun_at)
                assert consumer.fence(peer, 0, read) == served.epochs[0], "a lease that lasts"
                assert (consumer.target[target] == self._cache[group, source]).all(), "a wrong byte"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.failed = error
        finally:
            consumer.close()


async def attack(frames, seed, *, encryption="off", first=0, tell=lambda *_: None):
    """Say so many frames to an exporter, and read from it honestly meanwhile.

    Raises:
        Died: the exporter has, or has logged a defect, or has answered what it should not; or an honest read failed.
    """
    exporter = await Exporter.start(encryption)
    honest = Honest(exporter.served, exporter.cache)
    try:
        found = await _attacked(exporter, frames, (seed, first), tell)
    finally:
        await asyncio.to_thread(honest.stop)
        await exporter.stop()
    if honest.failed is not None:
        raise Died(f"an honest read failed: {honest.failed!r}")
    found.honest = sorted(honest.seconds)
    return found


async def _attacked(exporter, frames, drawn, tell):
    seed, first = drawn
    found, begun_at = Exported(), time.monotonic()
    reports = [{"frames": 0} for _ in range(ATTACKERS)]
    async with asyncio.TaskGroup() as group:
        following = []
        for each in range(ATTACKERS):
            numbers = (first + each, ATTACKERS, -(-frames // ATTACKERS))
            served = msgspec.json.encode(exporter.served).decode()
            attacker = await start("tcp_attacker", served, seed, *numbers, stdout=asyncio.subprocess.PIPE)
            following.append(group.create_task(_follow(attacker, reports, each)))
        while not all(task.done() for task in following):
            await asyncio.wait(following, timeout=0.2)
            done = sum(report["frames"] for report in reports)
            if not found.warm and done >= frames * WARM:
                found.warm = await exporter.counts()
            tell(done, frames)
    found.seconds = time.monotonic() - begun_at
    found.end = await exporter.counts()
    found.requests = found.end["requests"]
    found.invalid = found.end["invalid"] + found.end["hellos_invalid"]
    for name in ("frames", "answered", "conversations", "turned_away"):
        setattr(found, name, sum(report[name] for report in reports))
    return found


async def _follow(process, reports, each):
    """Read what an attacker reports, to its end."""
    try:
        while line := await process.stdout.readline():
            reports[each] = json.loads(line)
        if await process.wait():
            raise Died(f"an attacker ended; conversation {reports[each].get('under_way')}, or one a little later")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Lied(Struct):
    """What came of exporters that lie.

    Attributes:
        answers: that they said, most of them valid but strange.
        said: how many reads ended how.
        connections: that were dialed.
        seconds: that it took.
        rss_warm: resident bytes of this process after the first fifth.
        rss_end: at the end.
    """

    answers: int = 0
    said: Counter[str] = Counter()
    connections: int = 0
    seconds: float = 0.0
    rss_warm: int = 0
    rss_end: int = 0


def lie(answers, seed, *, encryption="off", first=0, rss=lambda: 0, tell=lambda *_: None):
    """Answer a backend's reads with so many lies.

    Raises:
        Died: a read has not ended, or a byte was written beside what was read into; says how to draw it again.
    """
    found, begun_at = Lied(said=Counter()), time.monotonic()
    consumer = Consumer(blocks=64, block_bytes=BLOCK_BYTES, encryption=encryption, connections=1)
    exporter = ScriptedExporter(consumer)
    try:
        liar = _Liar(consumer, exporter, found)
        number = first
        while found.answers < answers:
            try:
                liar.converse(Mutator(f"{seed}/tcp-answers/{number}"))
            except Exception as error:
                raise Died(f"{error!r}; again: --seed {seed} --first {number} --tcp-answers 1") from error
            number += 1
            if not found.rss_warm and found.answers >= answers * WARM:
                found.rss_warm = rss()
            tell(found.answers, answers)
        liar.be_honest()
    finally:
        exporter.close()
        consumer.close()
    found.seconds, found.rss_end = time.monotonic() - begun_at, rss()
    return found


class _Liar:
    """Exporters that a consumer dials one after the other."""

    def __init__(self, consumer, exporter, found):
        self._consumer = consumer
        self._exporter = exporter
        self._found = found
        self._rows = Leases().rows()
        self._peer = consumer.add(exporter.endpoint)
        consumer.prepare(self._peer, self._rows)
        self._connection = None
        consumer.target[:] = GUARD

    def converse(self, mutator):
        """Have the consumer dial, and answer its reads until an answer breaks the protocol."""
        for _ in range(ROUNDS_MAX):
            reads = [self._post(mutator.draw) for _ in range(mutator.draw.choice((1, 1, 2, 4)))]
            broken = self._answer(mutator, reads)
            if broken:
                self._end()
            for _, _, blocks, posted in reads:
                self._hear(posted)
                self._consumer.target[blocks] = GUARD
            assert (self._consumer.target == GUARD).all(), "a byte was written beside what was read into"
            if broken:
                return
        self._end()

    def _answer(self, mutator, reads):
        """Answer reads, and tell whether the protocol was broken."""
        if self._connection is None and self._dialed(mutator):
            return True
        asked = deque((nbytes, epochs, posted) for nbytes, epochs, _, posted in reads)
        while asked:
            nbytes, epochs, posted = asked.popleft()
            answer, broken = mutated_answer(mutator, nbytes, epochs)
            self._found.answers += 1
            with suppress(ChannelClosed):
                self._connection.say(answer)
            if broken:
                return True
            if len(epochs) > 1 and answer[0] == wire.REFUSED:
                self._until_asked_alone(posted)
                asked += [(2 * BLOCK_BYTES, epochs[:1], posted), (nbytes - 2 * BLOCK_BYTES, epochs[1:], posted)]
        return False

    def _until_asked_alone(self, posted):
        """Drive the consumer until it has asked for both leases of a read alone."""
        until = time.monotonic() + PATIENCE_MS / 1e3
        while posted.missing < 2:
            assert time.monotonic() < until, "it does not ask again"
            self._consumer.backend.progress()

    def be_honest(self):
        """Answer one read as an honest exporter does."""
        draw = Mutator("honest").draw
        nbytes, epochs, blocks, posted = self._post(draw)
        if self._connection is None:
            self._connection = self._exporter.open()
        told = b"".join(map(wire.EPOCH_VALUE.pack, epochs))
        self._connection.say(wire.ANSWER.pack(wire.DONE, 0, len(epochs), 0, nbytes) + bytes(nbytes) + told)
        assert self._consumer.wait(posted) == 0
        assert not self._consumer.target[blocks].any()
        self._end()

    def _dialed(self, mutator):
        """Accept a connection, and tell whether the protocol was broken at once."""
        self._connection = self._exporter.accept()
        self._found.connections += 1
        if mutator.draw.random() < 0.9:
            self._exporter.prove(self._connection)
            return False
        greeting = wire.greeting(b"t" * wire.NONCE_BYTES) + mutator.draw.randbytes(wire.WELCOME_BYTES)
        with suppress(ChannelClosed):
            self._connection.say(mutator.of_bytes(greeting, greeting))
        self._found.answers += 1
        return True

    def _post(self, draw):
        count = draw.choice((1, 2, 5, 20))
        blocks = draw.sample(range(64), count)
        leases = [(3, EPOCH + 7, count)] if count < 3 else [(3, EPOCH + 7, 2), (4, EPOCH + 9, count - 2)]
        read = self._consumer.read(self._peer, blocks, blocks, leases)
        return read.nbytes, [epoch for _, epoch, _ in leases], blocks, self._consumer.post(read)

    def _hear(self, posted):
        try:
            self._consumer.wait(posted)
            self._found.said["bounds" if posted.refused else "done"] += 1
        except BackendError as failed:
            self._found.said[failed.reason.code] += 1

    def _end(self):
        """Close the connection, and have the consumer forget what it asked."""
        self._connection.close()
        self._connection = None
        self._consumer.backend.leave(self._peer)
