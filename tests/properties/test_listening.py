"""A server and its members, told apart by their keys: places, waiting, limits per key, and what is said last.

What they say comes on a modeled wire, and time is virtual.
"""

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from handshake.codec import decode, encode
from handshake.limits import Limits
from handshake.messages import (
    WIRE_VERSION,
    Bye,
    ConnectionFailed,
    Hello,
    LeaseRef,
    Publication,
    Publish,
    Refuse,
    Release,
    Welcome,
)
from handshake.security import AllowedKeys, ClusterSecurity
from handshake.server import HandshakeServer
from handshake.sockets import Delivery, ZeroMqNetwork
from tests.fakes import Process, World
from tests.fakes.process import bury

from .caches import thoroughly
from .test_conversation import CLIENT, SERVER, Rate

KEYS = ("a" * 64, "b" * 64, "c" * 64)
PLACES, OF_KEY, MESSAGES_PER_S, HANDSHAKE_S = 3, 3, 10_000, 8.0  # the rate is for test_intake and test_conversation
RELEASES = 6
"""Most in a row."""
LIMITS = Limits(
    peers_max=PLACES,
    connections_per_key_max=OF_KEY,
    messages_per_s_max=MESSAGES_PER_S,
    pending_handshakes_max=1,
    handshake_grace_s=0.001,
    handshake_s=HANDSHAKE_S,
    ping_interval_s=1e6,
    silence_s_max=1e7,
)
SETTLED_S = 1.0 / 64  # for the iterations of the loop that follow from what was said
SECURITY = ClusterSecurity.from_secret("a secret of the tests")


def said(message):
    return encode(message, 1 << 16)


HELLO = said(Hello(version_min=WIRE_VERSION, version_max=WIRE_VERSION, identity=CLIENT))
PUBLISH = said(Publish(publication=Publication.of(b"")))
RELEASE = said(Release(read=True, leases=(LeaseRef(slot=0, epoch=1),)))


class Wire(ZeroMqNetwork):
    """What the server says, by connection, and its clock."""

    def __init__(self, process):
        self.now, self.wall, self.sent, self.strangers = process.time, process.wall, {}, {}

    def send(self, frames):
        self.sent.setdefault(frames[0], []).append(decode(frames[1:], 1 << 22))
        return Delivery.QUEUED


class Member:
    """One connection: its number, its key, and how far it has come."""

    def __init__(self, number, key):
        self.name, self.key = b"%d" % number, key
        self.state = "new"  # then "waiting", "greeted", "ready", "over"
        self.deadline = math.inf
        self.code = None  # of its refusal


