"""What a hostile reader says to the TCP data plane: valid but strange for a while, then not."""

import numpy as np
from msgspec import Struct
from tests.unit.kvflow.reads.tcp01.peers import SLOTS, credentials, read_frame

from kvflow.reads.tcp01 import wire

from .mutations import NUMBERS, Mutator

FRAMES_MAX = 100
"""Of one conversation that break nothing."""

MEMBER = credentials(name="hostile")
GROUPS = (0, 0, 0, 1, 1, 2, 65535)


class Served(Struct, frozen=True):
    """What a reader knows of the exporter.

    Attributes:
        endpoint: where it listens.
        encryption: of its connections.
        addresses: of each group's cache.
        block_bytes: of both groups.
        blocks: of both groups.
        leased: blocks that are leased all the time, in each group.
        epochs: of slots 0 and 1, which have these leases; others come and go.
    """

    endpoint: str
    encryption: str
    addresses: tuple[int, int]
    block_bytes: int
    blocks: int
    leased: int
    epochs: tuple[int, int]

    def rows(self, group):
        """Return the rows of a group that make sense."""
        return np.array([[self.addresses[group], self.block_bytes, 0, self.block_bytes, self.blocks]])


class Talk(Struct):
    """One conversation.

    Attributes:
        pass_key: what the pass is made with; the right one, mostly.
        hello: changes the hello.
        frames: that break nothing, and whether each has an answer.
        last: what breaks the protocol, mostly.
        end: ``hear`` to the end, ``reset``, or ``deaf``: ask, and hear nothing.
    """

    number: int
    member: bool
    frames: list[tuple[bytes, bool]]
    last: bytes
    end: str

    def hello(self, honest):
        """Return what is said for a hello."""
        if self.member:
            return honest
        return Mutator(f"hello/{self.number}").of_bytes(honest, honest)


def talk(seed, number, served):
    """Draw a conversation."""
    mutator = Mutator(f"{seed}/tcp/{number}")
    draw = mutator.draw
    drawn = _Frames(draw, served)
    frames = [drawn.frame() for _ in range(draw.randrange(1, FRAMES_MAX))]
    some = [draw.choice(frames)[0] for _ in range(2)]
    kind = draw.random()
    if kind < 0.7:
        last = mutator.of_bytes(*some)
    elif kind < 0.85:
        last = b"".join(draw.choice(frames)[0] for _ in range(3)) + draw.randbytes(draw.choice((1, 15, 16, 17, 500)))
    else:
        last = some[0][: draw.randrange(len(some[0]))]
    end = draw.choices(("hear", "reset", "deaf"), (90, 5, 5))[0]
    return Talk(number, draw.random() < 0.85, frames, last, end)


class _Frames:
    """Draws frames of one connection."""

    def __init__(self, draw, served):
        self._draw = draw
        self._served = served
        self._prepared_lists = 2  # that every conversation begins with: 0 and 1 make sense

    def frame(self):
        kind = self._draw.random()
        if kind < 0.1:
            return self._epoch(), True
        if kind < 0.2:
            return self._list(), False
        return self._read(), True

    def _epoch(self):
        return wire.encode_epoch(self._draw.choice((*range(SLOTS), SLOTS, 2**31, 2**32 - 1)))

    def _list(self):
        draw = self._draw
        rows = np.repeat(self._served.rows(draw.randrange(2)), draw.choice((1, 1, 1, 2, 5, 300)), axis=0)
        for _ in range(draw.choice((0, 1, 1, 2))):
            at = draw.randrange(len(rows)), draw.randrange(5)
            old = int(rows[at])
            near = (old + 1, old - 1, old * 2, old // 2, -old, old + self._served.block_bytes)
            rows[at] = _int64(draw.choice((*near, *NUMBERS)))
        number = self._prepared_lists
        self._prepared_lists += 1
        return wire.encode_list(number, draw.choice(GROUPS), rows)

    def _read(self):
        draw, served = self._draw, self._served
        number = draw.choice((0, 0, 0, 1, 1, draw.randrange(self._prepared_lists), self._prepared_lists, 2**32 - 1))
        leases = [self._lease() for _ in range(draw.choice((1, 1, 1, 2, 2, 5, 40)))]
        if draw.random() < 0.01:
            leases *= 1024 // len(leases)
        count = draw.choice((1, 2, 5, 40)) if draw.random() < 0.99 else draw.choice((2000, wire.DESCRIPTORS_MAX))
        blocks = [draw.randrange(served.leased) for _ in range(min(count, 40))]
        if draw.random() < 0.3:
            blocks[draw.randrange(len(blocks))] = draw.choice(
                (-1, served.leased, served.blocks - 1, served.blocks, 2**31 - 1)
            )
        if count > len(blocks):
            blocks = np.resize(blocks, count)
        owners = None
        if len(leases) > 1:
            owners = np.resize([draw.randrange(len(leases)) for _ in range(min(count, 40))], count)
        return read_frame(number, leases, blocks, owners)

    def _lease(self):
        draw, (first, second) = self._draw, self._served.epochs
        known = ((0, first), (1, second))
        if draw.random() < 0.7:
            return draw.choice(known)
        slot = draw.choice((*range(SLOTS), SLOTS, 2**32 - 1))
        return slot, draw.choice((first, second, first + 1, max(first - 1, 0), *NUMBERS))


def _int64(number):
    return (number + 2**63) % 2**64 - 2**63


def mutated_answer(mutator, nbytes, epochs):
    """Draw what a hostile exporter answers to a read; and whether it is an answer that breaks nothing.

    Args:
        nbytes: that were asked for.
        epochs: of the leases.
    """
    draw = mutator.draw
    values = [draw.choice((epoch, epoch, epoch, epoch + 1, epoch - 1, *NUMBERS)) % 2**64 for epoch in epochs]
    told = b"".join(wire.EPOCH_VALUE.pack(value) for value in values)
    kind = draw.random()
    if kind < 0.55:
        answer = wire.ANSWER.pack(wire.DONE, 0, len(epochs), 0, nbytes) + draw.randbytes(nbytes) + told
        broken = False
    elif kind < 0.8:
        detail = draw.randbytes(draw.choice((1, 20, wire.DETAIL_BYTES_MAX)))
        answer = wire.ANSWER.pack(wire.REFUSED, draw.choice((0, 0)), draw.choice((0, 9)), 0, len(detail)) + detail
        broken = False
    else:
        answer = wire.ANSWER.pack(wire.NOT_HELD, 0, len(epochs), 0, 0) + told
        broken = any(value == epoch for value, epoch in zip(values, epochs, strict=True))
    if draw.random() < 0.1:
        return mutator.of_bytes(answer, answer), True
    return answer, broken
