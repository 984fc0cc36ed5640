"""A connection of the TCP data plane, on which a test says and hears bytes by hand."""

import select
import time
from contextlib import suppress

from kvflow.reads.tcp.stream import ChannelClosed

from .waiting import PATIENCE_S


class Line:
    """A stream on which bytes are said and heard, and which waits for them.

    Args:
        stream: of a connection that has opened.
        pump: drives the other end meanwhile, if it has no thread of its own.
    """

    SAYING = select.POLLOUT
    """Events after which more may be said."""

    def __init__(self, stream, pump=None):
        self.stream = stream
        self._pump = pump
        self._poll = select.poll()

    def say(self, *frames):
        """Send all of it."""
        left = memoryview(b"".join(frames))
        while left:
            count = self.stream.write(left)
            left = left[count:]
            if not count:
                self._wait(self.SAYING)

    def hear(self, nbytes):
        """Receive exactly so many bytes."""
        heard = bytearray(nbytes)
        left = memoryview(heard)
        while left:
            count = self.stream.read(left)
            left = left[count:]
            if not count:
                self._wait(select.POLLIN)
        return bytes(heard)

    def hear_all(self):
        """Receive everything until the other end has closed the connection."""
        heard, part = bytearray(), memoryview(bytearray(1 << 16))
        with suppress(ChannelClosed):
            while True:
                if count := self.stream.read(part):
                    heard += part[:count]
                else:
                    self._wait(select.POLLIN)
        return bytes(heard)

    def _wait(self, events):
        self._poll.register(self.stream.fileno(), events)
        wait_for(self._poll, self._pump)


def wait_for(poll, pump):
    """Wait for an event, and meanwhile let ``pump`` drive the other end, if it has no thread of its own."""
    until = time.monotonic() + PATIENCE_S
    while not poll.poll(PATIENCE_S * 1e3 if pump is None else 1):
        assert pump is not None, "the other end does not go on"
        assert time.monotonic() < until, "the other end does not go on"
        pump()
