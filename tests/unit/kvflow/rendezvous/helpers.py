"""What the tests of the bridge share: a cluster, a cache's advertisement, a producer, and connections to it."""

from contextlib import asynccontextmanager

import msgspec

from handshake import ClusterSecurity
from handshake.sockets import ZEROMQ
from kvflow.ids import PeerId
from kvflow.layout.component import Component, Region
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.leases.tickets import RankAddress
from kvflow.rendezvous.dialer import open_link
from kvflow.rendezvous.endpoint import Advertisement, build_local_endpoint, security_of
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.unit.kvflow.layout import helpers as layout_helpers
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, cache_of
from tests.unit.kvflow.worker.pulling import config

__all__ = ["PATIENCE_S", "SECRET", "cache_of", "config"]

SECURITY = ClusterSecurity.from_secret(SECRET)
INCARNATION = "a" * 32
EPOCHS = Region(8192, 64)
DENSE = layout_helpers.DENSE | {"shard_axis": 0, "first": 0, "total": 1, "token_axis": 1}


def manifest():
    layers = tuple(
        Layer(name, "full", 0, (Component(**DENSE | {"offset": offset}),)) for name, offset in (("a", 0), ("b", 1024))
    )
    return Manifest(2, (Region(4096, 4096),), (ManifestGroup("full", 4, layers),))


def advertisement(**changes):
    fields = {"manifest": manifest(), "epochs": EPOCHS, "planes": {"loopback": b"how to read me"}}
    return Advertisement(**fields | changes)


def side(incarnation=INCARNATION, *, pass_key=None, **settings):
    settings = config(**settings)
    return build_local_endpoint(settings, incarnation, advertisement(), security_of(settings), pass_key=pass_key)


def address(endpoint="tcp://127.0.0.1:5000", rank=0, incarnation=INCARNATION):
    return RankAddress(rank, incarnation, endpoint)


def peer(endpoint="tcp://127.0.0.1:5000", rank=0, incarnation=INCARNATION, *, engine_id="prefill-0", public_key=""):
    return PeerId(engine_id, rank, incarnation, endpoint, public_key)


READER_INCARNATION = "b" * 32
OURS = side(READER_INCARNATION, engine_id="decode-0")


@asynccontextmanager
async def producing(*hooks, network=ZEROMQ, **settings):
    """Open a producer."""
    environment = msgspec.structs.replace(PRODUCTION, network=network)
    async with open_worker(config(**settings), cache_of(), hooks=hooks, environment=environment) as worker:
        yield worker


def linked(producer, *, local=OURS, on_ended=lambda code, detail: None, **named):
    """Dial a producer, or the rank that a ticket names in its place."""
    expected = {"incarnation": producer.incarnation} | named
    return open_link(peer(producer.endpoint, **expected), local=local, on_ended=on_ended)
