"""Sources tell of their prompts in any order: the index has what each holds, and no more than its bounds."""

from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvflow import Told
from kvflow.errors import CapacityExceeded
from kvflow.integrations.vllm import told

from .caches import thoroughly

SOURCE_ENDS_MAX, ENDS_MAX = 6, 10
DIGESTS = [bytes([number]) * 32 for number in range(9)]
SOURCES = st.sampled_from(("first", "second", "third"))
ENDS = st.lists(st.sampled_from([digest[: told.END_BYTES] for digest in DIGESTS]), unique=True, max_size=8)


class ToldMachine(RuleBasedStateMachine):
    """``held``: source -> the ends that it has told and not taken back; ``complete``: those that have told all."""

    def __init__(self):
        super().__init__()
        self.bounds = mock.patch.multiple(told, SOURCE_ENDS_MAX=SOURCE_ENDS_MAX, ENDS_MAX=ENDS_MAX)
        self.bounds.start()
        self.index = told.ToldIndex()
        self.held, self.complete = {}, set()

    def forget(self, source):
        self.held.pop(source, None)
        self.complete.discard(source)

    @rule(source=SOURCES)
    def drop(self, source):
        self.index.drop(source)
        self.forget(source)

    @rule(source=SOURCES, new=ENDS, gone=ENDS, anew=st.booleans(), whole=st.booleans())
    def take(self, source, new, gone, anew, whole):
        if anew:
            self.forget(source)
            self.held[source] = set()
        if source in self.held:
            self.held[source] = self.held[source] - {*gone} | {*new}
        if source not in self.held or len(self.held[source]) > SOURCE_ENDS_MAX:
            self.forget(source)
            with pytest.raises(CapacityExceeded):
                self.index.take(source, Told(tuple(new), tuple(gone), is_anew=anew, is_all=whole))
            return
        self.complete = self.complete | {source} if whole else self.complete - {source}
        self.index.take(source, Told(tuple(new), tuple(gone), is_anew=anew, is_all=whole))
        while sum(map(len, self.held.values())) > ENDS_MAX:  # of those that hold most, any one may go
            most = max(map(len, self.held.values()))
            self.forget(next(each for each in self.held if len(self.held[each]) == most and not self.found(each)))

    def found(self, source):
        """Return how many digests lead to the last one that the index has of a source, each asked alone."""
        return sum(source in dict(self.index.holders([digest])) for digest in DIGESTS)

    @rule(prompt=st.permutations(DIGESTS), length=st.integers(0, 9))
    def find(self, prompt, length):
        """Who has most of a prompt comes first, with all that it has told of it."""
        prompt = prompt[:length]
        expected = {}
        for source, ends in self.held.items():
            for count, digest in enumerate(prompt, 1):
                if digest[: told.END_BYTES] in ends:
                    expected[source] = count
        found = list(self.index.holders(prompt))
        assert dict(found) == expected
        assert [count for _, count in found] == sorted(expected.values(), reverse=True)

    @invariant()
    def each_source_has_told_what_it_has(self):
        self.find(prompt=DIGESTS, length=len(DIGESTS))
        assert self.index._count == sum(map(len, self.held.values()))
        assert self.index._by_end.keys() == set().union(*self.held.values()), "what nobody holds takes no memory"
        for source in ("first", "second", "third"):
            assert self.index.knows(source) == (source in self.complete)
            assert self.found(source) == len(self.held.get(source, ()))

    def teardown(self):
        self.bounds.stop()


ToldMachine.TestCase.settings = thoroughly(100, stateful_step_count=25)
TestTold = ToldMachine.TestCase
