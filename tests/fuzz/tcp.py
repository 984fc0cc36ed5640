"""The TCP data plane: readers that lie to an exporter, beside an honest one; and exporters that lie to a reader."""

import asyncio
import json
import multiprocessing
import select
import threading
import time
from collections import Counter, deque
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct

from kvflow.reads.backend import BackendError, Envelope, encode_envelope
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.access import Access
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.stream import ChannelClosed
from tests.helpers.lines import wait_for

from .mutations import Mutator
from .processes import PATIENCE_S, START_PATIENCE_S, Died, start
from .tcp_ends import Consumer, Leases, Line, settings
from .tcp_frames import Served, head, mutated_answer

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
        consumer = Consumer("honest", served.blocks, served.block_bytes, served.encryption)
        draw = np.random.default_rng(1)
        try:
            peer = consumer.add(served)
            while not self._stopping.wait(BETWEEN_HONEST_S):
                group, count = int(draw.integers(2)), int(draw.integers(1, HONEST_BLOCKS_MAX))
                source, target = draw.integers(0, served.leased, count), draw.permutation(served.blocks)[:count]
                begun_at = time.monotonic()
                lease = (0, served.epochs[0], count)
                posted, shares = consumer.post(peer, group, [lease], source, target)
                consumer.wait(posted)
                self.seconds.append(time.monotonic() - begun_at)
                assert consumer.fence(peer, shares) == served.epochs[0], "a lease that lasts"
                assert (consumer.target[target] == self._cache[group, source]).all(), "a wrong byte"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.failed = error
        finally:
            consumer.backend.close()


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
    found.invalid = found.end["invalid"]
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
    liar = _Liar(encryption, found)
    try:
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
        liar.close()
    found.seconds, found.rss_end = time.monotonic() - begun_at, rss()
    return found


BLOCKS = 64
LEASE = (3, 1 << 40)


class _Liar:
    """An exporter that a consumer dials again and again."""

    def __init__(self, encryption, found):
        self._found = found
        self._members = deque()
        leases, identity = Leases(BLOCKS, BLOCK_BYTES), draw_identity() if encryption == "tls" else None
        self._consumer = Consumer("lied to", BLOCKS, BLOCK_BYTES, encryption, connections=1)
        self._came = select.poll()
        self._bell, self._ring = multiprocessing.Pipe(duplex=False)
        self._came.register(self._bell, select.POLLIN)
        self._access = Access(settings(encryption), leases.serving, identity, self._admit)
        self._access.start()
        served = Served(
            self._access.endpoint,
            encryption,
            b"" if identity is None else identity.certificate,
            encode_envelope(Envelope("tcp", "producer", wire.encode_layout(leases.serving.tracks))),
            tuple(each.ctypes.data for each in leases.cache),
            BLOCK_BYTES,
            BLOCKS,
            BLOCKS,
            (LEASE[1], LEASE[1]),
        )
        self._peer = self._consumer.add(served)
        self._line = self._accept()
        self._consumer.target[:] = GUARD

    def _admit(self, member):
        """Note who has come. Thread: of the access."""
        self._members.append(member)
        self._ring.send(None)

    def _accept(self):
        """Wait for the next connection, which has opened."""
        wait_for(self._came, self._consumer.backend.progress)
        self._bell.recv()
        self._found.connections += 1
        self._member = self._members.popleft()
        return Line(self._member.stream, self._consumer.backend.progress)

    def converse(self, mutator):
        """Have the consumer read, until an answer breaks the protocol."""
        for _ in range(ROUNDS_MAX):
            reads = [self._post(mutator.draw) for _ in range(mutator.draw.choice((1, 1, 2, 4)))]
            self._line = self._line or self._accept()
            broken = self._answer(mutator, [nbytes for nbytes, _, _ in reads])
            if broken:
                self._end()
            for _, blocks, posted in reads:
                self._hear(posted)
                self._consumer.target[blocks] = GUARD
            assert (self._consumer.target == GUARD).all(), "a byte was written beside what was read into"
            if broken:
                return
        self._end()

    def _answer(self, mutator, reads):
        """Answer reads of so many bytes, and tell whether the protocol was broken."""
        for nbytes in reads:
            answer, broken = mutated_answer(mutator, nbytes, LEASE[1])
            self._found.answers += 1
            with suppress(ChannelClosed):
                self._line.say(answer)
            if broken:
                return True
        return False

    def be_honest(self):
        """Answer one read as an honest exporter does."""
        nbytes, blocks, posted = self._post(Mutator("honest").draw)
        self._line = self._line or self._accept()
        self._line.say(head(wire.PIECE, nbytes), bytes(nbytes), head(wire.DONE, LEASE[1]))
        self._consumer.wait(posted)
        assert not posted.refused
        assert not self._consumer.target[blocks].any()
        self._end()

    def close(self):
        self._access.close()
        self._consumer.backend.close()

    def _post(self, draw):
        blocks = draw.sample(range(BLOCKS), draw.choice((1, 2, 5, 20)))
        posted, _ = self._consumer.post(self._peer, 0, [(*LEASE, len(blocks))], blocks, blocks)
        return BLOCK_BYTES * len(blocks), blocks, posted

    def _hear(self, posted):
        try:
            self._consumer.wait(posted)
            self._found.said["bounds" if posted.refused else "unheld" if posted.unheld else "done"] += 1
        except BackendError as failed:
            self._found.said[failed.reason.code] += 1

    def _end(self):
        """Close the connection, and have the consumer forget what it asked."""
        self._member.account.leave()
        self._member.stream.close(reset=True)
        self._line = None
        self._consumer.backend.leave(self._peer)
