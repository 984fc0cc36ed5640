"""What the tests of the bridge share: a cluster, a cache's advertisement, and whoever keeps leases."""

from handshake import ClusterSecurity
from kvflow.cache.tickets import RankAddress
from kvflow.config import WorkerConfig
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.placement import Component
from kvflow.layout.region import Region
from kvflow.rendezvous.introduction import introduce
from kvflow.rendezvous.publication import Advertisement

SECRET = "a secret of the tests, long enough"
SECURITY = ClusterSecurity.from_secret(SECRET)
INCARNATION = "a" * 32
EPOCHS = Region(8192, 64)
DENSE = {
    "role": "k",
    "dtype": "float16",
    "first_head": 0,
    "num_heads": 1,
    "total_heads": 1,
    "num_tokens": 4,
    "content_bytes": 16,
    "region": 0,
    "offset": 0,
    "block_stride": 64,
    "head_stride": 64,
    "token_stride": 16,
}


def manifest():
    layers = (Layer("a", (Component(**DENSE),)), Layer("b", (Component(**DENSE | {"offset": 1024}),)))
    return Manifest(2, (Region(4096, 4096),), (ManifestGroup("full", 4, 0, layers),))


def advertisement(**changes):
    fields = {"manifest": manifest(), "epochs": EPOCHS, "transport": "loopback", "metadata": b"how to read me"}
    return Advertisement(**fields | changes)


def config(**settings):
    return WorkerConfig(**{"engine_id": "prefill-0", "cluster_secret": SECRET, "transport": "loopback"} | settings)


def side(incarnation=INCARNATION, **settings):
    return introduce(config(**settings), incarnation, advertisement())


def address(endpoint="tcp://127.0.0.1:5000", rank=0, incarnation=INCARNATION):
    return RankAddress(rank, incarnation, endpoint)
