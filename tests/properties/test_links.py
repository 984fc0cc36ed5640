"""What is asked on links, and whether an address is worth asking, under every order of events."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from handshake.errors import Closed
from handshake.messages import Answered, ConnectionFailed, LeaseAnswer, RenewAnswered
from kvflow import errors
from kvflow.events import BreakerClosed, BreakerOpened
from kvflow.leases.issuer import Issuer
from kvflow.leases.tickets import RankAddress
from kvflow.rendezvous.dialer import Awaited, Restarted
from kvflow.rendezvous.endpoint import Distrusted, NotDialed, Replaced
from kvflow.worker.connections import (
    BACKOFF_S,
    BACKOFF_S_MAX,
    FAILURES_MAX,
    SUPERSEDED_S,
    Connection,
    Reachability,
)

from .caches import thorough

ENDPOINTS = [f"tcp://127.0.0.1:{port}" for port in (5000, 5001)]
PEERS = [(incarnation, endpoint) for incarnation in "ab" for endpoint in ENDPOINTS]
SIGNED_MS = (None, 1_000, 2_000, 3_000)
LOST = errors.PeerLost("nobody listens")
OTHER_ANSWERS = (
    Replaced("another engine answers"),
    errors.AuthenticationFailed("another secret"),
    errors.PeerRefused("version_unsupported", "too old"),
    errors.ProtocolViolation("rubbish"),
    errors.LayoutMismatch("a", 1, 2),
)
NO_RESULTS = (Distrusted("another key"), NotDialed("files", 1), errors.WorkerClosed("closing"))


def member_of(who, issued_ms):
    incarnation, endpoint = who
    mint = Issuer(
        "prefill-0",
        [RankAddress(0, incarnation * 32, endpoint, "0", 4)],
        sign=lambda payload: bytes(32),
        lease_s=30.0,
        wall_clock=None if issued_ms is None else lambda: issued_ms / 1000,
    )
    return next(mint.offer("r", block_ids=[[1]], num_tokens=1)[0].members())


class AddressModel:
    """One address: how often it was silent since it has answered, for whom, and when it is tried again."""

    def __init__(self):
        self.silences, self.silent_for, self.retry_at, self.is_probed = 0, set(), 0.0, False

    def may_dial(self, who, now):
        is_left_alone = self.silences >= FAILURES_MAX
        untried = who not in self.silent_for
        probes = is_left_alone and not self.is_probed and (untried or now >= self.retry_at)
        self.is_probed |= probes
        return probes or untried or not is_left_alone


class ReachabilityMachine(RuleBasedStateMachine):
    """Tickets of four peers at two addresses are dialed, and every attempt ends in one of all ways."""

    def __init__(self):
        super().__init__()
        self.now, self.events, self.expected = 100.0, [], []
        self.real = Reachability(clock=lambda: self.now, draw=lambda: 0.0, report=self.events.append)
        self.addresses = {endpoint: AddressModel() for endpoint in ENDPOINTS}
        self.closed = {}  # peer -> until when
        self.newest = dict.fromkeys(PEERS, 0)
        self.attempts = []

    @rule(who=st.sampled_from(PEERS), issued_ms=st.sampled_from(SIGNED_MS))
    def dial(self, who, issued_ms):
        member = member_of(who, issued_ms)
        is_newer = (issued_ms or 0) > self.newest[who]
        self.newest[who] = max(self.newest[who], issued_ms or 0)
        until = self.closed.get(who, 0.0)
        address = self.addresses[who[1]]
        expected = None
        if until == math.inf or (self.now < until and not is_newer):
            expected = errors.StaleLease
        else:
            self.closed.pop(who, None)
            if not address.may_dial(who, self.now):
                expected = errors.PeerUnavailable
        if expected is None:
            self.real.require(member)
            self.attempts.append((who, member))
            return
        with pytest.raises(expected) as refused:
            self.real.require(member)
        if expected is errors.PeerUnavailable:
            assert refused.value.retry_after_s == max(0.0, address.retry_at - self.now)

    @rule(who=st.sampled_from(PEERS), times=st.integers(2, 6), pause_s=st.sampled_from((0.0, BACKOFF_S, BACKOFF_S_MAX)))
    def is_tried_in_vain(self, who, times, pause_s):
        for _ in range(times):
            before = len(self.attempts)
            self.dial(who, None)
            if len(self.attempts) > before:
                self.silence(*self.attempts.pop())
            self.now += pause_s

    def end(self, data):
        return self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1)))

    def answered(self, endpoint):
        if self.addresses[endpoint].silences >= FAILURES_MAX:
            self.expected.append(BreakerClosed(endpoint))
        self.addresses[endpoint] = AddressModel()

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def is_silent(self, data):
        self.silence(*self.end(data))

    def silence(self, who, member):
        address = self.addresses[who[1]]
        address.silences += 1
        address.is_probed = False
        address.silent_for.add(who)
        if address.silences >= FAILURES_MAX:
            pause_s = min(BACKOFF_S * 2 ** (address.silences - FAILURES_MAX), BACKOFF_S_MAX) / 2
            address.retry_at = self.now + pause_s
            if address.silences == FAILURES_MAX:
                self.expected.append(BreakerOpened(who[1], FAILURES_MAX, address.retry_at - self.now))
        self.real.on_failed(member, LOST)
        assert self.events == self.expected

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def answers(self, data):
        who, member = self.end(data)
        self.answered(who[1])
        self.real.on_answered(member.address.endpoint)
        assert self.events == self.expected

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), error=st.sampled_from(OTHER_ANSWERS))
    def answers_otherwise(self, data, error):
        who, member = self.end(data)
        self.answered(who[1])
        self.real.on_failed(member, error)
        assert self.events == self.expected

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), error=st.sampled_from(NO_RESULTS))
    def has_no_result(self, data, error):
        who, member = self.end(data)
        self.addresses[who[1]].is_probed = False
        self.real.on_failed(member, error)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def has_restarted(self, data):
        who, member = self.end(data)
        self.closed[who] = max(self.closed.get(who, 0.0), self.now + SUPERSEDED_S)
        self.answered(who[1])
        self.real.on_failed(member, Restarted("it was restarted"))
        assert self.events == self.expected

    @rule(who=st.sampled_from(PEERS))
    def says_goodbye(self, who):
        self.closed[who] = math.inf
        self.real.on_goodbye(member_of(who, None))

    @rule(seconds=st.sampled_from((0.1, BACKOFF_S, 2.0, BACKOFF_S_MAX, SUPERSEDED_S)))
    def time_passes(self, seconds):
        self.now += seconds


ReachabilityMachine.TestCase.settings = settings(thorough, stateful_step_count=40)
TestReachability = ReachabilityMachine.TestCase


KEYS = [(3, 1), (3, 2), 7]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2)),
        st.tuples(st.just("give up"), st.integers(0, 9)),
        st.tuples(st.just("answer"), st.integers(0, 2)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=20,
)


def answer_of(key, number):
    if isinstance(key, int):
        return Answered(nonce=key, answer=b"%d" % number)
    return RenewAnswered(
        lease_s=0.0, leases=(LeaseAnswer(slot=key[0], epoch=key[1], outcome="ended", ended_s=float(number)),)
    )


@given(steps)
def test_an_answer_reaches_all_who_wait_for_it_and_no_other(steps):
    async def go_on():
        for _ in range(4):
            await asyncio.sleep(0)

    async def run():
        awaited, asking, lost = Awaited(lambda code, reason: None), [], False
        for number, (step, which) in enumerate(steps):
            ended = []
            match step:
                case "ask":
                    asking.append((KEYS[which], asyncio.ensure_future(awaited.wait(KEYS[which], 1e6))))
                    ended = asking[-1:] if lost else []
                case "give up" if asking:
                    _, task = asking.pop(which % len(asking))
                    task.cancel()
                case "answer":
                    awaited.on_event(answer_of(KEYS[which], number))
                    ended = [each for each in asking if each[0] == KEYS[which]]
                case "lose":
                    lost, ended = True, list(asking)
                    awaited.on_event(ConnectionFailed(code="lost", reason="it has gone"))
            await go_on()
            for each in ended:
                key, task = each
                asking.remove(each)
                assert task.done()
                if lost:
                    assert isinstance(task.exception(), Closed)
                else:
                    given_to = answer_of(key, number)
                    assert task.result() == (given_to.answer if isinstance(key, int) else given_to.leases[0])
            assert not any(task.done() for _, task in asking)
        for _, task in asking:
            task.cancel()
        await go_on()
        assert not awaited._waiting

    asyncio.run(run())


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_who_waits_for_a_connection_gets_it_whoever_gives_up(gives_up, fails):
    async def run():
        connection = Connection(member_of(PEERS[0], None), 0.0)
        waiting = [asyncio.ensure_future(connection.require_link()) for _ in gives_up]
        await asyncio.sleep(0)
        for task in [task for task, ends in zip(waiting, gives_up, strict=True) if ends]:
            task.cancel()
        await asyncio.sleep(0)
        connection.link = link = object()
        if fails:
            connection.link = None
            connection.fail(LOST)
        else:
            connection.advance("linked")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        for result, ends in zip(results, gives_up, strict=True):
            if ends:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert result is (LOST if fails else link)

    asyncio.run(run())
