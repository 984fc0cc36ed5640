"""What this worker states about itself at either end of a connection, the keys it trusts, and handshake's errors."""

from collections.abc import Iterable

from msgspec import Struct

from handshake import AllowedKeys, ClusterSecurity, Identity, Limits, Publication
from handshake import errors as theirs
from handshake.server import MakePass
from handshake.sockets import ZEROMQ, Network
from kvflow import errors as ours
from kvflow.config import WorkerConfig
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.rendezvous.publication import Advertisement, encode
from kvflow.version import __version__

__all__ = ["ZEROMQ", "LocalEndpoint", "Network", "as_kvflow_error", "build_local_endpoint", "security_of"]


class LocalEndpoint(Struct, frozen=True):
    """What this worker sends to its peers, and the keys that it trusts; ``make_pass``: of a reader that dials us."""

    identity: Identity
    publication: Publication
    security: ClusterSecurity
    limits: Limits
    network: Network = ZEROMQ
    make_pass: MakePass | None = None

    @property
    def public_key(self) -> str:
        """The public key of our control endpoint."""
        return self.security.server.public_key

    def key_of(self, peer: PeerId) -> str:
        """Return the public key that a producer rank must have: that of its ticket, or of our secret.

        Raises:
            handshake.errors.Unauthenticated: we do not trust that key.
        """
        return self.security.towards(peer.public_key).server.public_key

    def credentials(self, peer: PeerId, pass_: bytes) -> Credentials:
        """Return what we send to the TCP plane of a producer rank that gave us this pass; raises as ``key_of``."""
        keys, ours = self.security.towards(peer.public_key), self.identity
        return Credentials(keys.client.public_key, ours.engine_id, ours.rank, ours.incarnation, pass_)

    def trusts(self, peer: PeerId) -> bool:
        """Return whether we trust the key of this producer rank."""
        try:
            self.key_of(peer)
        except theirs.Unauthenticated:
            return False
        return True

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys. Open connections are not checked.

        Raises:
            ConfigInvalid: a key is malformed, or we have no key of our own; nothing has changed.
        """
        if self.security.allowed is None:
            raise ours.ConfigInvalid("this worker has no key of its own, and so no list of allowed keys")
        try:
            self.security.allowed.replace(keys)
        except theirs.HandshakeError as error:
            raise as_kvflow_error(error, peer="") from error


def build_local_endpoint(
    config: WorkerConfig,
    incarnation: str,
    advertisement: Advertisement,
    security: ClusterSecurity,
    network: Network = ZEROMQ,
    *,
    pass_key: bytes | None = None,
) -> LocalEndpoint:
    """Build what a worker sends to its peers; ``pass_key`` makes the passes of its readers, None gives none."""
    return LocalEndpoint(
        identity=Identity(
            engine_id=config.engine_id,
            rank=config.rank,
            num_ranks=config.num_ranks,
            incarnation=incarnation,
            role="both",
            software=f"kvflow {__version__}",
        ),
        publication=encode(advertisement),
        security=security,
        limits=Limits(connect_s=config.tuning.connect_s, handshake_s=config.tuning.handshake_s),
        network=network,
        make_pass=None if pass_key is None else _passes(pass_key),
    )


def _passes(pass_key: bytes) -> MakePass:
    # A function and not a partial, whose repr would show the key.
    def make_pass(public_key: str, reader: Identity) -> bytes:
        return pass_of(pass_key, public_key, reader.engine_id, reader.rank, reader.incarnation)

    return make_pass


def cluster_key(config: WorkerConfig) -> str:
    """Return the public key that follows from the cluster secret: equal on all workers of a cluster, and no secret.

    Raises:
        ConfigInvalid: there is no usable cluster secret.
    """
    return ClusterSecurity.from_secret(config.security.secret).server.public_key


def security_of(config: WorkerConfig) -> ClusterSecurity:
    """Return a worker's keys, and the keys that it trusts.

    Raises:
        ConfigInvalid: there is no usable cluster secret.
    """
    told = config.security
    security = ClusterSecurity.from_secret(told.secret)
    if told.accepted_secret is not None:
        security = security.accepting(told.accepted_secret)
    if told.own_key is not None:
        security = security.with_own_key(told.own_key, AllowedKeys(told.allowed_keys or ()))
    return security


class Distrusted(ours.AuthenticationFailed):
    """We do not trust the key that the ticket names, and nothing was dialed."""


class NotDialed(ours.CapacityExceeded):
    """This process lacks what it needs to dial, and nothing was dialed."""


def as_kvflow_error(error: theirs.HandshakeError, *, peer: str) -> ours.KvflowError:
    """Return our error for theirs; chain it with ``raise ... from error``."""
    mapped: ours.KvflowError
    match error:
        case theirs.AddressInvalid() | theirs.LocalProtocolError():  # such as a manifest too large to publish
            mapped = ours.ConfigInvalid(error.message, remedy=error.remedy)
        case theirs.SocketsExhausted():
            mapped = NotDialed(error.resource, error.limit, remedy=error.remedy)
        case theirs.Unauthenticated():
            kind = Distrusted if error.local else ours.AuthenticationFailed
            mapped = kind(_about(peer, error.message), remedy=error.remedy)
        case theirs.ConnectionRefused():
            reason = error.message.removeprefix(f"the peer refused ({error.refusal}): ")
            mapped = ours.PeerRefused(error.refusal, _about(peer, reason), remedy=error.remedy)
        case theirs.RemoteProtocolError():
            mapped = ours.ProtocolViolation(error.message, peer=peer, remedy=error.remedy)
        case theirs.TimedOut():
            mapped = ours.DeadlineExceeded(error.message, phase=error.phase, peer=peer, remedy=error.remedy)
        case _:
            mapped = ours.PeerLost(error.message, peer=peer, remedy=error.remedy)
    return mapped


def _about(peer: str, message: str) -> str:
    """Return a message that names the peer, once."""
    return message if message.startswith(peer) else f"{peer}: {message}"
