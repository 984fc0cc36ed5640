"""Messages of a ZeroMQ socket, taken by an event loop without a task or a future for each."""

import asyncio
from collections.abc import Callable

import zmq

MESSAGES_PER_TURN = 32
"""A flood must not starve the loop: after so many messages others have their turn."""


class Arrivals:
    """What arrives on one socket.

    ZeroMQ makes a socket's descriptor readable once when something has arrived, and any other call on the socket may
    clear this signal. So messages are taken until there is none, and ``read_again`` is called after each send.

    Thread: the loop's only.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._taking = True  # so that nothing is taken before ``run``
        self._turn: asyncio.Handle | None = None

    async def run(self, take: Callable[[], bool | None]) -> None:
        """Take messages until cancelled.

        Args:
            take: takes one message, or raises ``zmq.Again``; returns true if it has used up its turn of the loop.

        Cancellation: safe; what was not taken stays in the socket.
        """
        self._take = take
        self._failed: asyncio.Future[None] = self._loop.create_future()
        descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(descriptor, self._on_readable)
        self._take_later()  # the monitor may not report again what is there already
        try:
            await self._failed
        finally:
            self._loop.remove_reader(descriptor)
            self._taking = True
            if self._turn is not None:
                self._turn.cancel()

    def read_again(self) -> None:
        """Take what arrived while something else was asked of the socket."""
        if not self._taking and self._any():
            self._take_later()

    def _any(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _take_later(self) -> None:
        self._taking = True
        self._turn = self._loop.call_soon(self._take_some)

    def _on_readable(self) -> None:
        if not self._taking:
            self._take_some()

    def _take_some(self) -> None:
        self._taking = True
        try:
            for _ in range(MESSAGES_PER_TURN):
                used_up = self._take()
                if not self._any():  # costs half of what it costs to try
                    self._taking = False
                    return
                if used_up:
                    break
            self._take_later()
        except zmq.Again:
            self._taking = False
        except Exception as error:  # noqa: BLE001 - raised by ``run``
            self._failed.set_exception(error)
