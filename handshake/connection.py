"""One end of a connection, without I/O: frames and the time go in, frames and events come out.

After each call of ``receive``, ``send``, ``handle_deadline`` or ``lost``, the shell sends ``take_outgoing()``, reports
``take_events()`` and arms a timer for ``next_deadline()``. ``now``: seconds of one monotonic clock.

Nothing that a peer does raises here. Its first violation ends the connection, with ``Refuse`` and ``ConnectionFailed``.
"""

from collections.abc import Callable, Sequence

from msgspec import UNSET, Struct, UnsetType

from handshake import codec
from handshake.errors import CloseCode, Closed, LocalProtocolError, RemoteProtocolError
from handshake.limits import QUESTIONS_MAX, Limits
from handshake.messages import (
    SUPPORTED,
    Answer,
    Answered,
    AnyMessage,
    Ask,
    Asked,
    Bye,
    ClockTime,
    ConnectionClosed,
    ConnectionFailed,
    Ending,
    HandshakeEvent,
    Hello,
    Identity,
    PeerReady,
    Ping,
    PingAnswered,
    Pong,
    Publication,
    Publish,
    Refuse,
    Release,
    ReleaseAnswered,
    Released,
    ReleaseReceived,
    Renew,
    RenewAnswered,
    Renewed,
    RenewReceived,
    VersionRange,
    Welcome,
    choose,
)
from handshake.rates import Allowance, ClockOffset, OffsetFilter, Unread
from handshake.states import Occurrence, Progress, Received, Role, Sent, Trigger, advance, budget_s

TEXT_MAX = 1024  # characters of a reason or a remedy on the wire, as ``Text`` bounds them
HEARD_MAX = 256  # characters of a peer's reason or remedy that are passed on: both are logged


def check_introduction(
    role: Role, identity: Identity, publication: Publication, limits: Limits, versions: VersionRange = SUPPORTED
) -> None:
    """Check what each connection will send about us, before any connection depends on it.

    Raises:
        LocalProtocolError: a field is out of bounds, the digest is not the payload's, or a client publishes too much.
    """
    codec.encode(_hello(identity, versions), _said_bytes_max(role, limits))
    codec.encode(Publish(publication=publication), _said_bytes_max(role, limits))


def _said_bytes_max(role: Role, limits: Limits) -> int:
    return limits.client_frame_bytes_max if role is Role.CLIENT else limits.frame_bytes_max


def _heard_bytes_max(role: Role, limits: Limits) -> int:
    return _said_bytes_max(Role.SERVER if role is Role.CLIENT else Role.CLIENT, limits)


def _hello(identity: Identity, versions: VersionRange) -> Hello:
    return Hello(version_min=versions.lowest, version_max=versions.highest, identity=identity)


# What a handshake that takes too long waits for.
_MISSING = {
    (Role.CLIENT, Progress.FRESH): "it accepted the connection, but nothing that speaks this protocol answers",
    (Role.CLIENT, Progress.GREETED): "it has not answered the hello",
    (Role.CLIENT, Progress.WELCOMED): "our publication is not sent",
    (Role.CLIENT, Progress.PUBLISHED): "it has not sent its publication",
    (Role.SERVER, Progress.FRESH): "the peer has sent no hello",
    (Role.SERVER, Progress.GREETED): "our welcome is not sent",
    (Role.SERVER, Progress.WELCOMED): "our publication is not sent",
    (Role.SERVER, Progress.PUBLISHED): "the peer has not sent its publication",
}


class Giving(Struct, frozen=True):
    """What makes a client's pass, and the report that a client asks for; None gives none."""

    make_pass: Callable[[Identity], bytes] | None = None
    make_report: Callable[[], bytes] | None = None


NOTHING_GIVEN = Giving()


