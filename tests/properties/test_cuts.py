"""Chunks keep their budgets, lose nothing, and cost what they are said to cost."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import plan_transfer

from .caches import bindings, models, sides, thorough


@st.composite
def batches(draw):
    """A binding of two random caches, and pairs of units ascending by source, with runs of neighbors."""
    model = draw(models())
    source, target = (draw(sides(model, tp_sizes=(1,))).cache(draw(st.integers(1, 12))).manifest() for _ in range(2))
    binding = draw(st.sampled_from(bindings(plan_transfer(source, target), source, target)))
    num_source = source.num_blocks * binding.group.source_units
    num_target = target.num_blocks * binding.group.target_units
    count = draw(st.integers(1, min(num_source, num_target, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        first, other = rng.integers(0, num_source - count + 1), rng.integers(0, num_target - count + 1)
        pairs = UnitPairs(np.arange(first, first + count), np.arange(other, other + count))
        if draw(st.booleans()):
            keep = np.sort(rng.choice(count, rng.integers(1, count + 1), replace=False))
            pairs = UnitPairs(pairs.source[keep], pairs.target[keep])
    else:
        sources = np.sort(rng.choice(num_source, count, replace=False))
        pairs = UnitPairs(sources, rng.permutation(num_target)[:count])
    if draw(st.booleans()):  # few, as pairing makes them
        pairs = UnitPairs(tuple(pairs.source.tolist()), tuple(pairs.target.tolist()))
    return binding, pairs


def spelled_out(binding):
    """Every descriptor of both sides as (row, address, length), by number."""
    return [
        [
            (row, address + number * stride, nbytes)
            for row, (address, nbytes, _, stride, count) in enumerate(rows.table.tolist())
            for number in range(count)
        ]
        for rows in (binding.source, binding.target)
    ]


def follows(one, other):
    """Whether ``other`` lies right behind ``one`` in the same row."""
    return one[0] == other[0] and one[1] + one[2] == other[1]


def merged_count(source, target):
    """Count what is left when neighbors merge that are adjacent on both sides, one by one."""
    pairs = list(zip(source, target, strict=True))
    return len(pairs) - sum(
        follows(before[0], after[0]) and follows(before[1], after[1]) for before, after in pairwise(pairs)
    )


@thorough
@given(batches(), st.integers(1, 1 << 14), st.integers(1, 64))
def test_chunks_cover_everything_within_their_budgets(batch, chunk_bytes, chunk_descriptors):
    binding, pairs = batch
    bound = binding.bind(pairs, chunk_bytes=chunk_bytes, chunk_descriptors=chunk_descriptors)
    sources, targets = spelled_out(binding)
    source = [sources[number] for number in bound.source_index]
    target = [targets[number] for number in bound.target_index]
    assert [one[2] for one in source] == [one[2] for one in target]
    assert bound.nbytes == sum(one[2] for one in source) == len(pairs.source) * binding.unit_bytes
    assert len(source) == len(pairs.source) * binding.unit_descriptors
    assert binding.count_merged(pairs) == merged_count(source, target)

    cuts = bound.cuts.tolist()
    assert (cuts[0], cuts[-1]) == (0, len(source))
    assert cuts == sorted(set(cuts))
    for first, last in pairwise(cuts):
        if last - first > 1:  # a single larger descriptor travels alone
            assert sum(one[2] for one in source[first:last]) <= chunk_bytes
        assert merged_count(source[first:last], target[first:last]) <= chunk_descriptors


@thorough
@given(batches(), st.integers(1, 1 << 14), st.integers(1, 64))
def test_lists_of_pairs_are_bound_like_arrays(batch, chunk_bytes, chunk_descriptors):
    binding, pairs = batch
    few = UnitPairs(tuple(map(int, pairs.source)), tuple(map(int, pairs.target)))
    many = UnitPairs(np.array(few.source), np.array(few.target))
    assert binding.count_merged(few) == binding.count_merged(many)
    bound, other = (
        binding.bind(each, chunk_bytes=chunk_bytes, chunk_descriptors=chunk_descriptors) for each in (few, many)
    )
    assert bound.nbytes == other.nbytes
    for name in ("source_index", "target_index", "cuts"):
        assert getattr(bound, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(bound, name), getattr(other, name))


@thorough
@given(batches(), st.integers(1, 1 << 14), st.integers(1, 64))
def test_no_chunk_could_take_the_next_descriptor_as_well(batch, chunk_bytes, chunk_descriptors):
    """Greedy cuts: otherwise budgets could be kept by posting one descriptor at a time."""
    binding, pairs = batch
    bound = binding.bind(pairs, chunk_bytes=chunk_bytes, chunk_descriptors=chunk_descriptors)
    sources, targets = spelled_out(binding)
    cuts = bound.cuts.tolist()
    for first, last in pairwise(cuts[:-1]):
        source = [sources[number] for number in bound.source_index[first : last + 1]]
        target = [targets[number] for number in bound.target_index[first : last + 1]]
        too_long = sum(one[2] for one in source) > chunk_bytes
        assert too_long or merged_count(source, target) > chunk_descriptors


@thorough
@given(batches())
def test_a_pair_of_units_has_the_same_descriptors_in_any_batch(batch):
    binding, pairs = batch
    budgets = {"chunk_bytes": 1 << 40, "chunk_descriptors": 1 << 30}
    together = binding.bind(pairs, **budgets)
    apart = [
        binding.bind(UnitPairs(pairs.source[at : at + 1], pairs.target[at : at + 1]), **budgets)
        for at in range(len(pairs.source))
    ]
    moved = sorted(zip(together.source_index.tolist(), together.target_index.tolist(), strict=True))
    alone = [pair for one in apart for pair in zip(one.source_index.tolist(), one.target_index.tolist(), strict=True)]
    assert moved == sorted(alone)
    assert together.cuts.tolist() == [0, len(moved)]
