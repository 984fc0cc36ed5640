"""What the tests of the bridge share: a cluster, a cache's advertisement, and whoever keeps leases."""

from handshake import ClusterSecurity
from kvflow.cache.tickets import RankAddress
from kvflow.config import WorkerConfig
from kvflow.ids import Credentials, PeerId
from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.region import Region
from kvflow.rendezvous.introduction import introduce, security_of
from kvflow.rendezvous.publication import Advertisement

SECRET = "a secret of the tests, long enough"
SECURITY = ClusterSecurity.from_secret(SECRET)
INCARNATION = "a" * 32
EPOCHS = Region(8192, 64)
DENSE = {
    "role": "k",
    "dtype": "float16",
    "region": 0,
    "offset": 0,
    "block_stride": 64,
    "kernel_stride": 0,
    "extents": (1, 4, 8),
    "strides": (64, 16, 2),
    "shard_axis": 0,
    "first": 0,
    "total": 1,
    "token_axis": 1,
}


def manifest():
    layers = tuple(
        Layer(name, "full", 0, (Component(**DENSE | {"offset": offset}),)) for name, offset in (("a", 0), ("b", 1024))
    )
    return Manifest(2, (Region(4096, 4096),), (ManifestGroup("full", 4, layers),))


def advertisement(**changes):
    fields = {"manifest": manifest(), "epochs": EPOCHS, "planes": {"loopback": b"how to read me"}}
    return Advertisement(**fields | changes)


def config(**settings):
    return WorkerConfig(**{"engine_id": "prefill-0", "cluster_secret": SECRET, "transport": "loopback"} | settings)


def side(incarnation=INCARNATION, *, pass_key=None, **settings):
    settings = config(**settings)
    return introduce(settings, incarnation, advertisement(), security_of(settings), pass_key=pass_key)


CREDENTIALS = Credentials("12" * 32, "decode-0", 0, "b" * 32, b"a pass")


def address(endpoint="tcp://127.0.0.1:5000", rank=0, incarnation=INCARNATION):
    return RankAddress(rank, incarnation, endpoint)


def peer(endpoint="tcp://127.0.0.1:5000", rank=0, incarnation=INCARNATION, *, engine_id="prefill-0", public_key=""):
    return PeerId(engine_id, rank, incarnation, endpoint, public_key)
