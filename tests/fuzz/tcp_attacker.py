"""A reader that lies, in a process of its own: many short conversations with one exporter of the TCP data plane.

Arguments: what is served, the seed, the first conversation and the step to the next, and how many frames to send.
Every line on standard output is a report, the last one included. Conversation ``i`` is drawn from ``seed/tcp/i``.
"""

import json
import socket
import sys
import time
from contextlib import suppress

import msgspec
from tests.unit.kvflow.reads.tcp01.peers import PATIENCE_MS, Reader

from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.channel import ChannelClosed

from .tcp_frames import MEMBER, Served, talk
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
        host, port = served.endpoint.removeprefix("tcp://").split(":")
        self._address = (host, int(port))
        self.told = {"frames": 0, "answered": 0, "refused": 0, "conversations": 0, "turned_away": 0, "under_way": 0}

    def hold(self, number):
        """Hold one conversation.

        Raises:
            AssertionError: it was answered something that it should not have been.
        """
        said = talk(self._seed, number, self._served)
        self.told["under_way"] = number
        with socket.create_connection(self._address, PATIENCE_MS / 1e3) as sock:
            sock.settimeout(PATIENCE_MS / 1e3)
            with suppress(ChannelClosed, OSError):  # it may be closed at any time, and some of what we say is unheard
                reader = Reader(sock, encrypted=self._served.encryption == "tls")
                self._speak(reader, sock, said)
        self.told["conversations"] += 1

    def _speak(self, reader, sock, said):
        theirs = wire.nonce_of(reader.hear(wire.GREETING_BYTES))
        ours = b"n" * wire.NONCE_BYTES
        honest = wire.encode_hello(MEMBER, theirs, ours, reader.channel.binding())
        hello = said.hello(honest)
        self.told["frames"] += 1
        reader.say(hello)
        if hello != honest:
            sock.shutdown(socket.SHUT_WR)
            heard = reader.hear_all()
            assert heard in {b"", bytes(wire.WELCOME_BYTES)} or hello.startswith(honest), "a stranger was let in"
            self.told["turned_away"] += 1
            return
        reader.hear(wire.WELCOME_BYTES)
        reader.say(*[wire.encode_list(group, group, self._served.rows(group)) for group in (0, 1)])
        for first in range(0, len(said.frames), AT_ONCE):
            part = said.frames[first : first + AT_ONCE]
            reader.say(*[frame for frame, _ in part])
            if said.end == "deaf" and first:
                return  # with a reset, as there is something unheard
            for _ in range(sum(answered for _, answered in part)):
                self._hear(reader)
            self.told["frames"] += len(part)
        self.told["frames"] += 1
        reader.say(said.last)
        if said.end == "hear":
            sock.shutdown(socket.SHUT_WR)
            reader.hear_all()
        else:
            reader.close()

    def _hear(self, reader):
        status, data, _ = reader.answer()
        assert status in {wire.DONE, wire.NOT_HELD, wire.REFUSED}, f"an answer of kind {status}"
        if status == wire.DONE:
            assert len(data) == wire.EPOCH_VALUE.size or SECRET_BYTE not in data, "a block that nobody leased was sent"
        self.told["answered"] += 1
        self.told["refused"] += status == wire.REFUSED

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
