import math

import msgspec
import pytest

from handshake.codec import encode
from handshake.limits import DEFAULT_LIMITS, LEASES_MAX, Limits
from handshake.messages import Bye, Hello, Identity, LeaseRef, Refuse, Release, Renew
from tests.helpers.loops import looped


def test_all_that_a_client_says_fits_its_frame():
    most = (1 << 64) - 1
    leases = tuple(LeaseRef(slot=1 << 31, epoch=most) for _ in range(LEASES_MAX))
    words = "\U0001f600" * 1024
    identity = Identity(engine_id=words[:256], rank=65535, num_ranks=65536, incarnation="f" * 32, role="prefill",
                        software=words[:64])  # fmt: skip
    for message in (
        Hello(version_min=1, version_max=65535, identity=identity),
        Release(read=True, leases=leases),
        Renew(leases=leases),
        Refuse(code="x" * 64, reason=words, remedy=words),
        Bye(reason=words),
    ):
        encode(message, DEFAULT_LIMITS.client_frame_bytes_max)


def test_every_limit_is_described():
    assert all(f"\n        {name}: " in Limits.__doc__ for name in Limits.__struct_fields__)


@looped("name", Limits.__struct_fields__)
@looped("value", [0, -1, math.nan, math.inf])
def test_a_limit_is_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=name):
        msgspec.structs.replace(DEFAULT_LIMITS, **{name: value})


def test_a_ping_must_come_before_the_end_of_patience():
    with pytest.raises(ValueError, match="ping_interval_s"):
        Limits(ping_interval_s=5, silence_s_max=5)
