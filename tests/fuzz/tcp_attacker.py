"""A reader that lies, in a process of its own: many short conversations with one exporter of the TCP data plane.

Conversation ``i`` is drawn from ``seed/tcp/i``.
"""

import asyncio
import hashlib
import secrets
import socket
from contextlib import contextmanager, suppress
from itertools import count

import msgspec

from kvflow.addresses import place_of
from kvflow.ids import ReaderId
from kvflow.reads.tcp import opening, wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.stream import ChannelClosed
from tests.helpers.waiting import PATIENCE_S
from tests.unit.kvflow.reads.tcp.peers import certificate_of, credentials

from .tcp_ends import open_line
from .tcp_frames import Served, talk
from .tcp_served import SECRET_BYTE

AT_ONCE = 16


class Attack:
    """The conversations of one process.

    Attributes:
        told: frames that were said; those that were answered; conversations, of which some were not let in.
    """

    def __init__(self, served, seed, numbers):
        self._numbers = numbers
        self._served = served
        self._seed = seed
        self._identity = draw_identity() if served.encryption == "tls" else None
        self.told = {"said": 0, "answered": 0, "refused": 0, "conversations": 0, "turned_away": 0, "under_way": 0}

    def hold(self, number):
        """Hold one conversation.

        Raises:
            AssertionError: it was answered something that it should not have been.
        """
        said = talk(self._seed, number, self._served)
        self.told["under_way"] = number
        with suppress(ChannelClosed, OSError):  # it may be closed at any time, and some of what we say is unheard
            if said.member:
                line = open_line(self._served, self._identity)
                try:
                    self._speak(line, said)
                finally:
                    line.stream.close(reset=True)
            else:
                self._knock(said)
        self.told["conversations"] += 1

    def _knock(self, said):
        """Say a hello with something wrong in it."""
        certificate = certificate_of(self._identity)
        who = credentials(name="hostile", ours=certificate, theirs=self._served.certificate)
        reader = msgspec.msgpack.encode(ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, certificate))
        with socket.create_connection(place_of(self._served.endpoint), PATIENCE_S) as sock:
            greeting = sock.recv(opening.GREETING_BYTES, socket.MSG_WAITALL)
            nonces = greeting[-opening.NONCE_BYTES :], secrets.token_bytes(opening.NONCE_BYTES)
            proof = opening.proof_of(who.pass_, "reader", nonces, who.certificate)
            digest = hashlib.sha256(reader).digest()
            honest = b"".join((nonces[1], digest, proof, len(reader).to_bytes(2, "little"), reader))
            hello = said.hello(honest)
            self.told["said"] += 1
            sock.sendall(hello)
            if hello.startswith(honest):
                return
            sock.shutdown(socket.SHUT_WR)
            heard = b""
            with suppress(ConnectionError):
                while part := sock.recv(1 << 16):
                    heard += part
            assert heard in {b"", opening.REJECTION}, "a stranger was let in"
            self.told["turned_away"] += 1

    def _speak(self, line, said):
        line.say(said.shown)
        for first in range(0, len(said.frames), AT_ONCE):
            part = said.frames[first : first + AT_ONCE]
            line.say(*[frame for frame, _ in part])
            if said.end == "deaf" and first:
                return  # with a reset, as there is something unheard
            for _ in range(sum(answered for _, answered in part)):
                self._hear(line)
            self.told["said"] += len(part)
        self.told["said"] += 1
        line.say(said.last)
        if said.end == "hear":
            line.hang_up()
            line.hear_all()

    def _hear(self, line):
        while True:
            kind, _, _, _, number = wire.ANSWER.unpack(line.hear(wire.ANSWER.size))
            assert kind in {wire.PIECE, wire.DONE, wire.ENDED, wire.REFUSED}, f"an answer of kind {kind}"
            if kind == wire.PIECE:
                assert SECRET_BYTE not in line.hear(number), "a block that nobody leased was sent"
                continue
            if kind == wire.REFUSED:
                line.hear(number)
                self.told["refused"] += 1
            self.told["answered"] += 1
            return

    def tell(self):
        """Return what was said so far."""
        return self.told

    async def run(self, goal):
        """Say so many frames."""
        await asyncio.to_thread(self._run, goal)

    def _run(self, goal):
        while self.told["said"] < goal:
            self.hold(next(self._numbers))


@contextmanager
def tcp_attacking(served: Served, seed, first, step):
    """Open one, whose conversations have these numbers."""
    yield Attack(served, seed, count(first, step))
