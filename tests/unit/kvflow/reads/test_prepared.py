"""What a list proves for every pair."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import Share
from kvflow.reads.bounds import OutOfBounds, check_bound
from kvflow.reads.contract import PreparedList
from kvflow.reads.prepared import bind_portion, bind_whole, check_list
from kvflow.reads.staging import StagingMemory

UNITS = 3


class Linear:
    """A binding of ``UNITS`` units on each side, which may be wrong; ``first``: of each run, on both sides."""

    def __init__(self, first, unit_bytes, step):
        self._first, self._step = np.array(first, np.int32)[:, :, None], step
        self.unit_descriptors = len(first[0])
        self.unit_bytes = self.read_bytes = unit_bytes

    def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
        source, target = Linear.number(self, pairs.source, pairs.target)
        return Bound(source, target, np.array([0, source.size]), len(pairs.source) * self.unit_bytes)

    def number(self, source, target):
        return tuple(
            (first + self._step * np.array(units, np.int32)).astype(np.int32).ravel()
            for first, units in zip(self._first, (source, target), strict=True)
        )


def list_of(binding, lengths):
    """A list with a row of ``UNITS`` descriptors for each run."""
    rows = np.array([[1000 * run, nbytes, 0, nbytes, UNITS] for run, nbytes in enumerate(lengths)])
    prepared_list = PreparedList(1, "p", rows, rows, binding=binding)
    return check_list(prepared_list, [Region(0, 10_000)], StagingMemory(0))


RIGHT = ([[0, 3], [0, 3]], [8, 16], 24, 1)


@given(
    first=st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=2, max_size=2),
    lengths=st.lists(st.sampled_from([8, 16]), min_size=2, max_size=2),
    unit_bytes=st.sampled_from([16, 24, 32]),
    step=st.sampled_from([-1, 0, 1, 1, 2]),
)
@example(*RIGHT)
@example([[1, 4], [0, 3]], [8, 16], 24, 1)  # one too far
@example([[0, 3], [-1, 2]], [8, 16], 24, 1)
@example([[1, 2], [1, 2]], [8, 16], 24, 1)  # in two rows
@example([[0, 3], [0, 3]], [8, 16], 32, 1)
@example([[0, 3], [3, 0]], [8, 16], 24, 1)
@example([[0, 3], [0, 3]], [8, 8], 16, 0)
def test_a_list_is_prepared_only_if_the_descriptors_of_every_pair_fit(first, lengths, unit_bytes, step):
    binding = Linear(first, unit_bytes, step)
    try:
        checked = list_of(binding, lengths)
    except OutOfBounds:
        assert (first, lengths, unit_bytes, step) != RIGHT
        return
    for pair in ((source, target) for source in range(UNITS) for target in range(UNITS)):
        pairs = UnitPairs(*((unit,) for unit in pair))
        check_bound(binding.bind(pairs, chunk_bytes=1, chunk_descriptors=1), 1, checked.source, checked.target)


@pytest.mark.parametrize("case", ["not linear", "many pairs"])
def test_what_a_list_does_not_prove_is_checked_each_time(case):
    checked = list_of(Linear(*RIGHT[:1], *RIGHT[2:]), RIGHT[1])
    wrong = checked.prepared_list.binding
    wrong._step = 2
    if case == "not linear":
        wrong.number = None
    units = np.array([2]) if case == "many pairs" else (2,)
    with pytest.raises(OutOfBounds):
        bind_whole(checked, UnitPairs(units, units), Share(1, LeaseName(0, 1), 1))


@given(st.lists(st.tuples(st.integers(0, UNITS - 1), st.integers(0, UNITS - 1)), min_size=1, max_size=5))
def test_few_pairs_are_bound_as_many_are(listed):
    checked = list_of(Linear(*RIGHT[:1], *RIGHT[2:]), RIGHT[1])
    pairs, share = UnitPairs(*zip(*listed, strict=True)), Share(1, LeaseName(0, 1), len(listed))
    few, many = bind_whole(checked, pairs, share), bind_portion(checked, pairs, (share,))
    assert (few.peer, few.list_id, few.nbytes, few.shares) == (many.peer, many.list_id, many.nbytes, many.shares)
    for name in ("source_index", "target_index", "cuts"):
        assert getattr(few, name).tolist() == getattr(many, name).tolist()
