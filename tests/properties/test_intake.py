"""A connection is cut when more of it is held than may be, and for no other reason: real sockets, and a model of bytes.

ZeroMQ's part is played: it reads from the kernel, hands messages over, and closes what it likes when it likes.
"""

import os
import socket

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from handshake.intake import SLACK_BYTES, SWEEP_S, Intake, watched
from tests.fakes import Process, World
from tests.fakes.process import bury
from tests.helpers.waiting import PATIENCE_S
from tests.unit.handshake.test_intake import Pair

from .caches import thoroughly

HELD_MAX = 1000
SIZES = st.sampled_from((1, 400, 600, 999, 1000, 1001))


class Connected(Pair):
    """Both ends of one connection. ``held``: bytes that were read and not handed over; None: nobody counts it."""

    def __init__(self, listening):
        super().__init__(listening)
        self.held, self.read, self.is_over = None, 0, False


class IntakeMachine(RuleBasedStateMachine):
    """Some connections of one socket."""

    def __init__(self):
        super().__init__()
        self.listening = socket.create_server(("127.0.0.1", 0))
        endpoint = "tcp://{}:{}".format(*self.listening.getsockname())
        self.cut = []
        self.intake = Intake(HELD_MAX - SLACK_BYTES, lambda: endpoint, self.cut.append, listens=True)
        self.connections, self.expected = [], []

    def live(self):
        return [each for each in self.connections if not each.is_over]

    @precondition(lambda self: len(self.live()) < 3)
    @rule(is_told=st.booleans())
    def connect(self, is_told):
        self.connections.append(Connected(self.listening))
        if is_told:
            self.tell(self.connections[-1])

    def tell(self, connection):
        self.intake.opened(connection.ours.fileno())
        if connection.held is None:
            connection.held = 0

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9))
    def be_told_again(self, which):
        """ZeroMQ's monitor tells of a connection at any time; what came before is not counted."""
        connection = self.live()[which % len(self.live())]
        if connection.held is None and connection.read:
            return
        self.tell(connection)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9), nbytes=SIZES)
    def read(self, which, nbytes):
        connection = self.live()[which % len(self.live())]
        connection.send(nbytes)
        connection.read += nbytes
        if connection.held is not None:
            connection.held += nbytes

    @precondition(lambda self: any(each.held for each in self.live()))
    @rule(which=st.integers(0, 9), is_all=st.booleans())
    def hand_over(self, which, is_all):
        held = [each for each in self.live() if each.held]
        connection = held[which % len(held)]
        nbytes = connection.held if is_all else (connection.held + 1) // 2
        self.intake.took(connection.ours.fileno(), nbytes)
        connection.held -= nbytes

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9))
    def have_another_connection_at_its_descriptor(self, which):
        """A connection has ended, and another one has its number: nothing that was counted is the other's."""
        connection = self.live()[which % len(self.live())]
        other = Connected(self.listening)
        os.dup2(other.ours.fileno(), connection.ours.fileno())
        other.ours.close()
        connection.theirs.close()
        connection.theirs, connection.held, connection.read = other.theirs, None, 0
        self.tell(connection)

    @rule()
    def sweep(self):
        for each in self.live():
            if (each.held or 0) > HELD_MAX:
                each.is_over = True
                self.expected.append("{}:{}".format(*each.theirs.getsockname()))
        self.intake.sweep()
        assert sorted(self.cut) == sorted(self.expected)
        for each in self.connections:
            assert each.is_cut(PATIENCE_S if each.is_over else 0.0) == each.is_over
        assert len(self.intake) == sum(each.held is not None for each in self.live())

    def teardown(self):
        for each in self.connections:
            each.close()
        self.listening.close()


IntakeMachine.TestCase.settings = thoroughly(60, stateful_step_count=25)
TestIntake = IntakeMachine.TestCase


class Counted(Intake):
    """One that counts how often it is swept."""

    def __init__(self):
        super().__init__(1, str, listens=True)
        self.sweeps = 0

    def sweep(self):
        self.sweeps += 1


class WatchMachine(RuleBasedStateMachine):
    """Each intake is swept all the time that it is watched, and never before or afterwards."""

    def __init__(self):
        super().__init__()
        self.world = World(1)
        self.process = Process(self.world, "worker", "10.0.0.1", began_s=0.0, skew_s=0.0)
        self.intakes = [Counted() for _ in range(3)]
        self.watches, self.since = {}, {}

    def call(self, function):
        self.process.call_soon(function)
        self.let_pass(0.001)

    def let_pass(self, seconds):
        before = [each.sweeps for each in self.intakes]
        self.world.run(lambda: False, self.world.now + seconds)
        assert self.world.violation is None
        for at, each in enumerate(self.intakes):
            swept = each.sweeps - before[at]
            most = seconds / SWEEP_S + 1
            assert swept <= (most if at in self.watches else 0)
            if seconds >= 2 * SWEEP_S and at in self.watches:
                assert swept >= seconds / SWEEP_S - 2

    @rule(which=st.integers(0, 2))
    def watch_or_not(self, which):
        if which in self.watches:
            left = self.watches.pop(which)
            self.call(lambda: left.__exit__(None, None, None))
        else:
            entered = watched(self.intakes[which])
            self.watches[which] = entered
            self.call(entered.__enter__)

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0)))
    def time_passes(self, seconds):
        self.let_pass(seconds)

    def teardown(self):
        for left in self.watches.values():
            self.process.call_soon(left.__exit__, None, None, None)
        self.watches = {}
        self.world.run(lambda: False, self.world.now + 1.0)
        bury(self.world)


WatchMachine.TestCase.settings = thoroughly(40, stateful_step_count=20)
TestWatch = WatchMachine.TestCase
