"""What the tests of handshake share: example messages, joined connections, recorded events, raw sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

import handshake
from handshake.codec import encode
from handshake.connection import NOTHING_GIVEN, Conversation
from handshake.limits import Limits
from handshake.messages import (
    SUPPORTED,
    WIRE_VERSION,
    Answer,
    AnyMessage,
    Ask,
    Bye,
    HandshakeEvent,
    Hello,
    Identity,
    LeaseAnswer,
    LeaseRef,
    Ping,
    Pong,
    Publication,
    Publish,
    Refuse,
    Release,
    Released,
    Renew,
    Renewed,
    Welcome,
)
from handshake.rates import Allowance
from handshake.security import ClusterSecurity
from handshake.sockets import ZEROMQ
from handshake.states import Progress, Role

LIMITS = Limits()
PATIENCE_S = 30.0
"""How long a test waits for what must happen: only a defect takes this long."""
PATIENT = Limits(connect_s=2 * PATIENCE_S, handshake_s=2 * PATIENCE_S, closing_s=PATIENCE_S)
"""Of a client whose server answers: a machine that stands still for a second ends nothing."""

PRODUCER = Identity(
    engine_id="prefill-0", rank=1, num_ranks=2, incarnation="0" * 31 + "1", role="prefill", software="test 1.0"
)
CONSUMER = Identity(engine_id="decode-0", rank=0, num_ranks=1, incarnation="0" * 31 + "2", role="decode")
PRODUCED = Publication.of(b"what the producer publishes", schema=3)
CONSUMED = Publication.of(b"what the consumer publishes", schema=3)
SECRET = "a secret of the tests"
SECURITY = ClusterSecurity.from_secret(SECRET)
OTHER_SECURITY = ClusterSecurity.from_secret("another secret, as long")

LEASES = (LeaseRef(slot=0, epoch=1), LeaseRef(slot=2**31, epoch=2**64 - 1))
ANSWERS = (
    LeaseAnswer(slot=0, epoch=1, outcome="held"),
    LeaseAnswer(slot=1, epoch=2, outcome="counted"),
    LeaseAnswer(slot=2, epoch=3, outcome="ended"),
    LeaseAnswer(slot=2**31, epoch=2**64 - 1, outcome="unknown"),
)

EXAMPLES: dict[str, AnyMessage] = {
    "hello": Hello(version_min=WIRE_VERSION, version_max=WIRE_VERSION, identity=CONSUMER),
    "welcome": Welcome(clock_s=1.5, version=WIRE_VERSION, identity=PRODUCER),
    "refuse": Refuse(code="version_unsupported", reason="no common version", remedy="Upgrade."),
    "publish": Publish(publication=PRODUCED),
    "publish_with_pass": Publish(publication=PRODUCED, pass_=bytes(range(32))),
    "release": Release(read=True, leases=LEASES),
    "released": Released(leases=ANSWERS),
    "renew": Renew(leases=LEASES),
    "renewed": Renewed(leases=ANSWERS, lease_s=30.0),
    "ask": Ask(nonce=7, question=b"who holds this?"),
    "answer": Answer(nonce=7, answer=b"I do"),
    "ping": Ping(nonce=7),
    "pong": Pong(clock_s=1.5, nonce=7),
    "ping_with_question": Ping(nonce=7, report=True),
    "pong_with_report": Pong(nonce=7, clock_s=1.5, report=b"all is well"),
    "bye": Bye(reason="leaving"),
}
"""One of each message; the golden frames are made of these."""


def frames_of(message: AnyMessage) -> list[bytes]:
    return encode(message, LIMITS.frame_bytes_max)


class Pair:
    """A client and a server joined by plain function calls, and one clock for both."""

    def __init__(
        self,
        *,
        limits=LIMITS,
        client_versions=SUPPORTED,
        server_versions=SUPPORTED,
        client_ahead_s=0.0,
        server_ahead_s=0.0,
        giving=NOTHING_GIVEN,
    ):
        self.now = 100.0
        self.client = Conversation(
            Role.CLIENT,
            CONSUMER,
            CONSUMED,
            limits=limits,
            now=self.now,
            versions=client_versions,
            wall_ahead_s=client_ahead_s,
        )
        self.server = Conversation(
            Role.SERVER,
            PRODUCER,
            PRODUCED,
            limits=limits,
            now=self.now,
            versions=server_versions,
            wall_ahead_s=server_ahead_s,
            giving=giving,
        )
        self.client_events: list[HandshakeEvent] = []
        self.server_events: list[HandshakeEvent] = []

    def deliver(self) -> bool:
        """Carry what both have to say to the other, once; tell whether there was anything."""
        to_server, to_client = self.client.take_outgoing(), self.server.take_outgoing()
        for frames in to_server:
            self.server.receive(frames, self.now)
        for frames in to_client:
            self.client.receive(frames, self.now)
        self.client_events += self.client.take_events()
        self.server_events += self.server.take_events()
        return bool(to_server or to_client)

    def settle(self) -> None:
        for _ in range(10):
            if not self.deliver():
                return
        raise AssertionError("the two never stop talking")

    def make_ready(self) -> "Pair":
        self.client.greet(self.now)
        self.settle()
        assert (self.client.state, self.server.state) == (Progress.READY, Progress.READY)
        return self


def connection_in(
    role: Role, state: Progress, now: float = 100.0, *, limits: Limits = LIMITS, allowance: Allowance | None = None
) -> Conversation:
    """Return a connection that has come as far as ``state`` by hearing what a peer says, queues emptied.

    The states that a connection only passes through (a client that is welcomed, a server that is greeted or
    welcomed) are not to be had.
    """
    identity, publication = (CONSUMER, CONSUMED) if role is Role.CLIENT else (PRODUCER, PRODUCED)
    connection = Conversation(role, identity, publication, limits=limits, now=now, allowance=allowance)
    heard = [EXAMPLES["welcome" if role is Role.CLIENT else "hello"], EXAMPLES["publish"]]
    order = [Progress.PUBLISHED, Progress.READY, Progress.CLOSING, Progress.CLOSED]
    if role is Role.CLIENT and state is not Progress.FRESH:
        connection.greet(now)
    if state in order:
        connection.receive(frames_of(heard[0]), now)
    if state in order[1:]:
        connection.receive(frames_of(heard[1]), now)
    if state in order[2:]:
        connection.close("done", now)
    if state is Progress.CLOSED:
        connection.receive(frames_of(Bye()), now)
    assert connection.state is state
    connection.take_outgoing()
    connection.take_events()
    return connection


REACHABLE = [
    (role, state)
    for role in Role
    for state in Progress
    if state is not Progress.WELCOMED and (role, state) != (Role.SERVER, Progress.GREETED)
]


class Recorder:
    """An ``on_event`` that remembers, for servers (key, event) and clients (event)."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()

    def __call__(self, *seen: Any) -> None:
        self.seen.append(seen)
        self._changed.set()

    def of(self, kind: type) -> list[Any]:
        return [seen[-1] for seen in self.seen if isinstance(seen[-1], kind)]

    async def wait_for(self, condition: Callable[["Recorder"], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def wait_of(self, kind: type, count: int = 1) -> list[Any]:
        await self.wait_for(lambda recorder: len(recorder.of(kind)) >= count)
        return self.of(kind)


def ignore(*_seen: Any) -> None:
    """Be an ``on_event`` that does not care."""


@asynccontextmanager
async def serving(
    *,
    bind="tcp://127.0.0.1:0",
    security=SECURITY,
    on_event=ignore,
    limits=LIMITS,
    identity=PRODUCER,
    make_pass=None,
    make_report=None,
    network=ZEROMQ,
) -> AsyncIterator[handshake.HandshakeServer]:
    async with handshake.open_server(
        bind=bind,
        identity=identity,
        publication=PRODUCED,
        security=security,
        on_event=on_event,
        limits=limits,
        network=network,
        make_pass=make_pass,
        make_report=make_report,
    ) as server:
        yield server


@asynccontextmanager
async def connected(
    endpoint: str, *, security=SECURITY, on_event=ignore, limits=PATIENT, identity=CONSUMER, server_key=""
) -> AsyncIterator[handshake.HandshakeClient]:
    async with handshake.open_client(
        endpoint,
        identity=identity,
        publication=CONSUMED,
        server_key=server_key,
        security=security,
        on_event=on_event,
        limits=limits,
    ) as client:
        yield client


@asynccontextmanager
async def raw_dealer(
    endpoint: str, security: ClusterSecurity | None = SECURITY, *, held_max: int = 1000
) -> AsyncIterator[zmq.asyncio.Socket]:
    """Connect a plain DEALER with the cluster's keys: a member of the cluster that may say anything.

    ``held_max``: messages that ZeroMQ takes for it before it reads any.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.set(zmq.RCVHWM, held_max)
        if security is not None:
            socket.set(zmq.CURVE_SERVERKEY, security.server.public)
            socket.set(zmq.CURVE_PUBLICKEY, security.client.public)
            socket.set(zmq.CURVE_SECRETKEY, security.client.private)
        socket.connect(endpoint)
        yield socket
    finally:
        context.destroy(linger=0)
