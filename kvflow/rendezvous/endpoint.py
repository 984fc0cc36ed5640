"""What a worker states about itself and publishes, the keys that it trusts, and handshake's errors as kvflow's.

Everything that arrives is hostile: the decoder checks types and bounds, ``Advertisement.check`` what relates them.
Nothing of it reaches the planner or NIXL before both have passed.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from handshake import AllowedKeys, ClusterSecurity, Identity, Limits, Publication
from handshake import errors as theirs
from handshake.server import MakePass
from handshake.sockets import ZEROMQ, Network
from kvflow import errors as ours
from kvflow.addresses import AddressMalformed, host_and_port
from kvflow.config import ENDPOINT_PATTERN, WorkerConfig
from kvflow.errors import ProtocolViolation, ReleaseMismatch, SpecInvalid
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import METADATA_BYTES_MAX, Region
from kvflow.layout.manifest import MANIFEST_BYTES_MAX, MANIFEST_SCHEMA, Manifest
from kvflow.version import __version__

__all__ = [
    "READER",
    "ZEROMQ",
    "Advertisement",
    "LocalEndpoint",
    "Network",
    "as_kvflow_error",
    "build_local_endpoint",
    "cluster_key",
    "decode",
    "encode",
    "files_wanted",
    "security_of",
]

READER = Publication.of(b"", schema=MANIFEST_SCHEMA)
"""What a reader publishes: no manifest. It refuses a producer of another schema itself, and says so."""

SLOT_BYTES = 8

PLANES_MAX = 4  # twice as many data planes as there are

ENDPOINT_LENGTH_MAX = 300  # a host name has 253 characters at most

ENDPOINT_OR_NONE = rf"^(|{ENDPOINT_PATTERN})\Z"

PlaneName = Annotated[str, Meta(min_length=1, max_length=32)]
Metadata = Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]


def files_wanted(peers: int) -> int:
    """Return how many files a process opens for so many peers: four to dial each, one for its TCP plane, 256 itself."""
    return 256 + 5 * peers


class Advertisement(Struct, frozen=True, kw_only=True):
    """What a peer needs in order to read from this worker.

    Attributes:
        manifest: the canonical KV metadata.
        epochs: the epoch table: DRAM, u64 slots.
        planes: name of each data plane -> the exporter's own description; only the same plane can read it.
        data_endpoint: where the TCP plane listens, as peers reach it: ``tcp://HOST:PORT``; empty without one.
        tcp_encryption: of the TCP plane.
        require_encryption: whether it may be read from another host only with encryption.
    """

    manifest: Manifest
    epochs: Region
    planes: Annotated[dict[PlaneName, Metadata], Meta(min_length=1, max_length=PLANES_MAX)]
    data_endpoint: Annotated[str, Meta(max_length=ENDPOINT_LENGTH_MAX, pattern=ENDPOINT_OR_NONE)] = ""
    tcp_encryption: Annotated[str, Meta(max_length=32)] = "off"
    require_encryption: bool = False

    @property
    def num_slots(self) -> int:
        """The slots of its epoch table."""
        return self.epochs.nbytes // SLOT_BYTES

    def check(self) -> None:
        """Check what the types cannot say; raise ``SpecInvalid`` with what is wrong."""
        self.manifest.check()
        if self.epochs.memory != "DRAM" or self.epochs.nbytes % SLOT_BYTES:
            raise SpecInvalid(f"the epoch table is not an array of u64 in DRAM: {self.epochs}")
        nbytes = sum(map(len, self.planes.values()))
        if nbytes > METADATA_BYTES_MAX:
            raise SpecInvalid(f"the metadata of all data planes has {nbytes} bytes, more than {METADATA_BYTES_MAX}")
        if ("tcp" in self.planes) != bool(self.data_endpoint):
            raise SpecInvalid(f"the data planes are {sorted(self.planes)}, and data_endpoint is {self.data_endpoint!r}")
        if self.data_endpoint:
            try:
                host_and_port(self.data_endpoint, port_min=1)
            except AddressMalformed as error:
                fault = f"data_endpoint is {self.data_endpoint!r}, which has no port that can be dialed"
                raise SpecInvalid(fault) from error


class _Sized(Struct, frozen=True):
    """An advertisement whose manifest is not decoded yet."""

    manifest: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Advertisement)
_sized_decoder = msgspec.msgpack.Decoder(_Sized)


def encode(advertisement: Advertisement) -> Publication:
    """Wrap an advertisement for the handshake; raise ``SpecInvalid`` if no peer would read so large a manifest."""
    nbytes = len(_encoder.encode(advertisement.manifest))
    if nbytes > MANIFEST_BYTES_MAX:
        raise SpecInvalid(f"the manifest has {nbytes} bytes, more than {MANIFEST_BYTES_MAX}")
    return Publication.of(_encoder.encode(advertisement), schema=MANIFEST_SCHEMA)


def decode(publication: Publication, *, peer: str, software: str = "") -> Advertisement:
    """Read a peer's advertisement; the handshake has verified its digest. ``software``: what the peer says it runs.

    Thread: any. The largest takes a tenth of a second, too long for the event loop.

    Raises:
        ReleaseMismatch: the peer writes another version of the manifest.
        ProtocolViolation: it is malformed or contradicts itself.
    """
    if publication.schema != MANIFEST_SCHEMA:
        whose = f"{peer}, which is {software!r},"
        raise ReleaseMismatch(whose, "manifest schema", str(publication.schema), str(MANIFEST_SCHEMA))
    try:
        nbytes = len(memoryview(_sized_decoder.decode(publication.payload).manifest))
        if nbytes > MANIFEST_BYTES_MAX:  # before it is decoded, which nothing can interrupt
            raise SpecInvalid(f"it has {nbytes} bytes, more than {MANIFEST_BYTES_MAX}")
        advertisement = _decoder.decode(publication.payload)
        advertisement.check()
        advertisement.manifest.geometry_digest()  # which the loop would have to compute otherwise
    except SpecInvalid as error:
        raise ProtocolViolation(f"the peer published an invalid manifest: {error.message}", peer=peer) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"the peer published an invalid manifest: {error}", peer=peer) from error
    return advertisement


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

    def credentials(self, peer: PeerId, theirs: Identity, pass_: bytes) -> Credentials:
        """Return what we need for the TCP plane of a producer rank that gave us this pass; raises as ``key_of``."""
        key, ours = self.security.towards(peer.public_key).client.public_key, self.identity
        return Credentials(key, ours.engine_id, ours.rank, ours.incarnation, pass_, _certificate_of(theirs))

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
    certificate: bytes = b"",
) -> LocalEndpoint:
    """Build what a worker sends to its peers.

    ``pass_key`` makes the passes of its readers, None gives none. ``certificate``: of its TCP plane.
    """
    return LocalEndpoint(
        identity=Identity(
            engine_id=config.engine_id,
            rank=config.rank,
            num_ranks=config.num_ranks,
            incarnation=incarnation,
            role="both",
            software=f"kvflow {__version__}",
            certificate=certificate or UNSET,
        ),
        publication=encode(advertisement),
        security=security,
        limits=Limits(
            peers_max=config.tuning.peers_max,
            connect_s=config.tuning.connect_s,
            handshake_s=config.tuning.handshake_s,
        ),
        network=network,
        make_pass=None if pass_key is None else _passes(pass_key),
    )


def _passes(pass_key: bytes) -> MakePass:
    # A function and not a partial, whose repr would show the key.
    def make_pass(public_key: str, reader: Identity) -> bytes:
        who = (reader.engine_id, reader.rank, reader.incarnation)
        return pass_of(pass_key, public_key, *who, certificate=_certificate_of(reader))

    return make_pass


def _certificate_of(identity: Identity) -> bytes:
    return b"" if isinstance(identity.certificate, UnsetType) else identity.certificate


def cluster_key(config: WorkerConfig) -> str:
    """Return the public key that follows from the cluster secret: equal on all workers of a cluster, and no secret."""
    return ClusterSecurity.from_secret(config.security.secret).server.public_key


def security_of(config: WorkerConfig) -> ClusterSecurity:
    """Return a worker's keys, and those that it trusts; raise ``ConfigInvalid`` without a usable cluster secret."""
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


class Replaced(ours.PeerLost):
    """Another worker answers at the address, or at one of several of a name. The peer may live elsewhere."""


OWN_ADDRESS = (
    "Have each worker advertise an address or a name of its own, or wait until the name leads to the producer."
)


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
        case theirs.WrongServer():
            mapped = Replaced(error.message, peer=peer, remedy=OWN_ADDRESS if error.answered is None else "")
        case theirs.TimedOut():
            mapped = ours.DeadlineExceeded(error.message, phase=error.phase, peer=peer, remedy=error.remedy)
        case _:
            mapped = ours.PeerLost(error.message, peer=peer, remedy=error.remedy)
    return mapped


def _about(peer: str, message: str) -> str:
    """Return a message that names the peer, once."""
    return message if message.startswith(peer) else f"{peer}: {message}"
