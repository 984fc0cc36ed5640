"""The network between simulated processes: what ZeroMQ over TCP does to messages, and nothing that it cannot do.

On one connection messages arrive in order; connections overtake each other. A partition holds messages back until it
heals, as TCP does; a clog holds back one direction of one connection; a cut loses whatever is on its way. A message
may come twice, which TCP prevents and a program that resends does not. A killed process hangs up, as its kernel does;
a stopped one still accepts connections, and says nothing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from msgspec import Struct

from handshake.codec import decode
from handshake.limits import Limits
from handshake.messages import Renewed
from handshake.security import ClusterSecurity, PublicKey
from handshake.sockets import Delivery, LinkEvent
from tests.fakes.process import Process
from tests.fakes.troubles import Troubles
from tests.fakes.world import World


class NetworkFaults(Struct, frozen=True, kw_only=True):
    """What the network does to messages.

    Attributes:
        delay_s: mean delay of one message.
        duplicated: share of messages that come twice.
        cut: share of messages after which their connection is cut.
        clogged: share of messages that clog their direction.
        clog_s: mean duration of a clog.
    """

    delay_s: float = 50e-6
    duplicated: float = 0.0
    cut: float = 0.0
    clogged: float = 0.0
    clog_s: float = 0.0


class Wires:
    """The network between all processes of a world.

    Attributes:
        faults: what happens to messages from now on.
        troubles: what was done to hosts and between them.
        names: endpoint with a name -> those of its addresses; any other has one.
        promises: until when a process has said that a lease lasts, on its clock; by its name, slot and epoch.

    Args:
        world: whose time it is.
        faults: as above.
    """

    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self.world = world
        self.faults = faults
        self.troubles = Troubles()
        self.names: dict[str, tuple[str, ...]] = {}
        self.promises: dict[tuple[str, int, int], float] = {}
        self._listeners: dict[str, ListeningWire] = {}
        self._connections: dict[int, Line] = {}
        self._parted: set[frozenset[str]] = set()
        self._held: deque[Callable[[], object]] = deque()
        self._made = 0

    def part(self, one: str, other: str) -> None:
        """Part two hosts: nothing passes between them until they are joined."""
        self._parted.add(frozenset((one, other)))
        self.troubles.note("parted", one, other)
        self.world.note("network", "parted", one, other)

    def join(self) -> None:
        """End every partition; what was held back goes on."""
        self._parted.clear()
        self.world.note("network", "joined")
        held, self._held = self._held, deque()
        for call in held:
            call()

    def parted(self, one: str, other: str) -> bool:
        """Tell whether two hosts are parted."""
        return bool(self._parted) and frozenset((one, other)) in self._parted

    def hold(self, call: Callable[[], object]) -> None:
        """Do something when the hosts are joined again."""
        self._held.append(call)

    def hang_up(self, process: Process) -> None:
        """Close every socket of a process that was killed, as its kernel does."""
        for endpoint, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[endpoint]
        for connection in list(self._connections.values()):
            if process in (connection.client.process, connection.server):
                connection.cut()

    def listen(self, listener: "ListeningWire") -> None:
        """Answer at an endpoint."""
        self._listeners[listener.endpoint] = listener

    def unlisten(self, listener: "ListeningWire") -> None:
        """Answer no more, and hang up on every client."""
        if self._listeners.get(listener.endpoint) is listener:
            del self._listeners[listener.endpoint]
        for connection in list(self._connections.values()):
            if connection.listener is listener:
                connection.cut()

    def listener(self, endpoint: str) -> "ListeningWire | None":
        """Return who listens at an endpoint."""
        return self._listeners.get(endpoint)

    def host_of(self, endpoint: str) -> str:
        """Return the host of an endpoint: its address."""
        return endpoint.removeprefix("tcp://").rpartition(":")[0]

    def add(self, connection: "Line") -> int:
        """Number a connection."""
        self._made += 1
        self._connections[self._made] = connection
        return self._made

    def forget(self, number: int) -> None:
        """Forget a connection that was cut."""
        self._connections.pop(number, None)


class _Direction:
    """One direction of a connection: messages arrive in the order in which they were sent."""

    def __init__(self, wires: Wires, hosts: tuple[str, str], arrive: Callable[[list[bytes]], None]) -> None:
        self._wires = wires
        self._hosts = hosts
        self._arrive = arrive
        self._free_at = 0.0
        self.under_way = 0

    def send(self, frames: list[bytes]) -> None:
        wires, world = self._wires, self._wires.world
        faults = wires.faults
        if world.happens(faults.clogged):
            self._free_at = max(self._free_at, world.now + world.delay(faults.clog_s))
            world.note("network", "clogged", f"{self._free_at:.6f}")
            wires.troubles.note("clogged", *self._hosts)
        doubled = world.happens(faults.duplicated)
        if doubled:
            wires.troubles.note("doubled", *self._hosts)
        for _ in range(1 + doubled):
            arrives_at = max(self._free_at, world.now + world.delay(faults.delay_s))
            self._free_at = arrives_at
            self.under_way += 1
            world.at(arrives_at, self._arrive, frames)


class Line:
    """One TCP connection with ZeroMQ's handshake on it.

    Args:
        wires: the network.
        client: the dialing end.
        endpoint: address that it dials.
    """

    def __init__(self, wires: Wires, client: "DialedWire", endpoint: str) -> None:
        self.client = client
        self.listener: ListeningWire | None = None
        self.state: Literal["dialed", "open", "cut"] = "dialed"
        self._wires = wires
        self._endpoint = endpoint
        self._host = wires.host_of(endpoint)
        self._number = wires.add(self)
        self.routing_id = self._number.to_bytes(5, "big")
        self._hosts = client.process.host, self._host
        self._up = _Direction(wires, self._hosts, self._arrive_up)
        self._down = _Direction(wires, self._hosts, self._arrive_down)
        self._later(self._accept)

    @property
    def server(self) -> Process | None:
        """The process that listens, if it is known."""
        return self.listener.process if self.listener else None

    def send_up(self, frames: list[bytes]) -> Delivery:
        """Send to the server. A message on a dead connection is taken, and lost, until its end is known."""
        if self.state == "cut":
            return Delivery.QUEUED
        if self._up.under_way >= self.client.limits.outgoing_max:
            return Delivery.FULL
        self._send(self._up, frames)
        return Delivery.QUEUED

    def send_down(self, frames: list[bytes], limits: Limits) -> Delivery:
        """Send to the client."""
        if self.state == "cut":
            return Delivery.GONE
        if self._down.under_way >= limits.outgoing_max:
            return Delivery.FULL
        self._send(self._down, frames)
        return Delivery.QUEUED

    def cut(self) -> None:
        """End it; what is on its way is lost. The client learns about it, unless the hosts are parted."""
        if self.state == "cut":
            return
        self.state = "cut"
        self._wires.forget(self._number)
        if self.listener is not None:
            self.listener.connections.pop(self.routing_id, None)
        self._wires.world.note("network", "cut", self._number)
        self._later(self.client.hear, LinkEvent.LOST)

    def _send(self, lane: _Direction, frames: list[bytes]) -> None:
        lane.send(frames)
        if self._wires.world.happens(self._wires.faults.cut):
            self._wires.troubles.note("cut", *self._hosts)
            self._wires.world.later(self._wires.faults.delay_s, self.cut)

    def _later(self, call: Callable[..., object], *arguments: object) -> None:
        world = self._wires.world
        world.later(self._wires.faults.delay_s, self._unless_parted, call, *arguments)

    def _unless_parted(self, call: Callable[..., object], *arguments: object) -> None:
        if self._wires.parted(self.client.process.host, self._host):
            self._wires.hold(lambda: self._unless_parted(call, *arguments))
        else:
            call(*arguments)

    def _accept(self) -> None:
        listener = self._wires.listener(self._endpoint)
        if self.state == "cut":
            return
        if listener is None:
            self._refuse(LinkEvent.UNREACHABLE)
            return
        self.listener = listener
        self.client.hear(LinkEvent.ACCEPTED)
        self._later(self._secure)

    def _refuse(self, event: LinkEvent) -> None:
        self.state = "cut"
        self._wires.forget(self._number)
        self.client.hear(event)

    def _secure(self) -> None:
        """Finish ZeroMQ's handshake, which the server's own process does."""
        listener = self.listener
        if self.state == "cut" or listener is None:
            return
        if not listener.process.running:
            listener.process.postpone(self._secure)
            return
        ours, theirs = self.client.security, listener.security
        public_key = ours.client.public_key if ours else ""
        if (ours and ours.server.public_key) != (theirs and theirs.server.public_key):
            self._refuse(LinkEvent.CUT)  # they cannot read what we say
            return
        if theirs and not theirs.admits(public_key):
            self._refuse(LinkEvent.DENIED)
            return
        self.state = "open"
        listener.keys[self.routing_id] = public_key
        listener.connections[self.routing_id] = self
        self._wires.world.note("network", "opened", self._number, self.client.process.name, self._endpoint)
        self.client.hear(LinkEvent.SECURED)

    def _arrive_up(self, frames: list[bytes]) -> None:
        self._arrive(self._up, self.listener, [self.routing_id, *frames])

    def _arrive_down(self, frames: list[bytes]) -> None:
        self._arrive(self._down, self.client, frames)

    def _arrive(self, lane: _Direction, end: "_Wire | None", frames: list[bytes]) -> None:
        if self.state != "open" or end is None:
            return  # what was said before the connection was secured is never sent
        if self._wires.parted(self.client.process.host, self._host):
            self._wires.hold(lambda: self._arrive(lane, end, frames))
            return
        lane.under_way -= 1
        end.deliver(frames)


class _Wire:
    """One socket of one process."""

    def __init__(
        self, wires: Wires, process: Process, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> None:
        self.endpoint = endpoint
        self.security = security
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
        """Yield each message that arrives. Does not end."""
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
    """A socket that listens. See ``handshake.sockets.ListeningChannel``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.connections: dict[bytes, Line] = {}
        self.keys: dict[bytes, PublicKey] = {}
        self.strangers: Mapping[str, int] = {}

    async def read(self, on_frames: Callable[[list[bytes], PublicKey], bool]) -> None:
        async for frames in self.arrivals():
            on_frames(frames, self.keys[frames[0]])

    def send(self, frames: list[bytes]) -> Delivery:
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


