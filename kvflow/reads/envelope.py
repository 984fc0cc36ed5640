"""An exporter's description of itself, protected by a digest.

NIXL's metadata has no checksum, and a flipped bit can crash the process that loads it. So every byte that reaches NIXL
is covered by the digest. The digest protects against accidents only: the control channel prevents forgery by outsiders,
and ``nixl.metadata`` detects what a member forges.

On the wire: 4 bytes of magic, 16 bytes of BLAKE2b over the rest, and the rest, which is msgpack.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvflow.layout.component import METADATA_BYTES_MAX

_MAGIC = b"kvt1"
_DIGEST_BYTES = 16


_Short = Annotated[str, Meta(max_length=64)]


class Envelope(Struct, frozen=True):
    """One exporter.

    Attributes:
        transport: name of the transport, which readers must use, too.
        agent: the exporter's name, unique per incarnation.
        blob: what the transport's library needs.
        settings: what must be equal on both sides; None if the peer did not state it.
    """

    transport: Annotated[str, Meta(max_length=32)]
    agent: Annotated[str, Meta(min_length=1, max_length=512)]
    blob: bytes
    settings: Annotated[dict[_Short, _Short], Meta(max_length=32)] | None = None


_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(envelope: Envelope) -> bytes:
    """Encode an envelope.

    Raises:
        ValueError: the result would be larger than ``METADATA_BYTES_MAX``.
    """
    body = msgspec.msgpack.encode(envelope)
    sealed = _MAGIC + _digest(body) + body
    if len(sealed) > METADATA_BYTES_MAX:
        raise ValueError(f"{len(sealed)} bytes of metadata; the limit is {METADATA_BYTES_MAX}")
    return sealed


def unseal(sealed: bytes, *, transport: str, agent: str | None = None) -> Envelope:
    """Decode the result of ``seal`` for the same transport.

    Args:
        sealed: the bytes.
        transport: the transport that reads them.
        agent: the agent that must have written them; None accepts any.

    Raises:
        ValueError: it is too large, truncated, changed, or from another agent or transport.
    """
    if len(sealed) > METADATA_BYTES_MAX:
        raise ValueError(f"{len(sealed)} bytes of metadata; the limit is {METADATA_BYTES_MAX}")
    digest, body = sealed[len(_MAGIC) :][:_DIGEST_BYTES], sealed[len(_MAGIC) + _DIGEST_BYTES :]
    if not sealed.startswith(_MAGIC):
        raise ValueError("not the metadata of a transport")
    if digest != _digest(body):
        raise ValueError("the metadata was changed or truncated on its way")
    envelope = _decoder.decode(body)
    if envelope.transport != transport:
        raise ValueError(f"the peer's transport is {envelope.transport!r}, ours is {transport!r}")
    if agent is not None and envelope.agent != agent:
        # A peer that uses the name of another one would prevent reads from it.
        raise ValueError(f"the metadata is that of {envelope.agent!r}, not of {agent!r}")
    return envelope


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
