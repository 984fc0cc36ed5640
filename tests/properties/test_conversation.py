"""Both ends of a control connection over a wire that holds messages back: pings, questions, rates and last words."""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from handshake.codec import decode, encode
from handshake.connection import Conversation
from handshake.errors import CloseCode, Closed, LocalProtocolError
from handshake.limits import QUESTIONS_MAX, Limits
from handshake.messages import (
    SUPPORTED,
    WIRE_VERSION,
    Answer,
    Answered,
    Ask,
    Asked,
    ConnectionFailed,
    Hello,
    Identity,
    PeerReady,
    Ping,
    PingAnswered,
    Pong,
    Publication,
    Refuse,
)
from handshake.states import Progress, Role

from .caches import thoroughly

PING_S, SILENCE_S, CLOSING_S = 4.0, 10.0, 0.5
UNREAD_MAX = 4000
SERVER = Identity(engine_id="p", rank=0, num_ranks=1, incarnation="0" * 31 + "1", role="prefill", software="1")
CLIENT = Identity(engine_id="d", rank=0, num_ranks=1, incarnation="0" * 31 + "2", role="decode", software="1")
ROLES = st.sampled_from(Role)


def other(role):
    return Role.SERVER if role is Role.CLIENT else Role.CLIENT


class Rate:
    """What may be taken: in no stretch of time more than comes back in it, and one second's worth."""

    def __init__(self, per_s):
        self.per_s, self.times = per_s, []

    def takes(self, now):
        counts = enumerate(reversed([*self.times, now]), 1)
        if len(self.times) >= self.per_s and any(count > self.per_s * (1.0 + now - since) for count, since in counts):
            return False
        self.times.append(now)
        return True


