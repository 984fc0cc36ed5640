"""Portions of device memory, and what is stored of them."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layout.component import Region
from kvflow.reads.device import PORTION_BYTES, device_memory_of, landing, portions
from tests.devices import StandIn, cache_of


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), max_size=20), st.integers(1, 60))
def test_portions_have_every_byte_once_and_in_order(parts, nbytes_max):
    found = [*portions(parts, nbytes_max)]
    given = [start + at for start, nbytes in parts for at in range(nbytes)]
    assert [address + at for portion in found for address, nbytes in portion for at in range(nbytes)] == given
    sizes = [sum(nbytes for _, nbytes in portion) for portion in found]
    assert all(size == nbytes_max for size in sizes[:-1])
    assert all(0 < size <= nbytes_max for size in sizes[-1:])


def test_a_landing_stores_what_was_filled_and_nothing_that_was_not():
    stored = []
    buffers = landing(lambda parts, content: stored.append((parts, bytes(content))), [(7, PORTION_BYTES), (9 << 20, 5)])
    first = next(buffers)
    assert (len(first), stored) == (PORTION_BYTES, [])
    first[:] = b"a" * len(first)
    second = next(buffers)
    assert stored == [([(7, PORTION_BYTES)], b"a" * PORTION_BYTES)]
    assert len(second) == 5
    second[:3] = b"bbb"
    del buffers  # the receiver gives up
    assert len(stored) == 1


def test_a_landing_ends_when_all_is_stored():
    stored = []
    for buffer in landing(lambda parts, content: stored.append((parts, bytes(content))), [(7, 2), (20, 3)]):
        buffer[:] = b"abcde"
    assert stored == [([(7, 2), (20, 3)], b"abcde")]


def test_a_cache_in_host_memory_needs_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvflow.memory.device", None)  # importing it raises
    assert device_memory_of([Region(1, 2), Region(5, 2)]) is None
    with pytest.raises(ImportError):
        device_memory_of([Region(1, 2), Region(5, 2, "VRAM")])


def test_the_stand_in_is_out_of_reach():
    cache = StandIn(np.arange(4, dtype=np.uint8))
    assert cache.region.address > 1 << 60
    into = memoryview(bytearray(3))
    cache.fetch(3, [(cache.region.address + 2, 2), (cache.region.address, 1)], into)
    assert into.tolist() == [2, 3, 0]
    for parts in ([(cache.region.address + 2, 3)], [(cache.region.address - 1, 3)]):
        with pytest.raises(AssertionError):
            cache.store(3, parts, into)
    assert cache_of("DRAM", cache.bytes()).region.memory == "DRAM"
