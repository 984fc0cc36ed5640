"""The dialing end: one connection to one server, entered when it is ready.

Dialing is repeated within ``Limits.connect_s`` when no process listens yet, when the server is busy, and once when the
server closes without a reason. A connection that is lost after it was ready stays lost.

An endpoint is either a literal address or a name, which may have several addresses. They may lead to several servers,
as those of a service do while one pod replaces another. So each is tried until one leads to the server that is wanted.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct
from msgspec.structs import replace

from handshake.connection import Conversation, check_introduction
from handshake.driver import Driver
from handshake.errors import (
    CloseCode,
    Closed,
    ConnectionLost,
    ConnectionRefused,
    HandshakeError,
    RemoteProtocolError,
    TimedOut,
    Unauthenticated,
    WrongServer,
)
from handshake.limits import DEFAULT_LIMITS, Limits
from handshake.messages import (
    Ask,
    ConnectionClosed,
    ConnectionFailed,
    Ending,
    HandshakeEvent,
    Identity,
    PeerReady,
    PingAnswered,
    Publication,
    Release,
    Renew,
)
from handshake.rates import ClockOffset, pause_s
from handshake.security import ClusterSecurity, PublicKey, host_and_port
from handshake.sockets import ZEROMQ, DialedChannel, LinkEvent, Network, running
from handshake.states import Progress, Role

OnEvent = Callable[[HandshakeEvent], None]
WhyNot = Callable[[Identity], str]

BACKOFF_S_MIN = 0.02  # a listener that is being replaced needs about as long
BACKOFF_S_MAX = 0.25  # several attempts fit into ``Limits.connect_s``

TURN_S_MAX = 0.1  # that a client which dials waits at once: what a turn takes beyond it, the event loop has stood still

CUTS_MAX = 2
"""Connections in a row that end within ZeroMQ's handshake without a reason. One may be a process that died; two mean
that the server cannot decrypt."""

ADDRESSES_MAX = 16  # of a name that are tried for one connection: a service of more pods needs a name for each

ADDRESSES_AT_ONCE = 4  # of those: one that is silent keeps no other waiting, and few servers are dialed in vain

SHOWN_MAX = 4  # addresses that an error names

LOST_REMEDY = (
    "Check that the port is that of the peer's bind, and not that of its data or of HTTP, and that the peer runs and "
    "is not overloaded."
)

NOTHING_TO_PUBLISH = Publication.of(b"")


class HandshakeClient:
    """One connection that is or was ready, with the server's identity and publication. Thread: the event loop.

    Attributes:
        version: of the wire protocol.
        pass_: the server's for this connection; empty if it gives none.
        address: where the server answers: the endpoint, or it with one of the addresses of its name.
        is_only: whether the endpoint has no other address.
    """

    def __init__(self, attempt: "_Attempt", ready: PeerReady, address: str, *, is_only: bool) -> None:
        self.address, self.is_only = address, is_only
        self.identity = ready.identity
        self.publication = ready.publication
        self.version = ready.version
        self.pass_ = ready.pass_
        self._attempt = attempt

    @property
    def rtt_s(self) -> float | None:
        """Seconds of the last measured round trip: that of the handshake, until the first ping."""
        return self._attempt.connection.rtt_s

    @property
    def clock_offset(self) -> ClockOffset:
        """How far the server's wall clock is ahead of ours."""
        offset = self._attempt.connection.clock_offset
        assert offset is not None, "the server's Welcome has its time"
        return offset

    def send(self, message: Release | Renew | Ask) -> None:
        """Ask the server. Never waits, and never calls ``on_event`` before it returns.

        Raises:
            Closed: the connection has ended, and every question with it.
            LocalProtocolError: a field is out of bounds. Or an ``Ask``: ``version`` is below 2, its nonce is that of an
                open question, or 1,024 are open. One is open until ``Answered``, however long it is awaited.
        """
        self._attempt.driver.send(message)

    async def ask(self, *, report: bool) -> PingAnswered:
        """Ping the server, and ask for its report if wanted; wait for the answer. One question at a time.

        Raises:
            Closed: the connection has ended, before or meanwhile.

        Cancellation: safe; an answer that comes later is dropped.
        """
        return await self._attempt.ask(report=report)

    def refuse(self, code: str, reason: str, remedy: str = "") -> None:
        """Leave with a complaint, such as ``publication_refused``. Does nothing if the connection has ended.

        ``on_event`` receives it later, as ``ConnectionFailed`` with this code.

        Raises:
            LocalProtocolError: ``code`` is not lower-case letters, digits and underscores, at most 64 characters.
        """
        self._attempt.driver.refuse(code, reason, remedy)

    async def wait_closed(self) -> Ending:
        """Wait until the connection has ended, and return how. Cancellation: safe."""
        return await asyncio.shield(self._attempt.ended)


