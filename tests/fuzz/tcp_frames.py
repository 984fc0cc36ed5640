"""What a hostile reader says to the TCP data plane: valid but strange for a while, then not."""

import numpy as np
from msgspec import Struct

from kvflow.reads.tcp import wire
from tests.unit.kvflow.reads.tcp.peers import SLOTS, frame

from .mutations import NUMBERS, Mutator
from .tcp_ends import MAC, STRETCHES

FRAMES_MAX = 100
"""Of one conversation that break nothing."""

GROUPS = (0, 0, 0, 1, 1, 1, 2, 65535)
SHOWN = (*range(SLOTS), SLOTS, 2**32 - 1)
"""Slots of which a conversation shows a lease before it begins."""


class Served(Struct, frozen=True):
    """What a reader knows of the exporter."""

    endpoint: str  # where it listens
    encryption: str  # of its connections
    certificate: bytes  # with which it encrypts; empty without encryption
    layout: bytes  # that it publishes
    addresses: tuple[int, int]  # of each group's cache
    block_bytes: int  # of both groups
    blocks: int  # of both groups
    leased: int  # blocks that are leased all the time, in each group
    epochs: tuple[int, int]  # of slots 0 and 1, which have these leases; others come and go


class Talk(Struct):
    """One conversation."""

    number: int  # of it
    member: bool  # whether the hello is right
    shown: bytes  # frames that show leases
    frames: list[tuple[bytes, bool]]  # that break nothing, and whether each has an answer
    last: bytes  # what breaks the protocol, mostly
    end: str  # ``hear`` to the end, ``reset``, or ``deaf``: ask, and hear nothing

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
    leases, shown = drawn.shown()
    frames = [drawn.frame(leases) for _ in range(draw.randrange(1, FRAMES_MAX))]
    some = [draw.choice(frames)[0] for _ in range(2)]
    kind = draw.random()
    if kind < 0.7:
        last = mutator.of_bytes(*some)
    elif kind < 0.85:
        last = b"".join(draw.choice(frames)[0] for _ in range(3)) + draw.randbytes(draw.choice((1, 15, 16, 17, 500)))
    else:
        last = some[0][: draw.randrange(len(some[0]))]
    end = draw.choices(("hear", "reset", "deaf"), (90, 5, 5))[0]
    return Talk(number, draw.random() < 0.85, shown, frames, last, end)


class _Frames:
    """Draws frames of one connection."""

    def __init__(self, draw, served):
        self._draw = draw
        self._served = served

    def shown(self):
        """Return the leases that a conversation may name, and the frames that show them."""
        first, second = self._served.epochs
        leases = [(0, first), (1, second)]
        leases += [(slot, first + self._draw.choice((-1, 0, 1, 2, 1000))) for slot in SHOWN[2:]]
        return leases, b"".join(wire.encode_lease(*lease, MAC) for lease in leases)

    def frame(self, leases):
        kind = self._draw.random()
        if kind < 0.1:
            return wire.encode_epoch(self._draw.choice((*SHOWN, 2**31))), True
        if kind < 0.2:  # again, or another one
            slot, epoch = self._draw.choice(leases)
            return wire.encode_lease(slot, self._draw.choice((epoch, *NUMBERS)) % 2**64, MAC), False
        return self._read(leases), True

    def _read(self, leases):
        draw = self._draw
        count = draw.choice((1, 1, 2, 5, 33, 40)) if draw.random() < 0.99 else draw.choice((2000, wire.RUNS_MAX))
        runs = [self._run() for _ in range(min(count, 40))]
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            run, at = draw.choice(runs), draw.randrange(7)
            near = (run[at] + 1, run[at] - 1, run[at] * 2, -run[at], run[at] + self._served.block_bytes)
            run[at] = _int64(draw.choice((*near, *NUMBERS)))
        if count > len(runs):
            runs = np.resize(np.array(runs), (count, 7))
        lease = draw.choice((leases[0], leases[0], leases[1], draw.choice(leases)))
        return wire.encode_read(draw.choice(GROUPS), *lease, runs)

    def _run(self):
        draw, served = self._draw, self._served
        first = draw.randrange(served.leased)
        count = draw.choice((1, 1, 2, served.leased - first))
        if draw.random() < 0.1:
            first = draw.choice((served.leased, served.blocks - 1))
        half = served.block_bytes // STRETCHES
        times = draw.choice((1, 1, 1, 2, 4))
        nbytes = draw.choice((1, 7, 64, half // times))
        stride = draw.choice((nbytes, half // times)) if times > 1 else 0
        offset = draw.choice((0, half - nbytes - stride * (times - 1)))
        return [draw.randrange(STRETCHES), first, count, offset, nbytes, stride, times]


def _int64(number):
    return (number + 2**63) % 2**64 - 2**63


def mutated_answer(mutator, nbytes, epoch):
    """Draw what a hostile exporter answers to a read of so many bytes, and whether that breaks the protocol."""
    draw = mutator.draw
    value = draw.choice((epoch, epoch, epoch + 1, epoch - 1, *NUMBERS)) % 2**64
    cut = draw.choice((nbytes, nbytes, draw.randrange(1, nbytes + 1)))
    pieces = [frame(wire.PIECE, part) + draw.randbytes(part) for part in (cut, nbytes - cut) if part]
    kind = draw.random()
    if kind < 0.5:
        answer, broken = b"".join(pieces) + frame(wire.DONE, epoch), False
    elif kind < 0.7:
        answer, broken = b"".join(pieces[: draw.randrange(3)]) + frame(wire.ENDED, value), value == epoch
    elif kind < 0.9:
        detail = draw.randbytes(draw.choice((1, 20, wire.DETAIL_BYTES_MAX)))
        answer, broken = frame(wire.REFUSED, len(detail)) + detail, False
    else:  # of a wrong size, or a wrong end
        number = draw.choice((0, nbytes + 1, wire.PIECE_BYTES_MAX + 1, *NUMBERS)) % 2**64
        answer = draw.choice((frame(wire.PIECE, number), frame(wire.DONE, value), pieces[0] + frame(wire.REFUSED, 1)))
        return answer, True
    if draw.random() < 0.1:
        return mutator.of_bytes(answer, answer), True
    return answer, broken
