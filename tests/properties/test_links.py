"""What is asked on links, and whether an address is worth asking, under every order of events."""

import asyncio
import math
from collections import OrderedDict
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from handshake.errors import Closed
from handshake.messages import Answered, ConnectionFailed, LeaseAnswer, RenewAnswered
from kvflow import errors
from kvflow.events import BreakerClosed, BreakerOpened
from kvflow.rendezvous.dialer import Awaited, Restarted
from kvflow.rendezvous.endpoint import Distrusted, NotDialed, Replaced
from kvflow.worker import askers
from kvflow.worker.askers import PrefixReader
from kvflow.worker.connections import (
    BACKOFF_S,
    BACKOFF_S_MAX,
    FAILURES_MAX,
    SUPERSEDED_S,
    Connection,
    Reachability,
)
from tests.helpers.members import member_of

from .caches import thoroughly

ENDPOINTS = [f"tcp://127.0.0.1:{port}" for port in (5000, 5001)]
PEERS = [(incarnation, endpoint) for incarnation in "ab" for endpoint in ENDPOINTS]
SIGNED_MS = (None, 1_000, 2_000, 3_000)
LOST = errors.PeerLost("nobody listens")
SILENCES = (
    LOST,
    errors.DeadlineExceeded("silence", phase="connect"),
    errors.DeadlineExceeded("silence", phase="handshake"),
    errors.TransferFailed("the data plane cannot connect"),
    ValueError("a defect"),
)
OTHER_ANSWERS = (
    Replaced("another engine answers"),
    errors.AuthenticationFailed("another secret"),
    errors.PeerRefused("version_unsupported", "too old"),
    errors.ProtocolViolation("rubbish"),
    errors.LayoutMismatch("a", 1, 2),
)
NO_RESULTS = (
    Distrusted("another key"),
    NotDialed("files", 1),
    errors.WorkerClosed("closing"),
    errors.ConfigInvalid("malformed"),
    errors.TransferCancelled("given up"),
)


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
            retry_after_s = max(0.0, address.retry_at - self.now)
            assert refused.value.retry_after_s == retry_after_s
            when = "is being tried right now" if address.is_probed else f"is tried in {retry_after_s:.1f} s"
            assert f"{who[1]} has failed {address.silences} times in a row, and {when}" in refused.value.message

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
    @rule(data=st.data(), error=st.sampled_from(SILENCES))
    def is_silent(self, data, error):
        self.silence(*self.end(data), error)

    def silence(self, who, member, error=LOST):
        address = self.addresses[who[1]]
        address.silences += 1
        address.is_probed = False
        address.silent_for.add(who)
        if address.silences >= FAILURES_MAX:
            pause_s = min(BACKOFF_S * 2 ** (address.silences - FAILURES_MAX), BACKOFF_S_MAX) / 2
            address.retry_at = self.now + pause_s
            if address.silences == FAILURES_MAX:
                self.expected.append(BreakerOpened(who[1], FAILURES_MAX, address.retry_at - self.now))
        self.real.on_failed(member, error)
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


ReachabilityMachine.TestCase.settings = thoroughly(100, stateful_step_count=40)
TestReachability = ReachabilityMachine.TestCase


KEYS = [(3, 1), 7]
ASKS = ("ask", "ask", "ask", "answer", "give up")
steps = st.lists(st.tuples(st.sampled_from(ASKS), st.integers(0, 3)), min_size=5, max_size=20)


def answer_of(key, number):
    if isinstance(key, int):
        return Answered(nonce=key, answer=b"%d" % number)
    return RenewAnswered(
        lease_s=0.0, leases=(LeaseAnswer(slot=key[0], epoch=key[1], outcome="ended", ended_s=float(number)),)
    )


