"""The epoch table: aligned memory that a peer can read at any moment, whose numbers only grow."""

import ctypes
import mmap

import pytest

from kvflow.leases.epochs import EPOCH_BITS, EpochTable, judge


@pytest.mark.parametrize(("observed", "verdict"), [(4, "early"), (5, "held"), (6, "stale"), (2**63 - 1, "stale")])
def test_a_fence_is_judged_by_what_it_read(observed, verdict):
    assert judge(5, observed) == verdict


def test_the_table_is_the_memory_that_peers_read():
    table = EpochTable(3, 10)
    table.raise_all([(1, 2**EPOCH_BITS)])
    address = table.array.ctypes.data
    assert address % 8 == 0
    assert [ctypes.c_uint64.from_address(address + 8 * slot).value for slot in range(3)] == [10, 2**EPOCH_BITS, 10]
    assert (len(table), table.base, table[1], table.highest) == (3, 10, 2**EPOCH_BITS, 2**EPOCH_BITS)


def test_tables_share_no_page_with_each_other_or_with_other_memory():
    tables = [EpochTable(3, 10) for _ in range(2)]  # a driver that pins pages refuses those that are pinned already
    places = sorted(table.array.ctypes.data for table in tables)
    assert [place % mmap.PAGESIZE for place in places] == [0, 0]
    assert places[1] - places[0] >= mmap.PAGESIZE


@pytest.mark.parametrize("epoch", [10, 9, 0])
def test_an_epoch_never_falls_or_repeats(epoch):
    table = EpochTable(1, 10)
    with pytest.raises(AssertionError, match="would not grow"):
        table.raise_all([(0, epoch)])
    assert table[0] == 10


def test_a_raised_epoch_keeps_the_order_of_the_writes_around_it():
    seen = []
    table = EpochTable(1, 10, lambda: seen.append(table[0]))
    table.raise_all([(0, 11)])
    assert seen == [10, 11]
