"""Offers of a real worker on virtual time: who gets a slot, in which turn, and how each lease ends."""

import math
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, WorkerDraining
from tests.unit.kvflow.worker.virtual import virtual

from .caches import thoroughly

SLOTS = 2
LEASE_S = 6.37
PATIENCE_S = 2.21
"""Time passes in whole seconds: nothing is due at the moment of a look."""

RIGHT = [[1, 2]]
WRONG = {"too few blocks": [[1]], "no block of ours": [[1, 99]]}
ACTIONS = (
    *("offer", "wait", "wait for some time", "wait in vain", "offer in vain"),
    *("revoke", "revoke", "give up", "listen"),
)
actions = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.sampled_from(sorted(WRONG)))


class OffersMachine(RuleBasedStateMachine):
    """An engine offers, waits for slots and for ends, and revokes; some calls come in one turn of its loop.

    The model: ``held`` has when each lease expires, ``line`` who waits for a slot, ``coming`` and
    ``gone`` who begins and ceases to wait when the turn is over, and ``ended`` how leases ended.
    """

    def __init__(self):
        super().__init__()
        self.context = virtual(theirs={"lease_slots": SLOTS, "lease_s": LEASE_S})
        self.world = self.context.__enter__()
        (self.life,) = self.world.producers
        self.worker = self.life.worker
        self.now, self.held, self.line, self.ended = self.world.now, {}, [], {}
        self.waits, self.listens, self.coming, self.gone, self.count = {}, [], [], set(), 0

    def task(self, call):
        return self.life.process.create_task(call, name="drive a call")

    # --- calls, and what they do to the model ---

    def act(self, what, which, wrong):
        self.count += 1
        name = f"request-{self.count}"
        about = {"revoke": [*self.held], "give up": [*self.waits], "listen": [*self.held, *self.ended]}
        names = about.get(what, [name])
        if not names:
            return
        name = names[which % len(names)]
        match what:
            case "offer" if SLOTS - len(self.held) > len(self.line):
                self.worker.offer(name, RIGHT, 8)
                self.hold(name)
            case "offer":
                with pytest.raises(CapacityExceeded):
                    self.worker.offer(name, RIGHT, 8)
            case "offer in vain":
                with pytest.raises((BlockIdsInvalid, CapacityExceeded)):
                    self.worker.offer(name, WRONG[wrong], 8)
            case "wait" | "wait for some time" | "wait in vain":
                timeout_s = PATIENCE_S if what == "wait for some time" else None
                blocks = WRONG[wrong] if what == "wait in vain" else RIGHT
                self.waits[name] = self.task(self.worker.offer_when_possible(name, blocks, 8, timeout_s=timeout_s))
                self.coming.append((name, self.now + (timeout_s or math.inf), blocks))
            case "revoke":
                assert self.worker.revoke(name)
                self.end(name, "revoked")
            case "give up":
                self.waits[name].cancel()
                self.gone.add(name)
            case "listen":
                self.listen(name)

    def listen(self, name):
        self.listens.append((name, self.task(self.worker.wait_offer(name))))

    def hold(self, name):
        self.held[name] = self.now + LEASE_S

    def end(self, name, outcome):
        del self.held[name]
        self.ended[name] = outcome

    def serve(self):
        while self.line and len(self.held) < SLOTS:
            name, _, blocks = self.line.pop(0)
            if blocks is RIGHT:
                self.hold(name)

    # --- what happens ---

    @rule(actions=st.lists(actions, min_size=1, max_size=8))
    def turn(self, actions):
        self.world.do(lambda: [self.act(*each) for each in actions] and None, life=self.life)
        self.world.pass_time(0.001)
        self.now = self.world.now
        self.line = [each for each in self.line + self.coming if each[0] not in self.gone]
        self.coming = []
        self.serve()

    @rule(seconds=st.sampled_from((1, 2, 7)))
    def time_passes(self, seconds):
        until = self.now + seconds
        self.world.pass_time(seconds)
        while (due := min((*self.held.values(), *(at for _, at, _ in self.line)), default=until)) < until:
            self.now = due
            self.line = [each for each in self.line if each[1] > due]
            for name in [each for each, at in self.held.items() if at <= due]:
                self.end(name, "expired")
            self.serve()
        self.now = self.world.now

    @invariant()
    def is_as_it_should_be(self):
        held = self.world.do(self.worker.snapshot, life=self.life).held_leases
        assert {lease.request_id for lease in held} == self.held.keys()
        in_line = {name for name, *_ in self.line}
        for name, task in list(self.waits.items()):
            assert task.done() == (name not in in_line), name
            if task.done():
                del self.waits[name]
                if not task.cancelled() and not task.exception():
                    assert task.result().request_id == name
        for name, task in self.listens:
            assert task.done() == (name in self.ended), name
            assert not task.done() or task.result() == self.ended[name]

    def teardown(self):
        try:
            self.drain()
        finally:
            self.context.__exit__(None, None, None)

    def drain(self):
        for name in self.ended:
            self.listen(name)
        drained = self.task(self.worker.drain(100.0))
        self.world.pass_time(0.01)
        for name, *_ in self.line:
            assert isinstance(self.waits.pop(name).exception(), WorkerDraining)
        self.line.clear()
        self.is_as_it_should_be()
        for name in list(self.held):
            assert not drained.done()
            self.world.do(partial(self.worker.revoke, name), life=self.life)
            self.end(name, "revoked")
            self.world.pass_time(0.01)
        assert drained.result().complete
        self.world.do(self.worker.check, life=self.life)


OffersMachine.TestCase.settings = thoroughly(100, least=100, stateful_step_count=25)
TestOffers = OffersMachine.TestCase
