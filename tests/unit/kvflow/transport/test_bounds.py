"""Rows and reads against plain Python arithmetic, which does not overflow."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.transport.base import Read
from kvflow.transport.bounds import INDEX_MAX, OutOfBounds, check_inside, check_read, check_rows, merge

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
    read = Read(1, "p", 1, *index, cuts, 8 * n)
    merged = []
    for first, stop in pairwise(cuts):
        part = slice(first, stop)
        merged.append(merge(checked[0], index[0][part], checked[1], index[1][part]))
    check_read(read, *checked)
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
    read = Read(1, "p", 1, index, index, np.array([0, 4]), 0)
    with pytest.raises(OutOfBounds):
        check_read(read, rows, rows)
