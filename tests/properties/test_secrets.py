"""Who shares a secret trusts each other in any step of its change: to connect, and to take each other's word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handshake.errors import Unauthenticated
from handshake.security import ClusterSecurity, sign

SECRETS = [f"{number} is a secret of the tests" for number in range(3)]
workers = st.tuples(st.sampled_from(SECRETS), st.sampled_from((None, *SECRETS)))


def security_of(worker):
    own, accepted = worker
    security = ClusterSecurity.from_secret(own)
    return security if accepted is None else security.accepting(accepted)


@given(workers, workers, st.binary(max_size=20))
def test_a_worker_is_trusted_by_all_who_have_its_secret_and_no_other(one, other, data):
    """``one`` uses its first secret, and accepts its second."""
    ours, theirs = security_of(one), security_of(other)
    is_trusted = one[0] in other
    signature = sign(ours.ticket_key, data)
    assert theirs.verifies(data, signature) == is_trusted
    assert not theirs.verifies(data + b"!", signature)
    assert theirs.admits(ours.client.public_key) == is_trusted
    assert (ours.fingerprint in [each.fingerprint for each in theirs.accepted()]) == is_trusted
    if is_trusted:
        assert theirs.towards(ours.server.public_key).server == ours.server
    else:
        with pytest.raises(Unauthenticated):
            theirs.towards(ours.server.public_key)
