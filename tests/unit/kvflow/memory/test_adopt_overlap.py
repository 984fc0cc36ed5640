"""Overlaps, on bytes alone: what one tensor holds is (group, offset, block stride, bytes, axes)."""

import time

import pytest

from kvflow.errors import SpecInvalid
from kvflow.memory.overlap import LiveBytes, check_overlaps
from tests.helpers.loops import looped

B = 10


def live(*tensors):
    return [
        LiveBytes(f"layers.{index}", group, 0, offset, stride, tuple(axes), nbytes)
        for index, (group, offset, stride, nbytes, *axes) in enumerate(tensors)
    ]


def check(*tensors, num_blocks=B):
    check_overlaps(live(*tensors), num_blocks=num_blocks, region_bytes=[1 << 40])


@looped(
    "tensors",
    [
        [(0, 0, 100, 100)],
        [(0, 0, 100, 50), (0, 50, 100, 50)],
        [(0, 0, 100, 50), (1, 0, 100, 100), (2, 99, 100, 1)],
        [(0, 0, 10, 10), (0, 100, 20, 20)],  # memory of their own, strides of their own
        [(0, 0, 100, 10, (5, 20)), (0, 10, 100, 10, (5, 20))],  # interleaved in each block
        [(0, 0, 10, 10, (2, 1000)), (1, 1000, 10, 10)],  # outside of blocks, the second half shared
        [(0, 50, 100, 40), (0, 90, 100, 60)],  # the second reaches into the next hundred, as rows would not
    ],
)
def test_bytes_of_one_block_pass(tensors):
    check(*tensors)


@looped(
    "tensors, said",
    [
        ([(0, 0, 100, 101)], "layers.0: stride of blocks is 100 bytes, but 101 bytes lie below it"),
        ([(0, 0, 100, 10, (5, 9))], "layers.0: stride of an axis of 5 is 9 bytes, but 10 bytes lie below it"),
        ([(0, 0, 100, 50), (0, 49, 100, 50)], "layers.1: block 0 has bytes of block 0 of layers.0, a layer of its own"),
        (
            [(0, 0, 100, 50), (0, 149, 100, 10)],
            "layers.1: block 0 has bytes of block 1 of layers.0, a layer of its own",
        ),
        (
            [(0, 0, 100, 50), (1, 149, 100, 10)],
            "layers.1: block 0 has bytes of block 1 of layers.0, a layer of another",
        ),
        ([(0, 0, 100, 50), (1, 95, 100, 6)], "layers.1: block 0 has bytes of block 1 of layers.0"),
        # Between the two that meet lies a third, which ends before they do.
        ([(0, 0, 100, 10), (1, 2, 100, 2), (2, 105, 100, 2)], "layers.2: block 0 has bytes of block 1 of layers.0"),
        ([(0, 0, 10, 10), (1, 50, 20, 20)], "layers.1: lies among the bytes of layers.0"),
        ([(0, 0, 10, 10, (2, 1000)), (1, 1010, 10, 10)], "has bytes of block"),
    ],
)
def test_bytes_of_two_blocks_or_twice_in_a_group_do_not(tensors, said):
    with pytest.raises(SpecInvalid) as caught:
        check(*tensors)
    assert said in caught.value.message


@pytest.mark.parametrize("group", [0, 1])
def test_regions_are_apart_whatever_their_offsets(group):
    first, second = live((0, 0, 100, 50), (group, 20, 70, 50))
    moved = LiveBytes(second.path, group, 1, second.offset, second.block_stride, second.axes, second.item_bytes)
    check_overlaps([first, moved], num_blocks=B, region_bytes=[1000, 1000])


def test_gaps_between_very_many_runs_count_as_occupied():
    """More runs than are listed; what hides in the gaps is refused to be on the safe side."""
    many = (1 << 17, 4)
    check((0, 0, 1 << 20, 2, many), (0, 1 << 19, 1 << 20, 2))
    with pytest.raises(SpecInvalid):
        check((0, 0, 1 << 20, 2, many), (0, 2, 1 << 20, 2))


def test_a_large_model_takes_milliseconds():
    """128 layers of two groups in one row of a large pool, with a run per head and token."""
    head = (8, 64 * 128 * 128)
    token = (128, 64 * 128)
    tensors = [(index % 2, index // 2 * 128, 1 << 23, 128, head, token) for index in range(128)]
    started = time.process_time()
    check(*tensors, num_blocks=100_000)
    assert time.process_time() - started < 10  # a tenth of a second on a slow machine; run by run it would be hours
