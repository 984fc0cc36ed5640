"""A reader that lies, in a process of its own: many short conversations with one exporter of the TCP data plane.

Arguments: what is served, the seed, the first conversation and the step to the next, and how many frames to send.
Every line on standard output is a report, the last one included. Conversation ``i`` is drawn from ``seed/tcp/i``.
"""

import hashlib
import json
import secrets
import socket
import sys
import time
from contextlib import suppress

import msgspec

from kvflow.addresses import place_of
from kvflow.ids import ReaderId
from kvflow.reads.tcp import opening, wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.stream import ChannelClosed

from .tcp_ends import INCARNATION, PATIENCE_S, PUBLIC_KEY, credentials, open_line
from .tcp_frames import Served, talk
from .tcp_served import SECRET_BYTE

AT_ONCE = 16
REPORT_S = 1.0


class Attack:
    """The conversations of one process.

    Attributes:
        told: frames that were said; those that were answered; conversations, of which some were not let in.
    """

    def __init__(self, served, seed):
        self._served = served
        self._seed = seed
        self._identity = draw_identity() if served.encryption == "tls" else None
        self.told = {"frames": 0, "answered": 0, "refused": 0, "conversations": 0, "turned_away": 0, "under_way": 0}

    def hold(self, number):
        """Hold one conversation.

        Raises:
            AssertionError: it was answered something that it should not have been.
        """
        said = talk(self._seed, number, self._served)
        self.told["under_way"] = number
        with suppress(ChannelClosed, OSError):  # it may be closed at any time, and some of what we say is unheard
            if said.member:
                line = open_line(self._served, "hostile", self._identity)
                try:
                    self._speak(line, said)
                finally:
                    line.stream.close(reset=True)
            else:
                self._knock(said)
        self.told["conversations"] += 1

    def _knock(self, said):
        """Say a hello with something wrong in it."""
        certificate = b"" if self._identity is None else self._identity.certificate
        who = credentials("hostile", certificate, self._served.certificate)
        reader = msgspec.msgpack.encode(ReaderId(PUBLIC_KEY, "hostile", 0, INCARNATION, certificate))
        with socket.create_connection(place_of(self._served.endpoint), PATIENCE_S) as sock:
            greeting = sock.recv(opening.GREETING_BYTES, socket.MSG_WAITALL)
            nonces = greeting[-opening.NONCE_BYTES :], secrets.token_bytes(opening.NONCE_BYTES)
            proof = opening.proof_of(who.pass_, "reader", nonces, who.certificate)
            digest = hashlib.sha256(reader).digest()
            honest = b"".join((nonces[1], digest, proof, len(reader).to_bytes(2, "little"), reader))
            hello = said.hello(honest)
            self.told["frames"] += 1
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
            self.told["frames"] += len(part)
        self.told["frames"] += 1
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

    def run(self, numbers, goal):
        reported_at = 0.0
        for number in numbers:
            self.hold(number)
            if time.monotonic() - reported_at > REPORT_S:
                self.report()
                reported_at = time.monotonic()
            if self.told["frames"] >= goal:
                break
        self.report()

    def report(self):
        sys.stdout.write(json.dumps(self.told) + "\n")
        sys.stdout.flush()


def main(served, seed, *numbers):
    first, step, goal = map(int, numbers)
    Attack(msgspec.json.decode(served, type=Served), seed).run(range(first, 1 << 62, step), goal)


if __name__ == "__main__":
    main(*sys.argv[1:])
