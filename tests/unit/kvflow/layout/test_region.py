"""A region's bounds are those of int64 descriptor lists; whatever is decoded keeps them."""

import msgspec
import pytest

from kvflow.layout.component import ADDRESS_MAX, Region
from tests.helpers.loops import looped


@looped(
    "wrong",
    [
        (-1, 1, "DRAM", 0),
        (ADDRESS_MAX + 1, 1, "DRAM", 0),
        (0, 0, "DRAM", 0),
        (0, ADDRESS_MAX + 1, "DRAM", 0),
        (0, 1, "DISK", 0),
        (0, 1, "VRAM", -1),
        (0, 1, "VRAM", 1024),
    ],
)
def test_a_region_out_of_bounds_is_not_decoded(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(Region(*wrong)), type=Region)


def test_the_largest_region_is_decoded():
    region = Region(ADDRESS_MAX, ADDRESS_MAX, "VRAM", 1023)
    assert msgspec.convert(msgspec.to_builtins(region), type=Region) == region
