"""What this worker says of itself when it meets a peer, as either end of a connection."""

from msgspec import Struct

from handshake import ClusterSecurity, Identity, Limits, Publication
from handshake.network import ZEROMQ, Network
from kvflow import __version__
from kvflow.config import WorkerConfig
from kvflow.rendezvous.publication import Advertisement, encode

__all__ = ["ZEROMQ", "Network", "OurSide", "introduce"]


class OurSide(Struct, frozen=True):
    """What we say and allow.

    Attributes:
        identity: who we are.
        publication: our manifest.
        security: the cluster's keys.
        limits: budgets and bounds.
        network: where we meet peers.
    """

    identity: Identity
    publication: Publication
    security: ClusterSecurity
    limits: Limits
    network: Network = ZEROMQ


def introduce(
    config: WorkerConfig, incarnation: str, advertisement: Advertisement, network: Network = ZEROMQ
) -> OurSide:
    """Say who we are and what we publish.

    Raises:
        ConfigInvalid: there is no usable cluster secret.
    """
    return OurSide(
        identity=Identity(
            engine_id=config.engine_id,
            rank=config.rank,
            num_ranks=config.num_ranks,
            incarnation=incarnation,
            role=config.role,
            software=f"kvflow {__version__}",
        ),
        publication=encode(advertisement),
        security=ClusterSecurity.from_secret(config.secret()),
        limits=Limits(connect_s=config.connect_s, handshake_s=config.handshake_s),
        network=network,
    )
