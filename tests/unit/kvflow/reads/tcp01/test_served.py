"""Rows of peers, checked and resolved, and what a lease holds. Properties over real caches are in tests/properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layout.component import ADDRESS_MAX
from kvflow.layout.tracks import Track
from kvflow.reads.bounds import INDEX_MAX, OutOfBounds
from kvflow.reads.tcp01.served import LEVELS_MAX, ServedList, Tracks

AT = 1 << 40
PACKED = (Track(AT, 100, 20, 8), Track(AT + 40, 100, 60, 8))
HEADS = (Track(AT, 16, 16, 8), Track(AT + 128, 16, 16, 8))
DEVICES = (Track(AT, 16, 16, 8, "VRAM", 0), Track(AT + 500, 16, 16, 8, "VRAM", 1), Track(AT + 900, 16, 16, 8))


def prepared_list(*rows, tracks=PACKED):
    return ServedList(np.array(rows, np.int64), tracks, 3)


def resolved(*rows, tracks=PACKED, index=None):
    made = prepared_list(*rows, tracks=tracks)
    numbers = range(made.count) if index is None else index
    return [column.tolist() for column in made.resolve(np.array(numbers, np.int32))]


def test_tracks_of_several_strides_are_searched_in_levels():
    found = Tracks([Track(0, 100, 10, 5), Track(20, 100, 10, 5), Track(40, 90, 5, 5), Track(1000, 90, 5, 5)])
    assert [level.bases.tolist() for level in found.levels] == [[0, 1000], [40]]
    assert [level.starts.tolist() for level in found.levels] == [[0, 20, 1000], [40]]


def test_a_group_whose_strides_interleave_too_often_is_not_served():
    tracks = [Track(AT + 4 * index, 1000 + index, 4, 9) for index in range(LEVELS_MAX + 1)]
    assert Tracks(tracks[1:]).levels
    with pytest.raises(OutOfBounds, match="group 3 is not served"):
        prepared_list((AT, 4, 0, 1000, 9), tracks=tracks)


@pytest.mark.parametrize(
    ("row", "tracks", "blocks"),
    [
        ((AT + 40, 60, 0, 100, 8), PACKED, range(8)),
        ((AT + 45, 5, 0, 100, 3), PACKED, range(3)),
        ((AT + 340, 60, 0, 200, 3), PACKED, (3, 5, 7)),
        ((AT + 40, 10, 0, 10, 6), PACKED, [0] * 6),
        ((AT + 799, 1, 0, 0, 1), PACKED, [7]),
        ((AT, 16, 0, 16, 8), HEADS, range(8)),
        ((AT + 128, 4, 0, 4, 32), HEADS, [unit // 4 for unit in range(32)]),
        ((AT + 132, 4, 0, 4, 31), HEADS, [unit // 4 for unit in range(1, 32)]),
        ((AT + 2, 4, 0, 8, 16), HEADS, [unit // 2 for unit in range(16)]),
        ((AT, 4, 0, 12, 10), HEADS, [unit * 12 // 16 for unit in range(10)]),
        ((AT, 9, 0, 0, 1), (Track(AT, 0, 9, 1),), [0]),
        ((AT, 3, 0, 3, 3), (Track(AT, 0, 9, 1),), [0] * 3),
    ],
)
def test_rows_in_the_blocks_of_a_track_are_served(row, tracks, blocks):
    address, nbytes, _, stride, count = row
    wanted = [[address + number * stride for number in range(count)], [nbytes] * count, list(blocks)]
    assert resolved(row, tracks=tracks) == wanted


@pytest.mark.parametrize(
    ("row", "tracks"),
    [
        ((AT - 1, 1, 0, 0, 1), PACKED),
        ((AT + 19, 2, 0, 0, 1), PACKED),
        ((AT + 20, 1, 0, 0, 1), PACKED),
        ((AT + 39, 2, 0, 0, 1), PACKED),
        ((AT + 40, 61, 0, 0, 1), PACKED),
        ((AT + 800, 1, 0, 0, 1), PACKED),
        ((AT + 40, 60, 0, 100, 9), PACKED),
        ((AT + 40, 10, 0, 10, 7), PACKED),
        ((AT, 20, 0, 40, 2), PACKED),  # from track to track
        ((AT + 40, 60, 1, 100, 8), PACKED),
        ((AT, 17, 0, 0, 1), HEADS),
        ((AT, 16, 0, 16, 9), HEADS),
        ((AT + 8, 9, 0, 0, 1), HEADS),
        ((AT + 10, 8, 0, 8, 3), HEADS),
        ((AT, 5, 0, 12, 10), HEADS),
        ((AT, 1, 0, 1, INDEX_MAX), HEADS),
        ((AT, 1, 0, 1, 1 << 31), HEADS),
        ((AT, 1, 0, 1 << 31, INDEX_MAX), HEADS),
        ((AT, 1, 0, ADDRESS_MAX, 2), HEADS),
        ((AT, ADDRESS_MAX, 0, 0, 1), HEADS),
        ((AT, ADDRESS_MAX - AT, 0, 0, 1), HEADS),
        ((ADDRESS_MAX - 1, 1, 0, 0, 1), HEADS),
        ((0, ADDRESS_MAX, 0, 0, 1), HEADS),
        ((0, 1, 0, 0, 1), HEADS),
        ((AT, 0, 0, 16, 8), HEADS),
        ((AT, 16, 0, 16, 0), HEADS),
        ((AT, 16, 0, -16, 2), HEADS),
        ((AT, 16, 0, 16, -1), HEADS),
        ((AT, 4, 0, 2, 2), HEADS),
        ((AT, 10, 0, 0, 1), (Track(AT, 0, 9, 1),)),
        ((AT + (1 << 62), 1, 0, 0, 1), (Track(AT, 0, 9, 1),)),
        ((AT, 1, 0, 0, 1), ()),
    ],
)
def test_other_rows_are_refused(row, tracks):
    with pytest.raises(OutOfBounds):
        prepared_list(row, tracks=tracks)
    with pytest.raises(OutOfBounds):
        prepared_list(*[(track.address, 1, 0, 0, 1) for track in tracks], row, tracks=tracks)


int64s = st.sampled_from(
    [sign * (1 << power) + step for power in (0, 4, 31, 32, 40, 62) for step in (-1, 0, 1) for sign in (1, -1)]
    + [ADDRESS_MAX, -ADDRESS_MAX - 1, 0, AT + 40, AT + 128]
)


@given(st.lists(st.tuples(*[int64s] * 5), min_size=1, max_size=3), st.sampled_from((PACKED, HEADS, DEVICES)))
def test_any_prepared_list_is_refused_or_lies_in_tracks(rows, tracks):
    try:
        made = prepared_list(*rows, tracks=tracks)
    except OutOfBounds:
        return
    for address, nbytes, block in zip(*made.resolve(np.arange(made.count, dtype=np.int32)), strict=True):
        begins = [(track.address + block * track.stride, track.span) for track in tracks]
        assert any(begin <= address and address + nbytes <= begin + span for begin, span in begins)


@pytest.mark.parametrize("rows", [np.zeros((0, 5), np.int64), np.ones((1, 4), np.int64), np.ones((1, 5), np.int32)])
def test_rows_of_another_form_are_refused(rows):
    with pytest.raises(OutOfBounds, match="rows must be int64"):
        ServedList(rows, HEADS, 0)


def test_a_group_that_is_not_served_is_refused_by_name():
    with pytest.raises(OutOfBounds, match="group 3 is not served"):
        prepared_list((AT, 1, 0, 0, 1), tracks=())


def test_rows_name_the_device_of_their_track_and_lie_in_one_kind_of_memory():
    assert prepared_list((AT, 16, 0, 16, 8), (AT + 500, 16, 1, 16, 8), tracks=DEVICES).memory == "VRAM"
    assert prepared_list((AT + 900, 16, 0, 16, 8), tracks=DEVICES).memory == "DRAM"
    with pytest.raises(OutOfBounds, match="row 1 does not lie"):
        prepared_list((AT, 16, 0, 16, 8), (AT + 500, 16, 0, 16, 8), tracks=DEVICES)
    with pytest.raises(OutOfBounds, match="in DRAM and in VRAM"):
        prepared_list((AT, 16, 0, 16, 8), (AT + 900, 16, 0, 16, 8), tracks=DEVICES)


@pytest.mark.parametrize("counts", [(8,), (8, 8), (8, 3)])
def test_numbers_run_through_the_rows_in_order(counts):
    rows = [(AT + 128 * row, 16 - row, 0, 16, count) for row, count in enumerate(counts)]
    made = prepared_list(*rows, tracks=HEADS)
    assert made.count == sum(counts)
    wanted = [
        (AT + 128 * row + 16 * block, 16 - row, block) for row, count in enumerate(counts) for block in range(count)
    ]
    order = [*range(made.count - 1, -1, -1), 0, 0]
    got = [column.tolist() for column in made.resolve(np.array(order, np.int32))]
    assert [*zip(*got, strict=True)] == [wanted[number] for number in order]
    assert [len(column) for column in made.resolve(np.array([], np.int32))] == [0] * 3
    for wrong in ([made.count], [0, -1], [-(1 << 31)], [INDEX_MAX]):
        with pytest.raises(OutOfBounds, match="leaves"):
            made.resolve(np.array(wrong, np.int32))
    for shaped in (np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.array(0, np.int32)):
        with pytest.raises(OutOfBounds, match="must be int32"):
            made.resolve(shaped)