class ListeningMachine(RuleBasedStateMachine):
    """Every member is served as its key allows, in its turn, whatever the others do."""

    def __init__(self):
        super().__init__()
        self.world = World(1)
        self.process = Process(self.world, "server", "10.0.0.1", began_s=0.0, skew_s=0.0)
        self.wire, self.allowed = Wire(self.process), AllowedKeys(KEYS)
        self.failures = {}
        self.members, self.rates = [], {}
        self.dismissed = []  # and when; those of one moment in any order
        self.server = None
        self.call(self.open)

    def open(self):
        self.server = HandshakeServer(
            self.wire,
            SERVER,
            Publication.of(b"manifest"),
            self.on_event,
            LIMITS,
            security=SECURITY.with_own_key(bytes(31) + b"k", self.allowed),
            network=self.wire,
        )

    def on_event(self, key, event):
        if isinstance(event, ConnectionFailed):
            name = bytes.fromhex(key)
            assert name not in self.failures, "a connection ends once"
            self.failures[name] = event.code

    def call(self, function, *arguments):
        """Call on the loop, and let it do what follows. Time stands at multiples of 1/64 s between calls."""
        before = self.world.now
        self.process.call_soon(function, *arguments)
        self.let_pass(before + SETTLED_S)

    def let_pass(self, until):
        self.world.run(lambda: False, until)
        if self.world.violation is not None:
            raise self.world.violation
        self.world.now = until

    # What is to be expected.

    def of(self, *states):
        return [each for each in self.members if each.state in states]

    def takes(self, member, now):
        """Count a message of its key; refuse the member if that is one too many."""
        if self.rates.setdefault(member.key, Rate(MESSAGES_PER_S)).takes(now):
            return True
        self.refuse(member, "rate_exceeded")
        return False

    def refuse(self, member, code):
        if member.state != "over":
            member.code = code
        self.dismiss(member)

    def dismiss(self, member):
        if member.state != "over":
            self.dismissed.append((self.world.now, member))
        member.state, member.deadline = "over", math.inf

    def seat(self, member, now):
        """Admit a newcomer, and take what it has said."""
        member.state, member.deadline = "greeted", now + HANDSHAKE_S
        if self.takes(member, now):
            self.greeted.append(member)

    def seat_waiting(self, now):
        while (waiting := self.of("waiting")) and len(self.of("greeted", "ready")) < PLACES:
            self.seat(waiting[0], now)

    def look(self):
        """Compare everything that can be seen from outside."""
        for member in self.members:
            heard = self.wire.sent.get(member.name, [])
            codes = [each.code for each in heard if isinstance(each, Refuse)]
            assert codes == ([member.code] if member.code else []), (member.name, member.state)
            welcomed = any(isinstance(each, Welcome) for each in heard)
            assert welcomed == (member in self.greeted), (member.name, member.state)
        ready = [each.name for each in self.of("ready")]
        assert sorted(bytes.fromhex(peer.key) for peer in self.server.peers) == sorted(ready)

    greeted = ()

    def hear(self, member, frames):
        before, self.greeted = self.process.time(), list(self.greeted)
        answers = []

        def receive():
            answers.append((self.server.receive([member.name, *frames], member.key), self.process.time()))

        self.call(receive)
        (is_heard, now) = answers[0]
        assert is_heard == (member.state != "over")
        assert now < before + SETTLED_S
        return before

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def come(self, key, count):
        for _ in range(count):
            member = Member(len(self.members), key)
            self.members.append(member)
            held = [each for each in self.of("waiting", "greeted", "ready") if each.key == key]
            objection = None
            if key not in self.allowed:
                objection = "key_removed"
            elif len(held) >= OF_KEY:
                objection = "too_many_connections"
            is_full = bool(self.of("waiting")) or len(self.of("greeted", "ready")) >= PLACES
            now = self.hear(member, HELLO)
            if objection is not None:
                self.refuse(member, objection)
                self.takes(member, now)
            elif is_full:
                member.state, member.deadline = "waiting", now + HANDSHAKE_S / 2
            else:
                self.seat(member, now)
            self.seat_waiting(now)
            self.look()

    @precondition(lambda self: self.of("greeted"))
    @rule(which=st.integers(0, 9))
    def become_ready(self, which):
        member = self.of("greeted")[which % len(self.of("greeted"))]
        now = self.hear(member, PUBLISH)
        if self.takes(member, now):
            member.state, member.deadline = "ready", math.inf
        self.seat_waiting(now)
        self.look()

    @precondition(lambda self: self.of("ready"))
    @rule(which=st.integers(0, 9), count=st.integers(1, RELEASES))
    def release(self, which, count):
        member = self.of("ready")[which % len(self.of("ready"))]
        for _ in range(count):
            if member.state == "ready":
                now = self.hear(member, RELEASE)
                self.takes(member, now)
                self.seat_waiting(now)
        self.look()

    @precondition(lambda self: self.of("greeted", "ready"))
    @rule(which=st.integers(0, 9), frames=st.sampled_from(([b"garbage"], said(Bye(reason="done")))))
    def end(self, which, frames):
        """A member that leaves, or breaks the protocol, makes room for the one that has waited longest."""
        there = self.of("greeted", "ready")
        member = there[which % len(there)]
        now = self.hear(member, frames)
        if self.takes(member, now) and frames == [b"garbage"]:
            self.refuse(member, "protocol_violation")
        self.dismiss(member)
        self.seat_waiting(now)
        self.look()

    @precondition(lambda self: self.dismissed)
    @rule(which=st.integers(0, 9))
    def go_on_after_the_end(self, which):
        """Who was dismissed is told nothing more. Of those that were, as many are remembered as have places."""
        known = [
            member
            for when, member in self.dismissed[-PLACES:]
            if sum(other >= when for other, _ in self.dismissed) <= PLACES
        ]
        if known:
            self.hear(known[which % len(known)], HELLO)
            self.look()

    @precondition(lambda self: self.of("waiting"))
    @rule(which=st.integers(0, 9))
    def say_more_while_waiting(self, which):
        member = self.of("waiting")[which % len(self.of("waiting"))]
        now = self.hear(member, HELLO)
        self.refuse(member, "too_many_peers")
        self.takes(member, now)
        self.seat_waiting(now)
        self.look()

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def allow(self, keys):
        """Who is no longer allowed is refused, and its limit forgotten."""
        self.allowed.replace(keys)
        now = self.process.time()
        self.call(self.server.recheck_keys)
        self.rates = {key: rate for key, rate in self.rates.items() if key in keys}
        for member in self.of("waiting", "greeted", "ready"):
            if member.key not in keys:
                waits = member.state == "waiting"
                self.refuse(member, "key_removed")
                if waits:
                    self.takes(member, now)
        self.seat_waiting(now)
        self.look()

    @rule(seconds=st.sampled_from((0.25, 1.0, HANDSHAKE_S / 2, HANDSHAKE_S)))
    def time_passes(self, seconds):
        until = self.world.now + seconds
        while True:
            due = min((each.deadline for each in self.members), default=math.inf)
            if due >= until:
                break
            self.let_pass(due + SETTLED_S)
            until = max(until, due + SETTLED_S)
            for member in [each for each in self.members if each.deadline == due]:
                if member.state == "waiting":
                    self.refuse(member, "too_many_peers")
                    self.takes(member, due)
                else:
                    self.refuse(member, "handshake_timeout")
            self.seat_waiting(due)
            self.look()
        self.let_pass(until)
        self.look()

    def teardown(self):
        bury(self.world)


ListeningMachine.TestCase.settings = thoroughly(100, least=60, stateful_step_count=30)
TestListening = ListeningMachine.TestCase
