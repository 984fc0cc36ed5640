"""From the transport's owner thread to the event loop: many events, one wake-up."""

import asyncio
from collections import deque
from collections.abc import Callable

from kvflow.transport.base import TransportEvent


class Inbox:
    """Events that wait for the loop's next turn.

    Thread: ``put`` from any thread; everything else on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[TransportEvent] = deque()
        self._handlers: list[Callable[[TransportEvent], None]] = []
        self._woken = False

    def connect(self, handler: Callable[[TransportEvent], None]) -> None:
        """Have ``handler`` take every event, those that wait already among them."""
        self._handlers.append(handler)
        self.drain()

    def put(self, event: TransportEvent) -> None:
        """Take an event; the loop is woken once for all that arrive before its next turn."""
        self._events.append(event)
        # A race here costs one superfluous wake-up, never a lost one: ``drain`` clears the flag before it looks.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Hand out what has arrived."""
        self._woken = False
        while self._handlers and self._events:
            event = self._events.popleft()
            for handler in self._handlers:
                handler(event)
