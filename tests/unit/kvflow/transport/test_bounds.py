"""Rows and reads against plain Python arithmetic, which does not overflow."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.transfer.boxes import COLUMNS, FIXED, Scatter
from kvflow.transport.base import LeaseShare, Program, Read
from kvflow.transport.bounds import (
    EPOCH_MAX,
    INDEX_MAX,
    LEASES_MAX,
    OutOfBounds,
    check_inside,
    check_read,
    check_rows,
    check_scatter,
    check_staged_read,
    merge,
)

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


def read_of_leases(n, leases):
    index = np.arange(n, dtype=np.int32)
    return Read(1, "p", 1, index, index, np.array([0, n]), 8 * n, leases=tuple(LeaseShare(*share) for share in leases))


def staged_scatter(units=16):
    """Each unit is 8 bytes, which one descriptor fetches and one copy scatters."""
    rows = np.array([[64, 8, 0, 8, units]])
    box = [8, 0, 8, 4096, 8, 0, 0, *[1, 0, 0] * ((COLUMNS - FIXED) // 3)]
    scatter = Scatter(np.array([box]), units, (units, 1, 1))
    program = Program(1, "p", rows, np.array([[0, 8, 0, 8, units]]), scatter=scatter)
    checked = check_rows(program.source_rows), check_rows(program.target_rows)
    return check_scatter(program, *checked, buffer_bytes=8 * units, regions=[Region(4096, 8 * units)])


FAIR_LEASES = {
    "none": [],
    "one": [(0, 0, 12)],
    "several": [(3, 70, 5), (INDEX_MAX, EPOCH_MAX, 1), (3, 70, 6)],
}
WRONG_LEASES = {
    "no pairs": [(3, 70, 12), (4, 70, 0)],
    "fewer than none": [(3, 70, 24), (4, 70, -12)],
    "more pairs than there are": [(3, 70, 24)],
    "a number that does not divide": [(3, 70, 5)],
    "a negative slot": [(-1, 70, 12)],
    "a slot that is too high": [(INDEX_MAX + 1, 70, 12)],
    "a negative epoch": [(3, -1, 12)],
    "an epoch that is too high": [(3, EPOCH_MAX + 1, 12)],
}


@pytest.mark.parametrize("name", FAIR_LEASES)
def test_leases_that_have_the_pairs_of_the_read_pass(name):
    rows = check_rows(np.array([[0, 8, 0, 8, 16]]))
    read = read_of_leases(12, FAIR_LEASES[name])
    check_read(read, rows, rows)
    check_staged_read(read, staged_scatter())


@pytest.mark.parametrize("name", WRONG_LEASES)
def test_leases_that_cannot_be_those_of_the_read_are_refused(name):
    rows = check_rows(np.array([[0, 8, 0, 8, 16]]))
    read = read_of_leases(12, WRONG_LEASES[name])
    with pytest.raises(OutOfBounds, match="lease"):
        check_read(read, rows, rows)
    with pytest.raises(OutOfBounds, match="lease"):
        check_staged_read(read, staged_scatter())


def test_a_pair_has_many_descriptors_but_one_number_of_a_unit():
    rows = check_rows(np.array([[0, 8, 0, 8, 16]]))
    read = read_of_leases(12, [(3, 70, 1), (4, 70, 3)])
    check_read(read, rows, rows)
    with pytest.raises(OutOfBounds, match="12 pairs"):
        check_staged_read(read, staged_scatter())


def test_more_leases_than_uint16_can_number_are_refused():
    rows = check_rows(np.array([[0, 8, 0, 8, LEASES_MAX + 1]]))
    for count in (LEASES_MAX, LEASES_MAX + 1):
        read = read_of_leases(count, [(number, 70, 1) for number in range(count)])
        if count == LEASES_MAX:
            check_read(read, rows, rows)
        else:
            with pytest.raises(OutOfBounds, match="65537 leases"):
                check_read(read, rows, rows)
