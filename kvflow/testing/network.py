"""The sockets of one simulated process: ``handshake.network.Network`` over the wires of a world."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from handshake.codec import decode
from handshake.limits import Limits
from handshake.messages import Renewed
from handshake.security import ClusterSecurity, PublicKey
from handshake.sockets import Delivery, LinkEvent
from kvflow.testing.process import Process
from kvflow.testing.wires import Line, Wires


class _Wire:
    """One socket of one process."""

    def __init__(self, wires: Wires, process: Process, endpoint: str, limits: Limits) -> None:
        self.endpoint = endpoint
        self.process = process
        self.limits = limits
        self._wires = wires
        self._arrived: deque[list[bytes]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._world = wires.world

    def deliver(self, frames: list[bytes]) -> None:
        """Take a message that has arrived; the program reads it in a turn of its own."""
        self._arrived.append(frames)
        self.process.call_soon(_wake, self._waiting)

    async def arrivals(self) -> AsyncIterator[list[bytes]]:
        """Give each message that arrives, for ever."""
        while True:
            while self._arrived:
                frames = self._arrived.popleft()
                if self._world.recording:
                    message = decode(frames[-1:], self.limits.frame_bytes_max)
                    self._world.note(self.process.name, "heard", type(message).__name__)
                yield frames
            self._waiting = self.process.create_future()
            await self._waiting


class ListeningWire(_Wire):
    """A socket that listens. See ``handshake.network.ListeningChannel``."""

    def __init__(
        self, wires: Wires, process: Process, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> None:
        super().__init__(wires, process, endpoint, limits)
        self.security = security
        self.connections: dict[bytes, Line] = {}
        self.keys: dict[bytes, PublicKey] = {}
        self.strangers: Mapping[str, int] = {}

    async def read(self, on_frames: Callable[[list[bytes], PublicKey], bool]) -> None:
        """See ``handshake.network.ListeningChannel.read``."""
        async for frames in self.arrivals():
            on_frames(frames, self.keys[frames[0]])

    def send(self, frames: list[bytes]) -> Delivery:
        """See ``handshake.network.Channel.send``."""
        connection = self.connections.get(frames[0])
        self._note_promises(frames[1:])
        return Delivery.GONE if connection is None else connection.send_down(frames[1:], self.limits)

    def _note_promises(self, frames: list[bytes]) -> None:
        """Note until when a reader is told that its leases last."""
        match decode(frames, self.limits.frame_bytes_max):
            case Renewed(leases=answers, lease_s=lease_s):
                until = self.process.time() + lease_s
                for answer in answers:
                    if answer.outcome == "held":
                        self._wires.promises[self.process.name, answer.slot, answer.epoch] = until


class DialledWire(_Wire):
    """A socket that dials once. See ``handshake.network.DialledChannel``."""

    def __init__(
        self, wires: Wires, process: Process, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> None:
        super().__init__(wires, process, endpoint, limits)
        self.security = security
        self._connection: Line | None = None
        self._seen: asyncio.Queue[LinkEvent] = asyncio.Queue()

    def dial(self) -> None:
        """See ``handshake.network.DialledChannel.dial``."""
        self._connection = Line(self._wires, self, self.endpoint)

    def send(self, frames: list[bytes]) -> Delivery:
        """See ``handshake.network.Channel.send``."""
        return Delivery.QUEUED if self._connection is None else self._connection.send_up(frames)

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """See ``handshake.network.DialledChannel.read``."""
        async for frames in self.arrivals():
            on_frames(frames)

    def hear(self, event: LinkEvent) -> None:
        """Take note of what the monitor sees."""
        self.process.call_soon(self._seen.put_nowait, event)

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        """See ``handshake.network.DialledChannel.watch``."""
        while True:
            on_link(await self._seen.get())

    def close(self) -> None:
        """Close the socket. Nobody tells the server: it finds out when it sends something."""
        if self._connection is not None:
            self._connection.cut()


class SimulatedNetwork:
    """What one process sees of the network. See ``handshake.network.Network``."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires = wires
        self._process = process

    def now(self) -> float:
        """See ``Network.now``."""
        return self._process.time()

    def wall(self) -> float:
        """See ``Network.wall``."""
        return self._process.wall()

    def draw(self) -> float:
        """See ``Network.draw``."""
        return self._wires.world.chance.random()

    @asynccontextmanager
    async def open_listener(
        self, bind: str, security: ClusterSecurity | None, limits: Limits
    ) -> AsyncIterator[ListeningWire]:
        """See ``Network.open_listener``."""
        listener = ListeningWire(self._wires, self._process, bind, security, limits)
        self._wires.listen(listener)
        try:
            yield listener
        finally:
            self._wires.unlisten(listener)

    @asynccontextmanager
    async def open_dialler(
        self, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> AsyncIterator[DialledWire]:
        """See ``Network.open_dialler``."""
        dialled = DialledWire(self._wires, self._process, endpoint, security, limits)
        try:
            yield dialled
        finally:
            dialled.close()

    async def resolve(self, endpoint: str) -> tuple[str, ...]:
        """See ``Network.resolve``."""
        return (endpoint,)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
