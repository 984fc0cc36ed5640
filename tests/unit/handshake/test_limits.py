import math

import msgspec
import pytest

from handshake.limits import DEFAULT_LIMITS, PUBLICATION_BYTES_MAX, Limits


def test_the_largest_publication_fits_a_frame():
    assert DEFAULT_LIMITS.frame_bytes_max >= PUBLICATION_BYTES_MAX + 1024


def test_every_limit_is_described():
    assert all(f"\n        {name}: " in Limits.__doc__ for name in Limits.__struct_fields__)


@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_limit_is_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=name):
        msgspec.structs.replace(DEFAULT_LIMITS, **{name: value})


def test_a_ping_must_come_before_the_end_of_patience():
    with pytest.raises(ValueError, match="ping_interval_s"):
        Limits(ping_interval_s=5, silence_s_max=5)
