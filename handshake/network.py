"""What the shells take from outside: sockets, names, a clock and chance.

``ZEROMQ`` is the production network. A caller that gives another network drives the same clients and
servers over it, as the simulator does on virtual time.
"""

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from handshake.limits import Limits
from handshake.security import ClusterSecurity, PublicKey
from handshake.sockets import Delivery, LinkEvent, open_dialer, open_listener, resolve


class Channel(Protocol):
    """What both kinds of sockets have."""

    @property
    def endpoint(self) -> str:
        """Its address, with its real port."""
        ...

    def send(self, frames: list[bytes]) -> Delivery:
        """Queue one message, or say why not, at once."""
        ...


class ListeningChannel(Channel, Protocol):
    """A socket that listens. See ``handshake.sockets.ListeningChannel``."""

    @property
    def strangers(self) -> Mapping[str, int]:
        """How many connections were not let in, or were cut off, by code."""
        ...

    async def read(self, on_frames: Callable[[list[bytes], PublicKey], bool]) -> None:
        """Pass on each message that arrives, with the key of its connection, until cancelled."""
        ...


class DialedChannel(Channel, Protocol):
    """A socket that dials once. See ``handshake.sockets.DialedChannel``."""

    def dial(self) -> None:
        """Start the one attempt to connect."""
        ...

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Pass on each message that arrives, until cancelled."""
        ...

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        """Pass on what happens to the connection, until cancelled."""
        ...


class Network(Protocol):
    """Where connections are made, and what time it is there."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        ...

    def wall(self) -> float:
        """Return the seconds since 1970 on the wall clock, which may jump."""
        ...

    def draw(self) -> float:
        """Return a random number in [0, 1), which spreads load and protects nothing."""
        ...

    def open_listener(
        self, bind: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[ListeningChannel]:
        """Listen. See ``handshake.sockets.open_listener``."""
        ...

    def open_dialer(
        self, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[DialedChannel]:
        """Get ready to dial. See ``handshake.sockets.open_dialer``."""
        ...

    async def resolve(self, endpoint: str) -> tuple[str, ...]:
        """Look a name up, which may have several addresses. See ``handshake.sockets.resolve``."""
        ...


class ZeroMqNetwork:
    """ZeroMQ over TCP, and this machine's clock. See ``Network``."""

    def now(self) -> float:
        """See ``Network.now``."""
        return time.monotonic()

    def wall(self) -> float:
        """See ``Network.wall``."""
        return time.time()

    def draw(self) -> float:
        """See ``Network.draw``."""
        return random.random()  # noqa: S311 - as the contract says

    def open_listener(
        self, bind: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[ListeningChannel]:
        """See ``Network.open_listener``."""
        return open_listener(bind, security, limits)

    def open_dialer(
        self, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[DialedChannel]:
        """See ``Network.open_dialer``."""
        return open_dialer(endpoint, security, limits)

    async def resolve(self, endpoint: str) -> tuple[str, ...]:
        """See ``Network.resolve``."""
        return await resolve(endpoint)


ZEROMQ: Network = ZeroMqNetwork()