class Conversation:
    """One end of one connection. Our introduction has passed ``check_introduction``.

    Attributes:
        rtt_s: seconds of the last round trip; the handshake is the first. None before.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        publication: Publication,
        *,
        limits: Limits,
        now: float,
        versions: VersionRange = SUPPORTED,
        allowance: Allowance | None = None,
        wall_ahead_s: float = 0.0,
        giving: Giving = NOTHING_GIVEN,
    ) -> None:
        """Begin with nothing said.

        Args:
            role: which end we are.
            identity: of this worker.
            publication: what this worker publishes.
            limits: what the peer may cost.
            now: monotonic seconds.
            versions: of the wire protocol, which this worker speaks.
            allowance: of the peer's key, if other connections share it.
            wall_ahead_s: seconds by which our wall clock is ahead of the monotonic one.
            giving: of a server.
        """
        self.role = role
        self.state = Progress.FRESH
        self.rtt_s: float | None = None
        self._identity = identity
        self._publication = publication
        self._limits = limits
        self._versions = versions
        self._allowance = allowance or Allowance(limits, now)
        self._giving = giving
        self._offsets = OffsetFilter(wall_ahead_s)
        self._partner: Hello | Welcome | None = None
        self._version = 0  # not agreed yet
        self._unread = Unread(limits.outgoing_bytes_max)
        self._open: set[int] = set()  # nonces of the questions that wait for an answer
        self._since_s = now  # start of the handshake; later, when the last word was said
        self._heard_s = now
        self._asked_s = now  # when the last thing that wants an answer was said
        self._outgoing: list[list[bytes]] = []
        self._events: list[HandshakeEvent] = []
        self._ending: Ending | None = None

    @property
    def ending(self) -> Ending | None:
        """How the connection ended, or None while it has not."""
        return self._ending

    @property
    def clock_offset(self) -> ClockOffset | None:
        """How far the peer's wall clock is ahead of ours; None before the first round trip."""
        return self._offsets.best

    def take_outgoing(self) -> list[list[bytes]]:
        """Return the messages to send, each a list of frames, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_events(self) -> list[HandshakeEvent]:
        """Return what happened since the last call, and forget it."""
        events, self._events = self._events, []
        return events

    # What our side does.

    def greet(self, now: float) -> None:
        """Send Hello. Raises ``LocalProtocolError`` on a server, and the second time."""
        self._say(_hello(self._identity, self._versions))
        self._asked_s = now

    def send(self, message: Release | Released | Renew | Renewed | Ask | Answer) -> None:
        """Send a message about leases, a question or an answer.

        Raises:
            Closed: the connection has ended, and every question with it.
            LocalProtocolError: our role or state does not allow it, or a field is out of bounds. The peer speaks no
                version with questions, ``QUESTIONS_MAX`` are open, or not the one that is answered.
        """
        if self._ending is not None:
            raise Closed(f"the connection has ended: {self._ending.reason}")
        if isinstance(message, (Release, Renew)):
            self._say(message)
        elif isinstance(message, (Ask, Answer)):
            self._say_in_turn(message)
        elif isinstance(message, (Released, Renewed)):
            self._give(message)
        else:
            raise LocalProtocolError(f"{type(message).__name__} is not said by the program above")

    def ask(self, now: float, *, report: bool) -> None:
        """Ping the server now, perhaps for its report. ``PingAnswered`` is the answer to the last ping.

        Raises:
            Closed: the connection has ended.
            LocalProtocolError: the connection is not ready.
        """
        if self._ending is not None:
            raise Closed(f"the connection has ended: {self._ending.reason}")
        self._ping(now, report=report or UNSET)

    def close(self, reason: str, now: float) -> None:
        """Leave without a complaint. Does nothing if the connection has ended."""
        if self._ending is None:
            self._leave(Bye(reason=reason[:TEXT_MAX]), ConnectionClosed(reason=reason), now)

    def refuse(self, code: str, reason: str, now: float, *, remedy: str = "") -> None:
        """Leave with a complaint. Does nothing if the connection has ended."""
        if self._ending is None:
            farewell = Refuse(code=str(code), reason=reason[:TEXT_MAX], remedy=remedy[:TEXT_MAX])
            self._leave(farewell, ConnectionFailed(code=str(code), reason=reason, remedy=remedy), now)

    # What happens to us.

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Take one message of the peer."""
        if self.state is Progress.CLOSED:
            return
        self._heard_s = now
        if not self._allowance.messages.take(1, now):
            self._refuse_rate("messages", self._limits.messages_per_s_max, now)
            return
        try:
            message = codec.decode(frames, _heard_bytes_max(self.role, self._limits))
            if self.state is not Progress.CLOSING and isinstance(message, (Bye, Refuse)):
                self._answer_farewell(message, now)
            self._advance(Received(type(message)))
            if self.state is not Progress.CLOSING:
                self._handle(message, now)
            if self._unread.wants_ping and self._ending is None:
                self._ping(now)
        except RemoteProtocolError as error:
            self.refuse(CloseCode.PROTOCOL_VIOLATION, error.message, now, remedy=error.remedy)

    def lost(self, reason: str, *, code: str = CloseCode.CONNECTION_LOST) -> None:
        """Note that the transport is gone."""
        if self.state is not Progress.CLOSED:
            self._advance(Occurrence.LOST)
            self._outgoing.clear()
            self._end(ConnectionFailed(code=str(code), reason=reason))

    def handshake_age(self, now: float) -> float:
        """Return the seconds since the handshake began, until it has ended."""
        return now - self._since_s

    def next_deadline(self) -> float | None:
        """Return when ``handle_deadline`` is due, or None if never."""
        budget = budget_s(self.state, self._limits)
        if budget is None:
            return None
        if self.state is Progress.READY:
            return min(self._heard_s + budget, self._ping_due_s())
        return self._since_s + budget

    def handle_deadline(self, now: float) -> None:
        """Do what is due at ``now``; does nothing if nothing is."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        match self.state:
            case Progress.READY if now >= self._heard_s + self._limits.silence_s_max:
                silence_s = now - self._heard_s
                self.refuse(CloseCode.SILENT, f"nothing was heard for {silence_s:.1f} s", now)
            case Progress.READY:
                self._ping(now)
            case Progress.CLOSING:
                self._advance(Occurrence.EXPIRED)
            case _:
                missing = _MISSING[self.role, self.state]
                reason = f"no handshake within {self._limits.handshake_s:g} s: {missing}"
                self.refuse(CloseCode.HANDSHAKE_TIMEOUT, reason, now)

    # Below, a message was already allowed by the table.

    def _handle(self, message: AnyMessage, now: float) -> None:
        match message:
            case Hello():
                self._welcome(message, now)
            case Welcome():
                self._publish(message, now)
            case Publish():
                self._become_ready(message, now)
            case Release() | Renew():
                self._take_leases(message, now)
            case Released(leases=leases):
                self._events.append(ReleaseAnswered(leases=leases))
            case Renewed(leases=leases, lease_s=lease_s):
                self._events.append(RenewAnswered(leases=leases, lease_s=lease_s))
            case Ping():
                self._answer_ping(message, now)
            case Pong(nonce=nonce, clock_s=clock_s, report=report) if self._unread.on_pong(nonce):
                self._measure(clock_s, now)
                if self.role is Role.CLIENT:
                    self._events.append(PingAnswered(rtt_s=now - self._asked_s, report=report))
            case _:
                self._take_question(message, now)

    def _take_leases(self, message: Release | Renew, now: float) -> None:
        if not self._allowance.leases.take(len(message.leases), now):
            self._refuse_rate("leases", self._limits.leases_per_s_max, now)
        elif isinstance(message, Release):
            self._events.append(ReleaseReceived(leases=message.leases, read=message.read))
        else:
            self._events.append(RenewReceived(leases=message.leases))

    def _welcome(self, hello: Hello, now: float) -> None:
        theirs = VersionRange(hello.version_min, hello.version_max)
        version = choose(self._versions, theirs)
        if version is None:
            reason = f"no common version: this side speaks {self._versions}, the peer {theirs}"
            remedy = "Run releases whose wire versions overlap."
            self.refuse(CloseCode.VERSION_UNSUPPORTED, reason, now, remedy=remedy)
            return
        self._partner = hello
        self._version = version
        self._say(Welcome(version=version, identity=self._identity, clock_s=self._offsets.wall(now)))
        make_pass = self._giving.make_pass
        pass_ = UNSET if make_pass is None else make_pass(hello.identity)
        self._say(Publish(publication=self._publication, pass_=pass_))
        self._asked_s = now

    def _publish(self, welcome: Welcome, now: float) -> None:
        if not self._versions.lowest <= welcome.version <= self._versions.highest:
            raise RemoteProtocolError(
                f"the peer chose version {welcome.version}, offered were {self._versions}", violation="unexpected"
            )
        self._partner = welcome
        self._version = welcome.version
        self._measure(welcome.clock_s, now)
        self._say(Publish(publication=self._publication, clock_s=self._offsets.wall(now)))

    def _become_ready(self, publish: Publish, now: float) -> None:
        assert self._partner is not None, "the table lets no Publish pass before Hello or Welcome"
        if self.role is Role.SERVER:
            self._measure(publish.clock_s, now)
        given = b"" if self.role is Role.SERVER or isinstance(publish.pass_, UnsetType) else publish.pass_
        self._events.append(
            PeerReady(
                identity=self._partner.identity,
                publication=publish.publication,
                version=self._version,
                pass_=given,
            )
        )

    def _ping(self, now: float, report: bool | UnsetType = UNSET) -> None:
        self._asked_s = now
        self._say(Ping(nonce=self._unread.on_ping(), report=report))

    def _answer_ping(self, ping: Ping, now: float) -> None:
        report: bytes | UnsetType = UNSET
        if ping.report is True and self._giving.make_report is not None:
            if not self._allowance.reports.take(1, now):
                self._refuse_rate("questions for a report", self._limits.reports_per_s_max, now)
                return
            report = self._giving.make_report()
        pong = Pong(nonce=ping.nonce, clock_s=self._offsets.wall(now), report=report)
        if report is UNSET:
            self._say(pong)
        else:
            self._give(pong)

    def _take_question(self, message: AnyMessage, now: float) -> None:
        """Take a question or an answer; a late Pong, or a last word, changes state and time only."""
        match message:
            case Ask(nonce=nonce, question=question) if self._may_open(nonce):
                if not self._allowance.questions.take(1, now):
                    self._refuse_rate("questions", self._limits.questions_per_s_max, now)
                    return
                self._open.add(nonce)
                self._events.append(Asked(nonce=nonce, question=question))
            case Answer(nonce=nonce, answer=answer) if nonce in self._open:
                self._open.remove(nonce)
                self._events.append(Answered(nonce=nonce, answer=answer))
            case Ask(nonce=nonce) | Answer(nonce=nonce):
                said = f"version {self._version}, {type(message).__name__} {nonce}, {len(self._open)} questions open"
                raise RemoteProtocolError(f"it came out of turn: {said}", violation="unexpected")
            case _:
                pass

    def _say_in_turn(self, message: Ask | Answer) -> None:
        nonce, asks = message.nonce, isinstance(message, Ask)
        if not (self._may_open(nonce) if asks else nonce in self._open):
            raise LocalProtocolError(f"{type(message).__name__} {nonce} is out of turn, {len(self._open)} are open")
        if isinstance(message, Ask):
            self._say(message)
        else:
            self._give(message)
        self._open ^= {nonce}

    def _may_open(self, nonce: int) -> bool:
        return nonce not in self._open and len(self._open) < QUESTIONS_MAX

    def _measure(self, clock_s: ClockTime | UnsetType, now: float) -> None:
        """Record the round trip that ``_asked_s`` began."""
        self.rtt_s = now - self._asked_s
        if not isinstance(clock_s, UnsetType):
            self._offsets.add(asked_at=self._asked_s, answered_at=now, clock_s=clock_s)

    def _refuse_rate(self, what: str, per_s: float, now: float) -> None:
        reason = f"more than {per_s:g} {what} per second"
        self.refuse(CloseCode.RATE_EXCEEDED, reason, now, remedy="Say more in fewer messages, or say less.")

    def _answer_farewell(self, message: Bye | Refuse, now: float) -> None:
        reason = message.reason[:HEARD_MAX]
        ending: Ending = ConnectionClosed(reason=reason)
        if isinstance(message, Refuse):
            remedy = message.remedy[:HEARD_MAX]
            ending = ConnectionFailed(code=message.code, reason=reason, remedy=remedy, refused=True)
        self._leave(Bye(), ending, now)

    def _leave(self, farewell: Bye | Refuse, ending: Ending, now: float) -> None:
        self._say(farewell)
        self._since_s = now
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        if self._ending is None:
            self._ending = ending
            self._events.append(ending)

    def _say(self, message: AnyMessage) -> None:
        state = advance(self.role, self.state, Sent(type(message)))
        self._outgoing.append(codec.encode(message, _said_bytes_max(self.role, self._limits)))
        self.state = state

    def _give(self, message: Released | Renewed | Answer | Pong) -> None:
        """Say what was asked for. Refuse a client that does not read."""
        self._say(message)
        if self._unread.add(len(self._outgoing[-1][0])):
            reason = f"more than {self._limits.outgoing_bytes_max} bytes of answers are not read"
            self.refuse(CloseCode.CONGESTED, reason, self._heard_s, remedy="Ask less at once, or read sooner.")

    def _advance(self, trigger: Trigger) -> None:
        """Follow the peer or the transport; what the table forbids is the peer's violation."""
        try:
            self.state = advance(self.role, self.state, trigger)
        except LocalProtocolError as error:
            raise RemoteProtocolError(error.message, violation="unexpected") from error

    def _ping_due_s(self) -> float:
        return max(self._heard_s, self._asked_s) + self._limits.ping_interval_s
