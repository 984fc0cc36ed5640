"""What a worker says of itself follows from its settings; its secrets are not in what can be printed."""

import pytest

from handshake import ClusterSecurity, CurveKeys
from kvflow.errors import ConfigInvalid
from kvflow.rendezvous.endpoint import decode, security_of
from kvflow.version import __version__

from .helpers import INCARNATION, SECRET, SECURITY, advertisement, config, peer, side


def test_our_side():
    local = side(rank=1, num_ranks=2, connect_s=0.5, handshake_s=0.75)
    identity = local.identity
    assert (identity.engine_id, identity.rank, identity.num_ranks) == ("prefill-0", 1, 2)
    assert (identity.incarnation, identity.role) == (INCARNATION, "both")
    assert __version__ in identity.software
    assert (local.limits.connect_s, local.limits.handshake_s) == (0.5, 0.75)
    assert local.security == SECURITY
    assert decode(local.publication, peer="p") == advertisement()


def test_no_secret_is_shown():
    pass_key = b"what passes are made with"
    shown = repr(side(pass_key=pass_key))
    for secret in (
        SECRET,
        pass_key.decode(),
        repr(SECURITY.ticket_key),
        repr(SECURITY.server.private),
        repr(SECURITY.client.private),
    ):
        assert secret not in shown


def test_without_a_secret_nobody_is_introduced(monkeypatch):
    monkeypatch.delenv("KVFLOW_CLUSTER_SECRET", raising=False)
    with pytest.raises(ConfigInvalid, match="cluster secret"):
        security_of(config(cluster_secret=None))


KEYS = {"private_key": "12" * 32, "allowed_keys": ("ab" * 32,)}


def test_a_worker_with_its_own_key_shows_it_and_admits_its_list():
    local = side(**KEYS)
    own = CurveKeys.from_private(bytes.fromhex("12" * 32))
    assert (local.security.server, local.security.client) == (own, own)
    assert local.public_key == own.public_key
    assert local.trusts(keyed("ab" * 32))
    assert not local.trusts(keyed("cd" * 32))
    assert not local.trusts(peer())
    local.allow_keys(["cd" * 32])
    assert local.trusts(keyed("cd" * 32))
    assert not local.trusts(keyed("ab" * 32))


def keyed(public_key):
    return peer(public_key=public_key)


def test_a_list_that_is_malformed_changes_nothing():
    local = side(**KEYS)
    with pytest.raises(ConfigInvalid, match="allowed key"):
        local.allow_keys(["cd" * 32, "not a key"])
    assert local.trusts(keyed("ab" * 32))


def test_a_worker_that_shares_the_secret_has_no_list():
    with pytest.raises(ConfigInvalid, match="no key of its own"):
        side().allow_keys([])
    assert side().trusts(peer())
    assert side().trusts(keyed(SECURITY.server.public_key))


def test_two_secrets_are_trusted_while_one_is_shown():
    other = ClusterSecurity.from_secret("the secret that comes next")
    local = side(cluster_secret_accepted="the secret that comes next")
    assert local.public_key == SECURITY.server.public_key
    assert local.trusts(keyed(other.server.public_key))
    assert not side().trusts(keyed(other.server.public_key))
