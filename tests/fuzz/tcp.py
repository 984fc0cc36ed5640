"""The TCP data plane: readers that lie to an exporter, beside an honest one; and exporters that lie to a reader."""

import asyncio
import base64
import threading
import time
from collections import Counter
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct

from kvflow.reads.backend import BackendError
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.stream import ChannelClosed
from tests.unit.kvflow.reads.tcp.peers import ScriptedExporter, certificate_of, frame, piece

from .mutations import Mutator
from .processes import WARM, Died, apart, asked, attacked
from .tcp_attacker import tcp_attacking
from .tcp_ends import STRETCHES, Consumer, Line
from .tcp_frames import Served, mutated_answer
from .tcp_served import tcp_exporting

BETWEEN_HONEST_S = 0.02
HONEST_BLOCKS_MAX = 16
ROUNDS_MAX = 20

BLOCK_BYTES = 512
GUARD = 0xA5
"""What is around the blocks that are read into."""


class Exported(Struct):
    """What came of an attack on an exporter."""

    frames: int = 0  # that the attackers said, most of them valid but strange
    answered: int = 0  # of these, answers that the attackers heard
    requests: int = 0  # that the exporter decoded, or refused to
    invalid: int = 0  # those that it refused, hellos included
    conversations: int = 0  # connections of the attackers
    turned_away: int = 0  # those with a wrong hello
    seconds: float = 0.0  # that it took
    honest: list[float] = []  # seconds of each honest read meanwhile
    warm: dict[str, int] = {}  # what the exporter's process had after the first fifth: ``rss``, ``files``, ``threads``
    end: dict[str, int] = {}  # at the end, with all attackers gone


async def counts(node):
    """Ask an exporter for what it has counted.

    Raises:
        Died: it has ended, or has logged a defect.
    """
    said = await asked(node.counts())
    if said.pop("defects"):
        raise Died(str(said))
    return said


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
            peer = consumer.join(served)
            while not self._stopping.wait(BETWEEN_HONEST_S):
                group, count = int(draw.integers(2)), int(draw.integers(1, HONEST_BLOCKS_MAX))
                source, target = draw.integers(0, served.leased, count), draw.permutation(served.blocks)[:count]
                begun_at = time.monotonic()
                posted, portion = consumer.post_blocks(peer, group, (0, served.epochs[0]), source, target)
                consumer.wait(posted)
                self.seconds.append(time.monotonic() - begun_at)
                assert consumer.fence(peer, 0, portion) == served.epochs[0], "a lease that lasts"
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
    found = Exported()
    async with apart(tcp_exporting, encryption) as node:
        served = msgspec.convert(await asked(node.served()), Served)
        cache = np.frombuffer(base64.b64decode(await asked(node.content())), np.uint8)

        async def warm():
            found.warm = await counts(node)

        begun_at = time.monotonic()
        honest = Honest(served, cache.reshape(2, served.blocks, served.block_bytes))
        try:
            attacking = (tcp_attacking, served, seed)
            told = await attacked(node, attacking, frames, first, warm=warm, tell=tell)
        finally:
            await asyncio.to_thread(honest.stop)
        found.seconds, found.end = time.monotonic() - begun_at, await counts(node)
    if honest.failed is not None:
        raise Died(f"an honest read failed: {honest.failed!r}")
    found.honest = sorted(honest.seconds)
    found.requests, found.invalid = found.end["requests"], found.end["invalid"]
    found.frames = told["said"]
    for name in ("answered", "conversations", "turned_away"):
        setattr(found, name, told[name])
    return found


class Lied(Struct):
    """What came of exporters that lie."""

    answers: int = 0  # that they said, most of them valid but strange
    said: Counter[str] = Counter()  # how many reads ended how
    connections: int = 0  # that were dialed
    seconds: float = 0.0  # that it took
    rss_warm: int = 0  # resident bytes of this process after the first fifth
    rss_end: int = 0  # at the end


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
        self._consumer = Consumer(blocks=BLOCKS, block_bytes=BLOCK_BYTES, encryption=encryption, connections=1)
        cache = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "stretches": STRETCHES}
        self._exporter = exporter = ScriptedExporter(self._consumer, **cache)
        certificate, layout = certificate_of(exporter.identity), wire.encode_layout(exporter.serving.tracks)
        addresses = tuple(each.ctypes.data for each in exporter.cache)
        epochs = (LEASE[1], LEASE[1])
        who = (certificate, layout, addresses, BLOCK_BYTES, BLOCKS, BLOCKS, epochs)
        self._peer = self._consumer.join(Served(exporter.endpoint, encryption, *who))
        self._line = self._accept()
        self._consumer.target[:] = GUARD

    def _accept(self):
        """Wait for the next connection, which has opened."""
        self._found.connections += 1
        return Line(self._exporter.open().stream, self._consumer.backend.progress)

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
        self._line.say(piece(bytes(nbytes)), frame(wire.DONE, LEASE[1]))
        self._consumer.wait(posted)
        assert not posted.refused
        assert not self._consumer.target[blocks].any()
        self._end()

    def close(self):
        self._exporter.close()
        self._consumer.close()

    def _post(self, draw):
        blocks = draw.sample(range(BLOCKS), draw.choice((1, 2, 5, 20)))
        posted, _ = self._consumer.post_blocks(self._peer, 0, LEASE, blocks, blocks)
        return BLOCK_BYTES * len(blocks), blocks, posted

    def _hear(self, posted):
        try:
            self._consumer.wait(posted)
            self._found.said["bounds" if posted.refused else "unheld" if posted.unheld else "done"] += 1
        except BackendError as failed:
            self._found.said[failed.reason.code] += 1

    def _end(self):
        """Close the connection, and have the consumer forget what it asked."""
        self._exporter.hang_up()
        self._line = None
        self._consumer.backend.leave(self._peer)
