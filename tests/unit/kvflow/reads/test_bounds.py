"""Rows and reads against plain Python arithmetic, which does not overflow."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.staging import COLUMNS, FIXED, Scatter
from kvflow.reads.bounds import (
    FEW_DESCRIPTORS,
    INDEX_MAX,
    OutOfBounds,
    check_bound,
    check_inside,
    check_pairs,
    check_rows,
    check_scatter,
    check_staged_bound,
    merge,
)
from kvflow.reads.contract import PreparedList
from tests.helpers.loops import looped

numbers = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, ADDRESS_MAX, ADDRESS_MAX - 1, ADDRESS_MAX // 2]),
)


def sane(address, nbytes, device, stride, count):
    return (
        min(address, device, stride) >= 0
        and nbytes >= 1
        and 1 <= count <= INDEX_MAX
        and (stride >= nbytes or count == 1)
        and address + (count - 1) * stride * (count > 1) + nbytes <= ADDRESS_MAX
    )


@given(st.lists(st.tuples(numbers, numbers, st.integers(-1, 2), numbers, numbers), min_size=1, max_size=4))
def test_exactly_the_rows_that_make_sense_pass(rows):
    expected = all(sane(*row) for row in rows) and sum(row[4] for row in rows) <= INDEX_MAX
    table = np.array(rows, dtype=np.int64)
    if not expected:
        with pytest.raises(OutOfBounds):
            check_rows(table)
        return
    checked = check_rows(table)
    assert checked.count == sum(row[4] for row in rows)
    assert checked.firsts.tolist() == [sum(row[4] for row in rows[:k]) for k in range(len(rows))]


@given(
    row=st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(0, 1), st.integers(40, 80), st.integers(1, 4)),
    start=st.integers(0, 300),
    length=st.integers(1, 400),
)
def test_a_row_is_inside_when_every_byte_of_it_is(row, start, length):
    address, nbytes, device, stride, count = row
    regions = [Region(start, length, "VRAM", 1), Region(1 << 50, 8, "VRAM", 0)]
    touched = {address + k * stride + byte for k in range(count) for byte in (0, nbytes - 1)}
    expected = device == 1 and all(start <= byte < start + length for byte in touched)
    rows = check_rows(np.array([row], dtype=np.int64))
    if expected:
        check_inside(rows, regions, "VRAM")
    else:
        with pytest.raises(OutOfBounds, match="row 0"):
            check_inside(rows, regions, "VRAM")
    with pytest.raises(OutOfBounds):
        check_inside(rows, regions, "DRAM")


def test_one_region_must_hold_the_row_even_where_two_touch():
    rows = check_rows(np.array([[0, 16, 0, 16, 2]], dtype=np.int64))
    with pytest.raises(OutOfBounds):
        check_inside(rows, [Region(0, 16), Region(16, 16)], "DRAM")


sides = st.lists(
    st.tuples(st.just(8), st.sampled_from([8, 8, 20]), st.integers(1, 6)), min_size=1, max_size=4
)  # nbytes, stride, count


@given(source=sides, target=sides, data=st.data())
def test_merging_moves_the_same_bytes_in_the_fewest_runs(source, target, data):
    tables = [
        np.array([[1000 * k + 64, nbytes, 0, stride, count] for k, (nbytes, stride, count) in enumerate(side)])
        for side in (source, target)
    ]
    checked = [check_rows(table) for table in tables]
    n = data.draw(st.integers(1, 12))
    index = [
        np.array(data.draw(st.lists(st.integers(0, rows.count - 1), min_size=n, max_size=n)), dtype=np.int32)
        for rows in checked
    ]
    if data.draw(st.booleans()):
        index = [(np.arange(n) % rows.count).astype(np.int32) for rows in checked]
    inner = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=3))) if n > 1 else []
    cuts = np.array([0, *inner, n])
    bound = Bound(*index, cuts, 8 * n)
    merged = []
    for first, stop in pairwise(cuts):
        part = slice(first, stop)
        merged.append(merge(checked[0], index[0][part], checked[1], index[1][part]))
    check_bound(bound, n, *checked)
    places = [
        [address + k * stride for address, _, _, stride, count in table for k in range(count)] for table in tables
    ]
    wanted = [(places[0][i], places[1][j]) for i, j in zip(*index, strict=True)]
    moved = [
        (run.source_address + at, run.target_address + at)
        for chunk in merged
        for run in chunk
        for at in range(0, run.nbytes, 8)
    ]
    assert moved == wanted
    rows_of = [[k for k, row in enumerate(table) for _ in range(row[4])] for table in tables]
    for chunk in merged:
        for one, two in pairwise(chunk):
            ends = one.source_address + one.nbytes, one.target_address + one.nbytes
            if ends == (two.source_address, two.target_address):
                # Dense, and still two: only a border between rows may part them.
                i, j = places[0].index(two.source_address), places[1].index(two.target_address)
                assert rows_of[0][i] != rows_of[0][i - 1] or rows_of[1][j] != rows_of[1][j - 1]


def test_a_total_that_would_overflow_is_refused():
    rows = check_rows(np.array([[0, ADDRESS_MAX // 2, 0, ADDRESS_MAX // 2, 2]]))
    index = np.array([0, 1, 0, 1], dtype=np.int32)
    with pytest.raises(OutOfBounds):
        check_bound(Bound(index, index, np.array([0, 4]), 0), 4, rows, rows)


def bound_of(n):
    index = np.arange(n, dtype=np.int32)
    return Bound(index, index, np.array([0, n]), 8 * n)


def staged_scatter(units=16):
    """Each unit is 8 bytes, which one descriptor fetches and one copy scatters."""
    rows = np.array([[64, 8, 0, 8, units]])
    box = [8, 0, 8, 4096, 8, 0, 0, *[1, 0, 0] * ((COLUMNS - FIXED) // 3)]
    scatter = Scatter(np.array([box]), units, (units, 1, 1))
    prepared_list = PreparedList(1, "p", rows, np.array([[0, 8, 0, 8, units]]), scatter=scatter)
    checked = check_rows(prepared_list.source_rows), check_rows(prepared_list.target_rows)
    return check_scatter(prepared_list, *checked, buffer_bytes=8 * units, regions=[Region(4096, 8 * units)])


@pytest.mark.parametrize("pairs", [1, 3, 12])
def test_a_pair_has_many_descriptors_but_one_number_of_a_unit(pairs):
    rows = check_rows(np.array([[0, 8, 0, 8, 16]]))
    check_bound(bound_of(12), pairs, rows, rows)
    if pairs == 12:
        check_staged_bound(bound_of(12), pairs, staged_scatter())
    else:
        with pytest.raises(OutOfBounds, match="12 units"):
            check_staged_bound(bound_of(12), pairs, staged_scatter())


@pytest.mark.parametrize("pairs", [5, 24])
def test_descriptors_that_the_pairs_do_not_divide_are_refused(pairs):
    rows = check_rows(np.array([[0, 8, 0, 8, 16]]))
    with pytest.raises(OutOfBounds, match="same number"):
        check_bound(bound_of(12), pairs, rows, rows)


units = st.lists(st.sampled_from([-(1 << 63), -1, 0, 1, 7, 8, 9, 1 << 31, (1 << 32) + 3, (1 << 63) - 1]), min_size=1)


@given(source=units, target=units, many=st.booleans())
@example([7], [8], False)
@example([8], [8], False)
@example([7], [9], False)
@example([7], [9], True)
@example([8], [8], True)
@example([0, -1], [0, 0], False)
@example([0, 0], [0, -1], False)
def test_exactly_the_units_that_both_sides_have_pass(source, target, many):
    """Few are checked one by one and many as an array."""
    count = min(len(source), len(target)) if not many else FEW_DESCRIPTORS + 1
    source, target = ((side * (FEW_DESCRIPTORS + 1))[:count] for side in (source, target))
    right = all(0 <= unit < 8 for unit in source) and all(0 <= unit < 9 for unit in target)
    for pairs in (UnitPairs(np.array(source), np.array(target)), UnitPairs((*source,), (*target,))):
        with nullcontext() if right else pytest.raises(OutOfBounds):
            check_pairs(pairs, 8, 9)


@looped(
    "source, target",
    [
        (np.array([0, 1]), np.array([0])),
        (np.array([], np.int64), np.array([], np.int64)),
        (np.array([0], np.int32), np.array([0])),
        (np.array([0]), np.array([0], np.uint64)),
        (np.array([0], ">i8"), np.array([0])),
        (np.array([[0]]), np.array([[0]])),
        (np.array(0), np.array(0)),
        ((0, 1), (0,)),
        ((0,), np.array([0, 1])),
        ((), ()),
        ((True,), (0,)),
        ((0,), (1.0,)),
        (((0,),), ((0,),)),
        ([0], [0]),
    ],
    ids=[
        *("lengths", "none", "int32", "uint64", "other bytes first", "rows", "a number"),
        *("lengths of tuples", "a tuple and an array", "no unit", "a bool", "a float", "tuples", "a list"),
    ],
)
def test_what_is_no_units_is_refused(source, target):
    with pytest.raises(OutOfBounds):
        check_pairs(UnitPairs(source, target), 8, 8)
    with pytest.raises(OutOfBounds):
        check_pairs(UnitPairs(target, source), 8, 8)
