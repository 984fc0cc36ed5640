"""What a worker says of itself follows from its settings; its secrets are not in what can be printed."""

import pytest

from kvflow import __version__
from kvflow.errors import ConfigInvalid
from kvflow.rendezvous.introduction import introduce
from kvflow.rendezvous.publication import decode

from .helpers import INCARNATION, SECRET, SECURITY, advertisement, config, side


def test_our_side():
    ours = side(rank=1, num_ranks=2, role="prefill", connect_s=0.5, handshake_s=0.75)
    identity = ours.identity
    assert (identity.engine_id, identity.rank, identity.num_ranks) == ("prefill-0", 1, 2)
    assert (identity.incarnation, identity.role) == (INCARNATION, "prefill")
    assert __version__ in identity.software
    assert (ours.limits.connect_s, ours.limits.handshake_s) == (0.5, 0.75)
    assert ours.security == SECURITY
    assert decode(ours.publication, peer="p") == advertisement()


def test_no_secret_is_shown():
    shown = repr(side())
    for secret in (SECRET, repr(SECURITY.ticket_key), repr(SECURITY.server.private), repr(SECURITY.client.private)):
        assert secret not in shown


def test_without_a_secret_nobody_is_introduced(monkeypatch):
    monkeypatch.delenv("KVFLOW_CLUSTER_SECRET", raising=False)
    with pytest.raises(ConfigInvalid, match="cluster secret"):
        introduce(config(cluster_secret=None), INCARNATION, advertisement())
