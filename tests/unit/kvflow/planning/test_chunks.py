"""Cuts of batches, against cutting one descriptor at a time."""

import numpy as np

from kvflow.planning.chunks import CHUNKS_FEW, Cutter
from tests.helpers.loops import looped


def cuts_one_by_one(nbytes, dense, source, target, *, budgets):
    """Walk over every descriptor, and begin a chunk when the next would break a budget."""
    chunk_bytes, chunk_descriptors = budgets
    cuts, sent, merged = [0], 0, 0
    for run, (size, merges) in enumerate(zip(nbytes, dense, strict=True)):
        for pair in range(len(source)):
            at = run * len(source) + pair
            before = (source[pair] - source[pair - 1], target[pair] - target[pair - 1]) if pair else None
            joins = merges and before == (1, 1) and cuts[-1] != at
            if at > cuts[-1] and (sent + size > chunk_bytes or merged + (not joins) > chunk_descriptors):
                cuts.append(at)
                sent, merged, joins = 0, 0, False
            sent, merged = sent + size, merged + (not joins)
    return [*cuts, len(nbytes) * len(source)]


def ids(form, count):
    """Descriptor numbers of one side: all in a row, in rows of seven, in one long row and single ones, or at random."""
    numbers = np.arange(count, dtype=np.int32)
    match form:
        case "one row":
            return numbers
        case "rows of seven":
            return numbers + numbers // 7
        case "a row, then single":
            return np.where(numbers < count // 2, numbers, 2 * numbers).astype(np.int32)
        case _:
            return np.random.default_rng(count).permutation(numbers)


@looped("form", ["one row", "rows of seven", "a row, then single", "random"])
@looped(
    "nbytes, dense",
    [
        ([64, 64, 64], [True, True, True]),
        ([64, 64, 64], [False, True, False]),
        ([64, 64, 64], [False, False, False]),
        ([64, 16, 128, 1], [True, False, True, True]),
    ],
)
@looped("chunk_bytes", [1, 64, 1000, 1 << 20])
@looped("chunk_descriptors", [1, 2, 9, 1 << 20])
def test_every_chunk_is_as_long_as_both_budgets_let_it_be(form, nbytes, dense, chunk_bytes, chunk_descriptors):
    count = 5 * CHUNKS_FEW
    source, target = np.arange(count, dtype=np.int32), ids(form, count)
    cutter = Cutter(np.array(nbytes, np.int64), np.array(dense))
    cuts = cutter.cuts(source, target, chunk_bytes, chunk_descriptors)
    assert cuts.dtype == np.int64
    budgets = (chunk_bytes, chunk_descriptors)
    expected = cuts_one_by_one(nbytes, dense, source, target, budgets=budgets)
    assert cuts.tolist() == expected


def test_a_huge_budget_makes_one_chunk_of_one_pair():
    cutter = Cutter(np.array([64]), np.array([True]))
    one = np.zeros(1, np.int32)
    assert cutter.cuts(one, one, 1 << 62, 1 << 62).tolist() == [0, 1]
