"""The conservation law of destination blocks: after every step, what is taken is what open pulls took."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import BlockIdsInvalid
from kvflow.leases.blocks import BlockAccount
from kvflow.worker.destinations import DestinationTable, Standing

from .caches import thoroughly

NUM_BLOCKS = 12
ALIASES = (0, 0, 2)
"""Groups 0 and 1 share bytes; group 2 has its own."""
LASTING_S = 2.0


@st.composite
def destinations(draw):
    """Block ids of three groups, no block twice within a class, some absent; tuples of few ids, arrays as of many."""
    shared = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4, unique=True))
    cut = draw(st.integers(0, len(shared)))
    other = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3, unique=True))
    lists = [shared[:cut], shared[cut:], other]
    if draw(st.booleans()):
        lists[draw(st.integers(0, 2))].append(-1)
    return tuple(np.array(ids, np.int64) if draw(st.booleans()) else tuple(ids) for ids in lists)


class LedgerMachine(RuleBasedStateMachine):
    """Pulls take, some are quarantined, all give back."""

    def __init__(self):
        super().__init__()
        self.account = BlockAccount(ALIASES, NUM_BLOCKS)
        self.ledger = DestinationTable(self.account)
        self.loans = []
        self.open = {}
        self.quarantined = {}  # number of blocks, and since when
        self.now = 0.0
        self.next_id = 0

    @rule(ids=destinations())
    def take(self, ids):
        """All or nothing: a pull that meets a taken block takes none of its others."""
        rows = blocks_of(ids)
        taken = {row for other in self.open.values() for row in other}
        lent = {row for loan in self.loans for row in blocks_of(loan)}
        if rows & (taken | lent):
            words = "still the target" if rows & taken else "is on offer"
            with pytest.raises(BlockIdsInvalid, match=words) as caught:
                self.ledger.take(self.next_id, ids)
            odd = {(ALIASES[caught.value.group], int(block)) for block in ids[caught.value.group]}
            assert odd & (taken if rows & taken else lent)
        else:
            self.ledger.take(self.next_id, ids)
            self.open[self.next_id] = rows
        self.next_id += 1

    @rule(ids=destinations())
    def lend(self, ids):
        """As often as one likes, but not what receives."""
        taken = {row for other in self.open.values() for row in other}
        if blocks_of(ids) & taken:
            with pytest.raises(BlockIdsInvalid, match="cannot be offered"):
                self.account.lend(ids)
        else:
            self.account.lend(ids)
            self.loans.append(ids)

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def end_loan(self, data):
        self.account.end_loan(self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1))))

    @precondition(lambda self: self.open.keys() - self.quarantined.keys())
    @rule(data=st.data())
    def quarantine(self, data):
        pull_id = data.draw(st.sampled_from(sorted(self.open.keys() - self.quarantined.keys())))
        self.ledger.quarantine(pull_id, "peer_lost", self.now)
        self.quarantined[pull_id] = len(self.open[pull_id]), self.now

    @rule(pause_s=st.sampled_from((0.0, 1.0, LASTING_S)))
    def look(self, pause_s):
        """However rarely one looks, the sums are those of this moment."""
        self.now += pause_s
        entries = list(self.quarantined.values())
        lasting = sum(num_blocks for num_blocks, since in entries if self.now - since > LASTING_S)
        oldest = min((since for _, since in entries), default=None)
        expected = Standing(sum(num_blocks for num_blocks, _ in entries), lasting, oldest)
        assert self.ledger.standing(self.now, LASTING_S) == expected

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_back(self, data):
        pull_id = data.draw(st.sampled_from(sorted(self.open)))
        self.ledger.give_back(pull_id)
        del self.open[pull_id]
        self.quarantined.pop(pull_id, None)

    @invariant()
    def the_law_holds(self):
        self.ledger.check()
        self.account.check(lent=self.loans)
        assert len(self.ledger) == len(self.open)
        listed = {entry.pull_id: (entry.num_blocks, entry.since) for entry in self.ledger.quarantined()}
        assert listed == self.quarantined

    def teardown(self):
        """Everything given back, every block can be taken at once."""
        for pull_id in list(self.open):
            self.ledger.give_back(pull_id)
        for loan in self.loans:
            self.account.end_loan(loan)
        everything = np.arange(NUM_BLOCKS)
        self.ledger.take(-1, (everything[:5], everything[5:], everything))
        self.ledger.check()


def blocks_of(ids):
    return {(alias, int(block)) for alias, blocks in zip(ALIASES, ids, strict=True) for block in blocks if block >= 0}


TestLedger = LedgerMachine.TestCase
TestLedger.settings = thoroughly(100, stateful_step_count=30)


FORMS = pytest.mark.parametrize("form", [tuple, lambda ids: np.array(ids, np.int64)], ids=["few", "many"])


@FORMS
def test_the_law_is_broken_by_a_block_that_nobody_took(form):
    account = BlockAccount(ALIASES, NUM_BLOCKS)
    account.receive((form([3]), form([]), form([])))
    with pytest.raises(AssertionError, match="were lost"):
        DestinationTable(account).check()


@FORMS
def test_a_loan_ends_once(form):
    account, ids = BlockAccount(ALIASES, NUM_BLOCKS), (form([3, 3]), form([-1]), form([4]))
    account.lend(ids)
    account.end_loan(ids)
    account.check(lent=[])
    with pytest.raises(AssertionError, match="ended twice"):
        account.end_loan(ids)


@FORMS
def test_a_block_cannot_be_given_back_twice(form):
    account = BlockAccount(ALIASES, NUM_BLOCKS)
    ledger, ids = DestinationTable(account), (form([3]), form([4]), form([3]))
    ledger.take(1, ids)
    ledger.give_back(1)
    with pytest.raises(KeyError):
        ledger.give_back(1)
    ledger.check()
    with pytest.raises(AssertionError, match="given back twice"):
        account.end_receipt(ids)


@FORMS
def test_a_receipt_is_not_ended_as_a_loan(form):
    account, ids = BlockAccount(ALIASES, NUM_BLOCKS), (form([3]), form([]), form([]))
    account.receive(ids)
    with pytest.raises(AssertionError, match="ended twice"):
        account.end_loan(ids)
    if isinstance(ids[0], tuple):  # few are counted one by one, so that what is wrong changes nothing
        account.check(lent=[], receiving=[ids])