class _Attempt:
    """One dialed channel with its connection. ``outcome``: ready, a failure of the link, or how it ended.

    ``is_wanted``: whether it is ready, with the server that is wanted. Nobody hears an event of another server.
    """

    def __init__(self, channel: DialedChannel, connection: Conversation, dialing: "_Dialing") -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.driver = Driver(connection, channel.send, self._report, self._on_settled, dialing.network.now)
        self.outcome: asyncio.Future[PeerReady | LinkEvent | Ending] = loop.create_future()
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._answered: asyncio.Future[PingAnswered] = loop.create_future()
        self._closed = asyncio.Event()
        self._gone = asyncio.Event()
        self.is_wanted = False
        self._dialing = dialing
        self._limits = dialing.limits
        self._now = dialing.network.now

    def on_link(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.ACCEPTED:
                self._accepted.set_result(None)
            case LinkEvent.SECURED:
                if self.connection.state is Progress.FRESH:  # it may have run out of time just before
                    self.driver.greet()
            case LinkEvent.UNREACHABLE | LinkEvent.DENIED | LinkEvent.CUT:
                self._decide(event)
            case LinkEvent.LOST:
                self._gone.set()
                self.driver.lost("the server hung up or died")

    async def wait_outcome(self, connect_until_s: float) -> PeerReady | LinkEvent | Ending | None:
        """Wait for the outcome; None if the TCP connection was neither accepted nor refused in time.

        An event loop that stands still, such as while an engine compiles, sees no answer: that time does not count.
        """
        left_s = max(0.0, connect_until_s - self._now())
        awaited = (self._accepted, self.outcome)
        while True:
            since_s, turn_s = self._now(), min(left_s, TURN_S_MAX)
            done, _ = await asyncio.wait(awaited, timeout=turn_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return await self.outcome
            if (left_s := left_s - min(turn_s, self._now() - since_s)) <= 0.0:
                return None

    async def ask(self, *, report: bool) -> PingAnswered:
        answered = self._answered = asyncio.get_running_loop().create_future()
        self.driver.ask(report=report)
        await asyncio.wait((answered, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise Closed(f"the connection has ended: {self.ended.result().reason}")
        answer: PingAnswered = answered.result()
        return answer

    async def leave(self) -> None:
        """Exchange closing messages within ``Limits.closing_s``. Cancellation: drops the connection."""
        try:
            async with asyncio.timeout(self._limits.closing_s):
                await self._part()
        except TimeoutError:
            pass  # the server finds that we are gone
        finally:
            self.driver.lost("the client has left")

    async def _part(self) -> None:
        if self.connection.state is Progress.FRESH:
            return
        self.driver.close("the client is leaving")
        if self.connection.state is Progress.CLOSING:
            await self._closed.wait()
        elif isinstance(self.connection.ending, ConnectionClosed):
            # The server said goodbye, and waits for our answer until it closes.
            await self._gone.wait()

    def _report(self, event: HandshakeEvent) -> None:
        if isinstance(event, PeerReady):
            self.is_wanted = not self._dialing.why_not(event.identity)
        if isinstance(event, PingAnswered) and not self._answered.done():
            self._answered.set_result(event)
        if isinstance(event, Ending):
            self.ended.set_result(event)
        try:
            if self.is_wanted:
                self._dialing.on_event(event)
        finally:
            if isinstance(event, PeerReady | Ending):
                self._decide(event)

    def _decide(self, outcome: PeerReady | LinkEvent | Ending) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _on_settled(self) -> None:
        if self.connection.state is Progress.CLOSED:
            self._closed.set()


class _Dialing(Struct, frozen=True, kw_only=True):
    """What all attempts of one client have in common: the arguments of ``open_client``."""

    endpoint: str
    identity: Identity
    publication: Publication
    security: ClusterSecurity | None
    on_event: OnEvent
    limits: Limits
    network: Network
    why_not: WhyNot
    first: str


@asynccontextmanager
async def open_client(
    endpoint: str,
    *,
    identity: Identity,
    publication: Publication = NOTHING_TO_PUBLISH,
    security: ClusterSecurity | None,
    on_event: OnEvent,
    limits: Limits = DEFAULT_LIMITS,
    network: Network = ZEROMQ,
    server_key: PublicKey = "",
    why_not: WhyNot = lambda _server: "",
    first: str = "",
) -> AsyncIterator[HandshakeClient]:
    """Connect to a server; enter when the handshake is done, leave with a goodbye.

    Of a name with several addresses at most 16 are tried, four at a time, for ``Limits.handshake_s`` in all.

    Args:
        endpoint: ``tcp://host:port`` of the server.
        identity: who we are.
        publication: what the server gets; small, see ``Limits.client_frame_bytes_max``.
        security: of the cluster; None speaks without encryption.
        on_event: takes each event on the loop, from ``PeerReady`` (before the block is entered) to exactly one
            ``ConnectionClosed`` or ``ConnectionFailed``. It must be quick. If it raises, the error is logged and the
            connection ends. Without ``PeerReady`` there is no event, only an exception.
        limits: how long we wait for what.
        network: where we dial.
        server_key: the server's public key, needed if it has its own.
        why_not: returns who a server is, for an error, if another one is wanted; else an empty text.
        first: the ``HandshakeClient.address`` of an earlier connection, which is tried first, even if the name
            no longer has it.

    Raises:
        AddressInvalid: the endpoint is malformed.
        LocalProtocolError: the identity or the publication is out of bounds.
        SocketsExhausted: this process can open no more sockets or files; nothing was dialed.
        Unauthenticated: the server has another secret or key, or only one side has one. Or we do not trust
            ``server_key``: then nothing was dialed.
        ConnectionRefused: the server gave a reason; ``busy`` only after ``Limits.connect_s``.
        RemoteProtocolError: the server broke the protocol.
        ConnectionLost: no process listens, or the server closed the connection, or none of several addresses leads to
            the server.
        WrongServer: the same, and another server answers at one of them.
        TimedOut: the server did not answer (``connect``), or not to the end (``handshake``).

    Cancellation: safe at any moment; no task and no socket is left behind.
    """
    host_and_port(endpoint)  # refuses what is no address
    check_introduction(Role.CLIENT, identity, publication, limits)
    dialing = _Dialing(
        endpoint=endpoint,
        identity=identity,
        publication=publication,
        security=None if security is None else security.towards(server_key),
        on_event=on_event,
        limits=limits,
        network=network,
        why_not=why_not,
        first=first,
    )
    async with AsyncExitStack() as stack:
        yield await _connect(dialing, stack)


async def _connect(dialing: _Dialing, stack: AsyncExitStack) -> HandshakeClient:
    """Dial until an attempt is ready; ``stack`` ends it."""
    network = dialing.network
    until_s = network.now() + dialing.limits.connect_s
    ways: _Ways | None = None
    attempts = cuts = 0
    error: HandshakeError | None = None  # why an earlier attempt failed explains more than that the last one was late
    while True:
        try:
            addresses = await _resolve(dialing, until_s)
        except TimedOut as late:
            raise error or late from late.__cause__
        attempts += 1
        async with AsyncExitStack() as trial:
            if len(addresses) > 1 or dialing.first not in ("", *addresses):
                ways = ways or _Ways(dialing)
                found = await ways.find(addresses, trial)
                may_pass = ways.may_pass(addresses)
            else:
                attempt = await trial.enter_async_context(_dialed(dialing, addresses[0]))
                outcome = await attempt.wait_outcome(until_s)
                cuts = cuts + 1 if outcome is LinkEvent.CUT else 0
                may_pass = _may_pass(outcome, cuts)
                if isinstance(outcome, PeerReady) and attempt.is_wanted:
                    found = HandshakeClient(attempt, outcome, addresses[0], is_only=True)
                elif outcome is not None or error is None:
                    found = _explain(dialing, outcome, dialing.endpoint, denied=cuts >= CUTS_MAX)
                else:
                    found = error
            if isinstance(found, HandshakeClient):
                await stack.enter_async_context(trial.pop_all())
                return found
        error = found
        rest_s = pause_s(attempts - 1, BACKOFF_S_MIN, BACKOFF_S_MAX, network.draw())
        if not may_pass or network.now() + rest_s >= until_s:
            raise error
        await asyncio.sleep(rest_s)


_Outcome = PeerReady | LinkEvent | Ending | HandshakeError | None

_Dialed = asyncio.Future[HandshakeClient | HandshakeError]


class _Ways:
    """The addresses that were tried for one connection, because a name has several, and what became of each."""

    def __init__(self, dialing: _Dialing) -> None:
        self._dialing = dialing
        self._until_s = dialing.network.now() + dialing.limits.handshake_s
        self._outcomes: dict[str, _Outcome] = {}
        self._has_met = False

    def may_pass(self, addresses: tuple[str, ...]) -> bool:
        """Return whether one of these addresses may lead to the server soon."""
        return any(_may_pass(self._outcomes.get(each), CUTS_MAX) for each in addresses)

    async def find(self, addresses: tuple[str, ...], trial: AsyncExitStack) -> HandshakeClient | HandshakeError:
        """Return the connection to the server that is wanted, which ``trial`` ends, or why no address leads to it."""
        tried, first = self._outcomes, self._dialing.first
        ways = dict.fromkeys((first, *addresses) if first else addresses)
        waiting = deque([each for each in ways if each not in tried][: ADDRESSES_MAX - len(tried)])
        waiting += [each for each in ways if each in tried and _may_pass(tried[each], CUTS_MAX)]
        found: _Dialed = asyncio.get_running_loop().create_future()
        await trial.enter_async_context(running(self._try_all(waiting, addresses, found)))
        return await found

    async def _try_all(self, waiting: deque[str], addresses: tuple[str, ...], found: _Dialed) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(ADDRESSES_AT_ONCE, len(waiting))):
                group.create_task(self._try_next(waiting, found))
        found.set_result(self._explain(addresses))

    async def _try_next(self, waiting: deque[str], found: _Dialed) -> None:
        """Try one address after the other until the server is met. Each has an equal share of the time that is left."""
        now, tried = self._dialing.network.now, self._outcomes
        while waiting and not self._has_met:
            share_s = (self._until_s - now()) / -(-len(waiting) // ADDRESSES_AT_ONCE)
            if share_s <= 0:
                return
            address, limits = waiting.popleft(), self._dialing.limits
            limits = replace(limits, connect_s=min(limits.connect_s, share_s), handshake_s=share_s)
            outcome: _Outcome
            try:
                async with _dialed(replace(self._dialing, limits=limits, why_not=self._why_not), address) as attempt:
                    outcome = await attempt.wait_outcome(now() + limits.connect_s)
                    if isinstance(outcome, PeerReady) and attempt.is_wanted:
                        found.set_result(HandshakeClient(attempt, outcome, address, is_only=False))
                        await asyncio.Future()  # until ``trial`` ends it
            except HandshakeError as error:
                outcome = error
            if outcome is LinkEvent.CUT and address not in tried:
                waiting.append(address)  # once more
            tried[address] = outcome

    def _why_not(self, server: Identity) -> str:
        """Want the first server that is wanted: two addresses may lead to it."""
        why = "the server that is met already" if self._has_met else self._dialing.why_not(server)
        self._has_met = self._has_met or not why
        return why

    def _explain(self, addresses: tuple[str, ...]) -> HandshakeError:
        errors = {each: _explain(self._dialing, how, each, denied=True) for each, how in self._outcomes.items()}
        kinds = {type(each) for each in errors.values()}
        is_equal = len(kinds) == 1 and errors.keys() >= set(addresses) and not kinds & {ConnectionLost, WrongServer}
        for address, error in errors.items():
            # Beside a single address only that of an earlier connection was tried.
            if error.local or is_equal or (address,) == addresses:
                return error
        answers_first = sorted(errors.values(), key=lambda each: not isinstance(each, WrongServer))
        reasons = "; ".join([each.message for each in answers_first[:SHOWN_MAX]])
        return (WrongServer if WrongServer in kinds else ConnectionLost)(
            f"{self._dialing.endpoint} has {len(addresses)} addresses. {len(errors)} were tried, and none leads to the "
            f"server that is wanted: {reasons}{'; ...' if len(errors) > SHOWN_MAX else ''}"
        )


async def _resolve(dialing: _Dialing, until_s: float) -> tuple[str, ...]:
    endpoint, network = dialing.endpoint, dialing.network
    try:
        async with asyncio.timeout(until_s - network.now()):
            return await network.resolve(endpoint)
    except TimeoutError as error:
        raise TimedOut(f"looking up {endpoint} took too long", phase="connect") from error
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Correct the name, or give an address. getent hosts NAME shows what this host finds."
        raise ConnectionLost(f"{endpoint} cannot be resolved: {reason}", remedy=remedy) from error


@asynccontextmanager
async def _dialed(dialing: _Dialing, address: str) -> AsyncIterator[_Attempt]:
    async with dialing.network.open_dialer(address, dialing.security, dialing.limits) as channel:
        connection = Conversation(
            Role.CLIENT,
            dialing.identity,
            dialing.publication,
            limits=dialing.limits,
            now=dialing.network.now(),
            wall_ahead_s=dialing.network.wall() - dialing.network.now(),
        )
        attempt = _Attempt(channel, connection, dialing)
        async with running(channel.read(attempt.driver.receive), channel.watch(attempt.on_link)):
            try:
                channel.dial()
                yield attempt
            finally:
                await attempt.leave()


def _may_pass(outcome: _Outcome, cuts: int) -> bool:
    """Return whether the next attempt may succeed."""
    match outcome:
        case LinkEvent.UNREACHABLE | ConnectionFailed(code=CloseCode.BUSY, refused=True):
            return True
        case _:
            return outcome is LinkEvent.CUT and cuts < CUTS_MAX


def _explain(dialing: _Dialing, outcome: _Outcome, endpoint: str, *, denied: bool) -> HandshakeError:
    error: HandshakeError
    match outcome:
        case HandshakeError():
            error = outcome
        case None:
            error = TimedOut(f"{endpoint} did not answer in time", phase="connect")
        case PeerReady(identity=identity):
            error = WrongServer(f"{endpoint} is {dialing.why_not(identity)}", answered=identity)
        case LinkEvent.UNREACHABLE:
            error = ConnectionLost(f"nobody listens at {endpoint}")
        case LinkEvent.CUT if not denied:
            error = ConnectionLost(f"{endpoint} hung up within the encryption handshake")
        case LinkEvent():
            error = Unauthenticated(f"{endpoint} does not share our cluster secret, or does not trust our key")
        case ConnectionClosed(reason=reason):
            error = ConnectionLost(f"{endpoint} closed the connection within the handshake: {reason}")
        case ConnectionFailed():
            error = _explain_failed(outcome, endpoint)
    return error


def _explain_failed(failed: ConnectionFailed, endpoint: str) -> HandshakeError:
    """Return the error of a connection that was there: the server refused it, broke the protocol, or was lost."""
    if failed.refused:
        return ConnectionRefused(failed.code, failed.reason, remedy=failed.remedy)
    if failed.code == CloseCode.PROTOCOL_VIOLATION:
        return RemoteProtocolError(f"{endpoint} broke the protocol: {failed.reason}", violation="unexpected")
    if failed.code == CloseCode.HANDSHAKE_TIMEOUT:
        return TimedOut(f"{endpoint}: {failed.reason}", phase="handshake", remedy=LOST_REMEDY)
    return ConnectionLost(f"{endpoint} was lost within the handshake: {failed.reason}", remedy=LOST_REMEDY)
