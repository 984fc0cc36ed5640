"""Leases last as long as somebody needs them, and no longer: a reader and its producers on virtual time."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, KvflowError
from kvflow.events import LeaseEnded
from kvflow.worker import renewals
from tests.unit.kvflow.worker.virtual import virtual

from .caches import thoroughly

SLACK_S = 0.2  # a tick, and the way of a message
RENEWED_S = 2 * renewals.TICK_S + 0.005  # after so long a ticket that is held has been renewed
COMPUTE_LEASES = 4  # durations of a lease for which one request holds a ticket
HOLDS_MAX = 3
NAMES = ("a", "b", "c", "d")


class Offer:
    """A ticket, and since when each request holds it.

    While nobody does, its lease lasts at least until ``lasts_until``, and at most for one more after ``free_since``.
    """

    def __init__(self, ticket, now, lease_s):
        self.ticket, self.holders, self.outcome = ticket, {}, None
        self.let_go(now, now + lease_s)

    def let_go(self, free_since, lasts_until):
        self.free_since, self.lasts_until = free_since, lasts_until

    def is_held_from(self, now):
        """Tell whether a request that begins to hold it is in time."""
        return bool(self.holders) or now + RENEWED_S < self.lasts_until


class HoldingMachine(RuleBasedStateMachine):
    """Requests hold tickets, let them go, read them, or forget them."""

    @initialize(ranks=st.integers(1, 2), lease_s=st.sampled_from((6.0, 6.0, 0.06)), busy=st.booleans())
    def begin(self, ranks, lease_s, busy):
        """``busy``: some other ticket is held all the time."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(renewals, "HELD_MAX", (HOLDS_MAX + busy) * ranks)
        self.lease_s, self.ranks = lease_s, ranks
        self.compute_s = COMPUTE_LEASES * lease_s
        self.context = virtual(ranks=ranks, lease_s=lease_s, compute_s=self.compute_s)
        self.world = self.context.__enter__()
        self.world.pull(self.world.offer())  # all are connected
        self.world.pass_time(1.0)
        self.offers, self.gone = [], None  # the rank that has gone
        self.idle_since = self.world.now
        self.other = self.world.offer((7,)) if busy else None
        self.hold_another(begins=True)

    @property
    def now(self):
        return self.world.now

    def hold_another(self, *, begins=False):
        if self.other is not None and (begins or self.now > self.held_since + self.compute_s / 2):
            self.held_since = self.now
            if not begins:
                self.pull_wrongly(self.other, "other")
            self.world.do(lambda: self.world.consumer.worker.hold(self.other, local_request_id="other"))

    def pull_wrongly(self, ticket, name):
        with pytest.raises(BlockIdsInvalid):
            self.world.pull(ticket, (10**6,), local_request_id=name)

    def rests(self, offer):
        """Return the requests that hold a ticket for certain, and those that may have come to the end of their time."""
        fresh = [name for name, since in offer.holders.items() if self.now < since + self.compute_s]
        return fresh, [name for name in offer.holders if name not in fresh]

    def live(self):
        return [each for each in self.offers if each.outcome is None]

    def outcomes(self, offer):
        """Return how the lease has ended on each rank that lives; None if it is held."""
        found = []
        for life in [life for rank, life in enumerate(self.world.producers) if rank != self.gone]:
            ends = {event.request_id: event.outcome for event in life.of(LeaseEnded)}
            found.append(ends.get(offer.ticket.request_id))
        return found

    def look(self):
        for offer in self.live():
            fresh, fading = self.rests(offer)
            for name in fading:
                ends_at = offer.holders[name] + self.compute_s
                free_since = ends_at + self.lease_s / 3 + SLACK_S
                if self.now > free_since:
                    del offer.holders[name]
                    offer.let_go(max(offer.free_since, free_since), ends_at + self.lease_s)
            if fresh:
                assert set(self.outcomes(offer)) == {None}, "somebody needs it"
                self.idle_since = self.now
            elif offer.holders:
                self.idle_since = self.now
            elif self.now > offer.free_since + self.lease_s + SLACK_S:
                assert set(self.outcomes(offer)) == {"expired"}, "nobody needs it"
                offer.outcome = "expired"
        self.hold_another()
        if self.other is None and self.now > self.idle_since + self.lease_s / 2 + SLACK_S:
            for rank in range(self.ranks):
                assert not self.world.heard("Renew", rank, self.idle_since + self.lease_s / 2)

    def is_certain(self):
        return not any(self.rests(offer)[1] for offer in self.live())

    @precondition(lambda self: self.gone is None and len(self.live()) < 4)
    @rule(block=st.integers(1, 5))
    def offer(self, block):
        self.offers.append(Offer(self.world.offer((block,)), self.now, self.lease_s))
        self.look()

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9), name=st.sampled_from(NAMES))
    def hold(self, which, name):
        offer = self.live()[which % len(self.live())]
        self.look()
        if offer.outcome is not None or not self.is_certain():
            return
        if not offer.is_held_from(self.now):
            return  # it may end before it is renewed
        held = sum(len(each.holders) for each in self.live())
        if held >= HOLDS_MAX and self.gone is not None:
            return  # leases of the rank that has gone are held no more

        def hold():
            self.world.consumer.worker.hold(offer.ticket, local_request_id=name)

        if name not in offer.holders and held >= HOLDS_MAX:
            with pytest.raises(CapacityExceeded):
                self.world.do(hold)
        else:
            self.world.do(hold)
            offer.holders.setdefault(name, self.now)
        self.world.pass_time(SLACK_S / 4)
        self.look()

    def let_go(self, offer, name):
        since = offer.holders.pop(name, None)
        if since is not None:
            renewed_at = min(self.now - self.lease_s / 3 - renewals.TICK_S, since + self.compute_s)  # or later
            offer.let_go(self.now, renewed_at + self.lease_s)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9), name=st.sampled_from(NAMES))
    def pull_in_vain(self, which, name):
        """A pull ends the hold of its request. This one is refused, and releases nothing."""
        offer = self.live()[which % len(self.live())]
        self.pull_wrongly(offer.ticket, name)
        self.let_go(offer, name)
        self.look()

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 9), name=st.sampled_from(NAMES), reads=st.booleans())
    def end(self, which, name, reads):
        """The last that holds a ticket reads it, or gives it back."""
        offer = self.live()[which % len(self.live())]
        self.look()
        if offer.outcome or not self.is_certain() or set(offer.holders) - {name} or set(self.outcomes(offer)) != {None}:
            return
        if not offer.is_held_from(self.now):
            return  # it may end meanwhile
        if reads and self.gone is None:
            self.world.pull(offer.ticket, local_request_id=name)
        else:
            try:
                self.world.do(lambda: self.world.consumer.worker.release(offer.ticket, local_request_id=name))
            except KvflowError:
                assert self.gone is not None
        self.world.pass_time(SLACK_S / 4)
        assert set(self.outcomes(offer)) == {"released"}
        offer.outcome = "released"
        self.look()

    @precondition(lambda self: self.gone is None and self.ranks == 2)
    @rule(rank=st.integers(0, 1), seldom=st.integers(0, 2))
    def lose_a_rank(self, rank, seldom):
        """One rank closes; what is held on the other stays so."""
        if not seldom:
            self.gone = rank
            self.world.producers[rank].leave()
            self.world.pass_time(SLACK_S)
            self.look()

    @rule(parts=st.sampled_from((0.1, 0.4, 1.0, 2.0, 4.0)))
    def time_passes(self, parts):
        for _ in range(max(1, round(2 * parts))):
            self.world.pass_time(min(parts, 0.5) * self.lease_s)
            self.look()

    @rule()
    def the_network_stands_still(self):
        """For as long as two of three renewals take: they may be lost."""
        if self.lease_s < 1.0 or self.gone is not None:
            return
        self.look()
        renewed = [offer for offer in self.live() if offer.holders]
        hosts = [life.process.host for life in self.world.producers]
        for host in hosts:
            self.world.wires.part(host, self.world.consumer.process.host)
        self.world.pass_time(0.6 * self.lease_s)
        self.world.wires.join()
        for offer in renewed:  # now this arrives, whether its request holds the ticket still or not
            offer.free_since = self.idle_since = self.now
        self.world.pass_time(SLACK_S)
        self.look()

    def teardown(self):
        if not hasattr(self, "context"):
            return
        try:
            if self.gone is None:
                last = [self.world.offer((block,)) for block in (6, 7)]
                for ticket in last:
                    self.world.pull(ticket)
                self.world.consumer.leave()
                self.world.pass_time(SLACK_S / 4)
                for ticket in last:
                    assert set(self.outcomes(Offer(ticket, 0.0, self.lease_s))) == {"released"}, (
                        "what waits is said before the end"
                    )
        finally:
            self.context.__exit__(None, None, None)
            self.patch.undo()


HoldingMachine.TestCase.settings = thoroughly(40, stateful_step_count=25)
TestHolding = HoldingMachine.TestCase
