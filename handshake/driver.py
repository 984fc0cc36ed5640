"""Drive one connection on an event loop: send what it says, report what happened, keep its deadlines.

A driver's owner ends it with ``lost``. Events are reported in order, one at a time, and never within a call of the
program above: what a call causes is reported in the loop's next iteration. Time is the network's: uvloop's clock counts
whole milliseconds, and a round trip takes less.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from handshake.connection import Conversation
from handshake.errors import CloseCode
from handshake.messages import Answer, Ask, HandshakeEvent, Release, Released, Renew, Renewed
from handshake.sockets import ZEROMQ, Delivery

logger = logging.getLogger("handshake")

TIMER_GRAIN_S = 0.001
"""uvloop cuts delays to whole milliseconds: without this, a timer fires several times before its deadline."""


class Driver:
    """One connection with its loop. Thread: the event loop."""

    def __init__(
        self,
        connection: Conversation,
        transmit: Callable[[list[bytes]], Delivery],
        on_event: Callable[[HandshakeEvent], None],
        on_settled: Callable[[], None],
        now: Callable[[], float] = ZEROMQ.now,
    ) -> None:
        """Drive ``connection``, which has said and heard nothing.

        Args:
            connection: one end, which only this driver feeds.
            transmit: gives one message to the socket.
            on_event: of the program above. If it raises, the connection is refused with ``internal_error``.
            on_settled: called when all events have been reported, the end of the connection among them.
            now: monotonic seconds.
        """
        self.connection = connection
        self._transmit = transmit
        self._on_event = on_event
        self._on_settled = on_settled
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._wakes_s = math.inf
        self._armed_in = connection.state
        self._timer: asyncio.Handle = self._loop.call_soon(self._arm)

    def receive(self, frames: list[bytes]) -> None:
        """Take one message of the peer."""
        self.connection.receive(frames, self._now())
        self.settle()

    def greet(self) -> None:
        """Send Hello."""
        self.connection.greet(self._now())
        self.settle()

    def lost(self, reason: str) -> None:
        """Note that the transport is gone."""
        self.connection.lost(reason)
        self.settle()

    def send(self, message: Release | Released | Renew | Renewed | Ask | Answer) -> None:
        """Send one message for the program above; raise as ``Conversation.send``."""
        self.connection.send(message)
        self._flush()
        if self.connection.ending is not None:
            self._loop.call_soon(self.settle)

    def ask(self, *, report: bool) -> None:
        """Ping the server, for the program above; raise as ``Conversation.ask``."""
        self.connection.ask(self._now(), report=report)
        self._flush()
        self._loop.call_soon(self.settle)

    def refuse(self, code: str, reason: str, remedy: str = "") -> None:
        """Leave with a complaint, for the program above."""
        self.connection.refuse(code, reason, self._now(), remedy=remedy)
        self._flush()
        self._loop.call_soon(self.settle)

    def close(self, reason: str) -> None:
        """Leave in peace."""
        self.connection.close(reason, self._now())
        self.settle()

    def settle(self) -> None:
        """Send what was said, report what happened, and wake up for the next deadline."""
        connection = self.connection
        self._flush()
        while events := connection.take_events():
            for event in events:
                self._report(event)
            self._flush()
        if connection.ending is not None:
            self._on_settled()
        if connection.state is not self._armed_in or self._wakes_s == math.inf:
            self._arm()  # what is received in a state only moves its deadline away

    def _flush(self) -> None:
        for frames in self.connection.take_outgoing():
            match self._transmit(frames):
                case Delivery.FULL:
                    self.connection.lost("the peer does not read what it is sent", code=CloseCode.CONGESTED)
                    return
                case Delivery.GONE:
                    self.connection.lost("the peer has gone")
                    return

    def _report(self, event: HandshakeEvent) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("handling %s failed; its connection ends", type(event).__name__)
            reason = "the program failed to handle an event of this connection"
            self.connection.refuse(CloseCode.INTERNAL_ERROR, reason, self._now())

    def _arm(self) -> None:
        self._armed_in = self.connection.state
        deadline = self.connection.next_deadline()
        if deadline is None:
            self._timer.cancel()
        # Deadlines mostly move away. A timer that fires too early costs one call per interval; to move it costs a heap
        # operation per message.
        elif deadline < self._wakes_s:
            self._timer.cancel()
            delay_s = max(0.0, deadline - self._now()) + TIMER_GRAIN_S
            self._timer = self._loop.call_later(delay_s, self._on_timer)
            self._wakes_s = deadline

    def _on_timer(self) -> None:
        self._wakes_s = math.inf
        self.connection.handle_deadline(self._now())
        self.settle()