class ConversationMachine(RuleBasedStateMachine):
    """Each end says what it must, when it must, and counts of the other what its words show."""

    @initialize(questions_per_s=st.sampled_from((4.0, 1e6)))
    def begin(self, questions_per_s):
        limits = Limits(
            ping_interval_s=PING_S,
            silence_s_max=SILENCE_S,
            closing_s=CLOSING_S,
            outgoing_bytes_max=UNREAD_MAX,
            questions_per_s_max=questions_per_s,
        )
        self.limits, self.now = limits, 64.0
        self.ends = {
            role: Conversation(role, identity, Publication.of(b"all"), limits=limits, now=self.now)
            for role, identity in ((Role.CLIENT, CLIENT), (Role.SERVER, SERVER))
        }
        self.wires = {role: deque() for role in Role}  # what is under way to each
        self.events = {role: [] for role in Role}
        self.pings = {role: [] for role in Role}  # (nonce, when) of each that was said
        self.left_at = dict.fromkeys(Role)
        self.rtt_s = dict.fromkeys(Role)
        self.asked = {role: set() for role in Role}  # the questions that are open at this end
        self.said_bytes = self.shown_bytes = self.at_ping = 0
        self.congested = False  # then nobody waits for the last word of who does not read
        self.questions, self.nonces = Rate(questions_per_s), 0
        self.ends[Role.CLIENT].greet(self.now)
        self.pump(Role.CLIENT)
        for _ in range(4):
            for role in Role:
                self.deliver(role, 9)
        assert {end.state for end in self.ends.values()} == {Progress.READY}
        assert [[type(event) for event in self.events[role]] for role in Role] == [[PeerReady]] * 2
        self.rtt_s = dict.fromkeys(Role, 0.0)

    def is_up(self, role):
        return self.left_at[role] is None

    def pump(self, role):
        """Take what an end says and tells."""
        end = self.ends[role]
        for frames in end.take_outgoing():
            message = decode(frames, self.limits.frame_bytes_max)
            self.wires[other(role)].append(frames)
            if isinstance(message, Ping):
                assert not self.pings[role] or message.nonce != self.pings[role][-1][0]
                self.pings[role].append((message.nonce, self.now))
                if role is Role.SERVER:
                    self.at_ping = self.said_bytes
        self.events[role] += end.take_events()
        if end.ending is not None and self.is_up(role):
            self.left_at[role] = self.now
        if end.state is Progress.CLOSING and not self.congested:
            assert end.next_deadline() == self.left_at[role] + CLOSING_S, "the other side has its time"

    @rule(role=ROLES, count=st.integers(1, 4))
    def deliver(self, role, count):
        for _ in range(min(count, len(self.wires[role]))):
            frames = self.wires[role].popleft()
            message, end, was_up = decode(frames, self.limits.frame_bytes_max), self.ends[role], self.is_up(role)
            expected = self.hears(role, message) if was_up else None
            before = len(self.events[role])
            end.receive(frames, self.now)
            self.pump(role)
            if not was_up or self.rtt_s[role] is None:
                continue
            assert end.rtt_s == self.rtt_s[role]
            new = self.events[role][before:]
            match expected:
                case None:
                    assert not any(isinstance(event, Asked | Answered | PingAnswered) for event in new)
                case CloseCode():
                    assert [event.code for event in new if isinstance(event, ConnectionFailed)] == [expected]
                case _:
                    assert new == [expected]

    def is_out_of_turn(self, opened, message):
        """Tell whether a question may not be opened, or one is answered that is not open."""
        if isinstance(message, Answer):
            return message.nonce not in opened
        return message.nonce in opened or len(opened) == QUESTIONS_MAX

    def hears(self, role, message):
        """Return what an end has to tell of a message, or why it ends."""
        match message:
            case Pong(nonce=nonce) if self.pings[role] and nonce == self.pings[role][-1][0]:
                self.rtt_s[role] = self.now - self.pings[role][-1][1]
                if role is Role.CLIENT:
                    return PingAnswered(rtt_s=self.rtt_s[role])
                self.shown_bytes = self.at_ping
            case Ask() | Answer() if self.is_out_of_turn(self.asked[role], message):
                return CloseCode.PROTOCOL_VIOLATION
            case Ask(nonce=nonce, question=question):
                if not self.questions.takes(self.now):
                    return CloseCode.RATE_EXCEEDED
                self.asked[role].add(nonce)
                return Asked(nonce=nonce, question=question)
            case Answer(nonce=nonce, answer=answer):
                self.asked[role].remove(nonce)
                return Answered(nonce=nonce, answer=answer)
        return None

    @precondition(lambda self: self.is_up(Role.CLIENT))
    @rule(count=st.sampled_from((1, 1, 2, 3, 3, QUESTIONS_MAX)))
    def ask(self, count):
        for _ in range(count):
            self.nonces += 1
            question, opened = Ask(nonce=self.nonces, question=b"?"), self.asked[Role.CLIENT]
            if len(opened) == QUESTIONS_MAX:
                with pytest.raises(LocalProtocolError):
                    self.ends[Role.CLIENT].send(question)
                return
            self.ends[Role.CLIENT].send(question)
            opened.add(self.nonces)
            self.pump(Role.CLIENT)

    @precondition(lambda self: self.is_up(Role.SERVER))
    @rule(count=st.sampled_from((1, QUESTIONS_MAX)), again=st.booleans(), seldom=st.integers(0, 5))
    def ask_without_regard(self, count, again, seldom):
        """A member that means harm counts nothing."""
        if seldom:
            return
        for _ in range(count):
            self.nonces += not again
            self.wires[Role.SERVER].append(encode(Ask(nonce=self.nonces, question=b"!"), 1 << 16))
        self.deliver(Role.SERVER, len(self.wires[Role.SERVER]))

    @precondition(lambda self: self.is_up(Role.SERVER) and self.asked[Role.SERVER])
    @rule(nbytes=st.sampled_from((10, 600, 1500)), which=st.integers(0, 9))
    def answer(self, nbytes, which):
        """A client that has not shown to have read its answers gets no more of them."""
        opened = sorted(self.asked[Role.SERVER])
        answer = Answer(nonce=opened[which % len(opened)], answer=bytes(nbytes))
        self.ends[Role.SERVER].send(answer)
        self.asked[Role.SERVER].discard(answer.nonce)
        self.said_bytes += len(encode(answer, 1 << 16)[0])
        self.congested = self.said_bytes - self.shown_bytes > UNREAD_MAX
        self.pump(Role.SERVER)
        codes = [event.code for event in self.events[Role.SERVER] if isinstance(event, ConnectionFailed)]
        assert codes == ([CloseCode.CONGESTED] if self.congested else [])

    @precondition(lambda self: self.is_up(Role.CLIENT))
    @rule()
    def ping(self):
        self.ends[Role.CLIENT].ask(self.now, report=False)
        self.pump(Role.CLIENT)

    @rule(role=ROLES, seldom=st.integers(0, 9))
    def leave(self, role, seldom):
        if seldom:
            return
        self.ends[role].close("it is over", self.now)
        self.pump(role)
        with pytest.raises(Closed):
            self.ends[role].send(Ask(nonce=0, question=b"?") if role is Role.CLIENT else Answer(nonce=0, answer=b""))

    @rule(eighths=st.sampled_from((1, 2, 4, 8, 20, 36)))
    def time_passes(self, eighths):
        """A silent member is pinged, then dropped: in time, and once."""
        until = self.now + eighths / 8
        while True:
            due = {role: end.next_deadline() for role, end in self.ends.items()}
            role = min(Role, key=lambda each: due[each] if due[each] is not None else float("inf"))
            if due[role] is None or due[role] > until:
                break
            self.now = max(self.now, due[role])
            before, pinged = self.ends[role].state, len(self.pings[role])
            self.ends[role].handle_deadline(self.now)
            self.pump(role)
            after = self.ends[role].next_deadline()
            assert after is None or after > self.now, "what was due has been done"
            if len(self.pings[role]) > pinged > 0:
                assert self.pings[role][-1][1] - self.pings[role][-2][1] >= PING_S
            if before is Progress.CLOSING:
                assert self.ends[role].state is Progress.CLOSED
        self.now = until


ConversationMachine.TestCase.settings = thoroughly(100, stateful_step_count=40)
TestConversation = ConversationMachine.TestCase


@pytest.mark.parametrize("version", sorted({1, WIRE_VERSION - 1, WIRE_VERSION, WIRE_VERSION + 1} - {0}))
def test_one_version_is_spoken_and_every_other_is_named(version):
    server = Conversation(Role.SERVER, SERVER, Publication.of(b""), limits=Limits(), now=0.0)
    server.receive(encode(Hello(version_min=version, version_max=version, identity=CLIENT), 1 << 16), 0.0)
    first, *_ = [decode(frames, 1 << 20) for frames in server.take_outgoing()]
    assert (getattr(first, "code", None) == CloseCode.VERSION_UNSUPPORTED) == (version != WIRE_VERSION)
    if isinstance(first, Refuse):
        assert f"this side speaks {SUPPORTED.lowest}..{SUPPORTED.highest}" in first.reason
        assert f"the peer {version}..{version}" in first.reason
