"""What this worker says of itself when it meets a peer, as either end of a connection."""

from collections.abc import Iterable

from msgspec import Struct

from handshake import AllowedKeys, ClusterSecurity, Identity, Limits, Publication
from handshake.errors import AuthenticationFailed, HandshakeError
from handshake.network import ZEROMQ, Network
from handshake.server import MakePass
from kvflow import __version__
from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.rendezvous.failures import as_kvflow_error
from kvflow.rendezvous.publication import Advertisement, encode

__all__ = ["ZEROMQ", "Network", "OurSide", "introduce", "security_of"]


class OurSide(Struct, frozen=True):
    """What we say and allow.

    Attributes:
        identity: who we are.
        publication: our manifest, for those that dial us.
        security: our keys, and whom we trust.
        limits: budgets and bounds.
        network: where we meet peers.
        make_pass: makes the pass of a reader that dials us; None gives none.
    """

    identity: Identity
    publication: Publication
    security: ClusterSecurity
    limits: Limits
    network: Network = ZEROMQ
    make_pass: MakePass | None = None

    @property
    def public_key(self) -> str:
        """The public key that our control endpoint proves to hold."""
        return self.security.server.public_key

    def key_of(self, peer: PeerId) -> str:
        """Return the public key that a producer rank must prove to hold; that of our secret if its ticket says none.

        Raises:
            handshake.errors.AuthenticationFailed: we do not trust that key.
        """
        return self.security.towards(peer.public_key).server.public_key

    def credentials(self, peer: PeerId, pass_: bytes) -> Credentials:
        """Return what we say to the TCP plane of a producer rank that we have dialled, and that gave us this pass.

        Raises:
            handshake.errors.AuthenticationFailed: we do not trust its key.
        """
        keys, ours = self.security.towards(peer.public_key), self.identity
        return Credentials(keys.client.public_key, ours.engine_id, ours.rank, ours.incarnation, pass_)

    def trusts(self, peer: PeerId) -> bool:
        """Tell whether we would dial this producer rank now."""
        try:
            self.key_of(peer)
        except AuthenticationFailed:
            return False
        return True

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys; whoever is connected is not looked at.

        Raises:
            ConfigInvalid: a key is malformed, or we have no key of our own; nothing has changed.
        """
        if self.security.allowed is None:
            raise ConfigInvalid("this worker has no key of its own, and so no list of allowed keys")
        try:
            self.security.allowed.replace(keys)
        except HandshakeError as error:
            raise as_kvflow_error(error, peer="") from error


def introduce(
    config: WorkerConfig,
    incarnation: str,
    advertisement: Advertisement,
    security: ClusterSecurity,
    network: Network = ZEROMQ,
    *,
    pass_key: bytes | None = None,
) -> OurSide:
    """Say who we are and what we publish.

    Args:
        config: the settings.
        incarnation: of this life.
        advertisement: what we publish.
        security: ``security_of`` the settings.
        network: where we meet peers.
        pass_key: what the passes of our readers are made with; None gives none.
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
        security=security,
        limits=Limits(connect_s=config.connect_s, handshake_s=config.handshake_s),
        network=network,
        make_pass=None if pass_key is None else _passes(pass_key),
    )


def _passes(pass_key: bytes) -> MakePass:
    # A function and not a partial, whose repr would show the key.
    def make_pass(public_key: str, reader: Identity) -> bytes:
        return pass_of(pass_key, public_key, reader.engine_id, reader.rank, reader.incarnation)

    return make_pass


def security_of(config: WorkerConfig) -> ClusterSecurity:
    """Return a worker's keys, and whom it trusts.

    Raises:
        ConfigInvalid: there is no usable cluster secret.
    """
    security = ClusterSecurity.from_secret(config.secret())
    accepted, own = config.accepted_secret(), config.own_key()
    if accepted is not None:
        security = security.accepting(accepted)
    if own is not None:
        security = security.with_own_key(own, AllowedKeys(config.allowed_keys or ()))
    return security