@given(steps, st.booleans())
def test_an_answer_reaches_all_who_wait_for_it_and_no_other(steps, is_lost):
    async def go_on():
        for _ in range(4):
            await asyncio.sleep(0)

    async def run():
        awaited, asking, lost = Awaited(lambda code, reason: None), [], False
        for number, (step, which) in enumerate(steps + [("lose", 0), ("ask", 0)] * is_lost):
            ended, key = [], KEYS[which % len(KEYS)]
            match step:
                case "ask":
                    asking.append((key, asyncio.ensure_future(awaited.wait(key, 1e6))))
                    ended = asking[-1:] if lost else []
                case "give up" if asking:
                    _, task = asking.pop(which % len(asking))
                    task.cancel()
                case "answer":
                    awaited.on_event(answer_of(key, number))
                    ended = [each for each in asking if each[0] == key]
                case "lose":
                    lost, ended = True, list(asking)
                    awaited.on_event(ConnectionFailed(code="lost", reason="it has gone"))
            await go_on()
            for each in ended:
                asking.remove(each)
                task = each[1]
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


class Dial:
    """One connection that is dialed, in place of an ``Asker``."""

    def __init__(self):
        self.opened, self.ended = asyncio.Event(), asyncio.Event()
        self.error, self.is_over = None, False

    async def wait_ended(self):
        await self.ended.wait()


asks = st.tuples(st.sampled_from(["ask", "ask", "ask", "ask", "open", "fail", "end"]), st.sampled_from("abc"))
ASKERS_MAX = 2


@given(st.lists(st.one_of(asks, asks, st.tuples(st.just("give up"), st.integers(0, 9))), min_size=8, max_size=25))
def test_an_endpoint_has_one_connection_and_the_longest_unused_ends(steps):
    dials = {}

    @asynccontextmanager
    async def dial(endpoint, *_, **__):
        made = Dial()
        dials.setdefault(endpoint, []).append(made)
        try:
            await made.opened.wait()
            if made.error is not None:
                raise made.error
            yield made
        finally:
            made.is_over = True

    async def run(tasks):
        used: OrderedDict[str, Dial] = OrderedDict()  # that which was used longest ago first
        pool, asking, num_dials = PrefixReader(tasks, None, ASKERS_MAX), [], 0
        for step, which in steps:
            done = {}  # who must have an answer now, and which
            match step:
                case "ask":
                    asking.append((which, asyncio.ensure_future(pool._connect(which))))
                    num_dials += which not in used
                    await turns()
                    used[which] = dials[which][-1]
                    used.move_to_end(which)
                    if used[which].opened.is_set():
                        done = {which: used[which]}
                    if len(used) > ASKERS_MAX:
                        gone, ended = used.popitem(last=False)
                        assert ended.is_over
                        done[gone] = errors.WorkerClosed
                case "give up" if asking:
                    asking.pop(which % len(asking))[1].cancel()
                case "open" if which in used:
                    used[which].opened.set()
                    done = {which: used[which]}
                case "fail" if which in used and not used[which].opened.is_set():
                    failed = used.pop(which)
                    failed.error = LOST
                    failed.opened.set()
                    done = {which: errors.PeerLost}
                case "end" if which in used and used[which].opened.is_set():
                    used.pop(which).ended.set()
            await turns()
            assert sum(map(len, dials.values())) == num_dials
            assert {each for several in dials.values() for each in several if not each.is_over} == set(used.values())
            for endpoint, task in [each for each in asking if each[0] in done]:
                expected = done[endpoint]
                assert (task.result() if isinstance(expected, Dial) else type(task.exception())) is expected
            asking = [each for each in asking if each[0] not in done]
            assert not any(task.done() for _, task in asking)
        pool.close()

    async def turns():
        for _ in range(6):
            await asyncio.sleep(0)

    async def all_over():
        async with asyncio.TaskGroup() as tasks:
            await run(tasks)
        assert all(each.is_over for several in dials.values() for each in several)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(askers, "open_asker", dial)
        asyncio.run(all_over())


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