class DialedWire(_Wire):
    """A socket that dials once. See ``handshake.sockets.DialedChannel``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._connection: Line | None = None
        self._seen: asyncio.Queue[LinkEvent] = asyncio.Queue()

    def dial(self) -> None:
        self._connection = Line(self._wires, self, self.endpoint)

    def send(self, frames: list[bytes]) -> Delivery:
        return Delivery.QUEUED if self._connection is None else self._connection.send_up(frames)

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        async for frames in self.arrivals():
            on_frames(frames)

    def hear(self, event: LinkEvent) -> None:
        """Process what the monitor sees."""
        self.process.call_soon(self._seen.put_nowait, event)

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        while True:
            on_link(await self._seen.get())

    def close(self) -> None:
        """Close the socket. Nobody tells the server: it finds out when it sends something."""
        if self._connection is not None:
            self._connection.cut()


class SimulatedNetwork:
    """What one process sees of the network. See ``handshake.sockets.Network``."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires = wires
        self._process = process

    def now(self) -> float:
        return self._process.time()

    def wall(self) -> float:
        return self._process.wall()

    def draw(self) -> float:
        return self._wires.world.chance.random()

    @asynccontextmanager
    async def open_listener(
        self, bind: str, security: ClusterSecurity | None, limits: Limits
    ) -> AsyncIterator[ListeningWire]:
        listener = ListeningWire(self._wires, self._process, bind, security, limits)
        self._wires.listen(listener)
        try:
            yield listener
        finally:
            self._wires.unlisten(listener)

    @asynccontextmanager
    async def open_dialer(
        self, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> AsyncIterator[DialedWire]:
        dialed = DialedWire(self._wires, self._process, endpoint, security, limits)
        try:
            yield dialed
        finally:
            dialed.close()

    async def resolve(self, endpoint: str) -> tuple[str, ...]:
        return self._wires.names.get(endpoint, (endpoint,))

    async def first_open(self, endpoints: Sequence[str], within_s: float) -> str:
        raise AssertionError(f"no simulated plane has an endpoint: {endpoints} within {within_s} s")


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
