"""What a worker publishes to its peers, encoded and checked.

Everything that arrives is hostile: the decoder checks types and bounds, ``check`` what relates them. Nothing
of it reaches the planner or NIXL before both have passed.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from handshake import Publication
from kvflow.addresses import PORT_MAX, host_and_port
from kvflow.config import ENDPOINT_PATTERN
from kvflow.errors import ProtocolViolation, ReleaseMismatch, SpecInvalid
from kvflow.layout.component import METADATA_BYTES_MAX, Region
from kvflow.layout.manifest import MANIFEST_BYTES_MAX, MANIFEST_SCHEMA, Manifest

READER = Publication.of(b"", schema=MANIFEST_SCHEMA)
"""What a reader publishes: which manifest schema it reads, so that the producer can name a mismatch."""

SLOT_BYTES = 8

PLANES_MAX = 4
"""Twice as many data planes as there are."""

ENDPOINT_LENGTH_MAX = 300
"""A host name has 253 characters at most."""

ENDPOINT_OR_NONE = rf"^(|{ENDPOINT_PATTERN})\Z"

PlaneName = Annotated[str, Meta(min_length=1, max_length=32)]
Metadata = Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]


class Advertisement(Struct, frozen=True, kw_only=True):
    """What a peer needs in order to read from this worker.

    Attributes:
        manifest: the canonical KV metadata.
        epochs: the epoch table: DRAM, u64 slots.
        planes: name of each data plane -> the exporter's own description; only the same plane can read it.
        data_endpoint: where the TCP plane listens, as peers reach it: ``tcp://HOST:PORT``; empty without one.
        tcp_encryption: of the TCP plane.
    """

    manifest: Manifest
    epochs: Region
    planes: Annotated[dict[PlaneName, Metadata], Meta(min_length=1, max_length=PLANES_MAX)]
    data_endpoint: Annotated[str, Meta(max_length=ENDPOINT_LENGTH_MAX, pattern=ENDPOINT_OR_NONE)] = ""
    tcp_encryption: Annotated[str, Meta(max_length=32)] = "off"

    def check(self) -> None:
        """Check what the types cannot say.

        Raises:
            SpecInvalid: names what is wrong.
        """
        self.manifest.check()
        if self.epochs.memory != "DRAM" or self.epochs.nbytes % SLOT_BYTES:
            raise SpecInvalid(f"the epoch table is not an array of u64 in DRAM: {self.epochs}")
        nbytes = sum(map(len, self.planes.values()))
        if nbytes > METADATA_BYTES_MAX:
            raise SpecInvalid(f"the metadata of all data planes has {nbytes} bytes, more than {METADATA_BYTES_MAX}")
        if ("tcp" in self.planes) != bool(self.data_endpoint):
            raise SpecInvalid(f"the data planes are {sorted(self.planes)}, and data_endpoint is {self.data_endpoint!r}")
        if self.data_endpoint and not 0 < host_and_port(self.data_endpoint)[1] <= PORT_MAX:
            raise SpecInvalid(f"data_endpoint is {self.data_endpoint!r}, which has no port that can be dialed")


class _Sized(Struct, frozen=True):
    """An advertisement whose manifest is not decoded yet."""

    manifest: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Advertisement)
_sized_decoder = msgspec.msgpack.Decoder(_Sized)


def encode(advertisement: Advertisement) -> Publication:
    """Wrap an advertisement for the handshake.

    Raises:
        SpecInvalid: the manifest is larger than any peer would read.
    """
    nbytes = len(_encoder.encode(advertisement.manifest))
    if nbytes > MANIFEST_BYTES_MAX:
        raise SpecInvalid(f"the manifest has {nbytes} bytes, more than {MANIFEST_BYTES_MAX}")
    return Publication.of(_encoder.encode(advertisement), schema=MANIFEST_SCHEMA)


def decode(publication: Publication, *, peer: str, software: str = "") -> Advertisement:
    """Read a peer's advertisement; the handshake has verified its digest.

    Args:
        publication: the peer's.
        peer: who it is.
        software: what it says that it runs.

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
