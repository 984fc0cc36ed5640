"""What the demo's router and engines say to each other: one request, one reply, as lines of JSON.

``kv_transfer_params`` passes through the router unread, as it does in a real one.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvflow.report import TransferReport

Name = Annotated[str, Meta(min_length=1, max_length=256)]
NumTokens = Annotated[int, Meta(ge=1, le=1 << 20)]
"""More than the blocks of any demo hold; the pool refuses what is more than it has."""

Prompt = Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
Token = Annotated[int, Meta(ge=0, le=255)]
Params = Annotated[dict[str, Any], Meta(max_length=64)]
"""Read by ``Ticket.from_params``, which bounds the rest."""


class Prefill(Struct, frozen=True, kw_only=True, tag="prefill"):
    """Compute a prompt and offer its cache.

    Attributes:
        request_id: unique among the engine's requests.
        prompt: tokens are bytes.
    """

    request_id: Name
    prompt: Prompt


class Prefilled(Struct, frozen=True, kw_only=True, tag="prefilled"):
    """The prompt is computed, and its cache waits to be pulled.

    Attributes:
        token: the first one generated.
        kv_transfer_params: for the decode engine, opaque.
    """

    token: int
    kv_transfer_params: dict[str, Any]


class Decode(Struct, frozen=True, kw_only=True, tag="decode"):
    """Pull the cache of a prompt and continue.

    Attributes:
        request_id: unique among the engine's requests.
        num_prompt_tokens: length of the prompt.
        token: the first one generated.
        max_tokens: to be generated, ``token`` included.
        kv_transfer_params: as the prefill engine gave them.
    """

    request_id: Name
    num_prompt_tokens: NumTokens
    token: Token
    max_tokens: NumTokens
    kv_transfer_params: Params


class Generate(Struct, frozen=True, kw_only=True, tag="generate"):
    """Compute a prompt and continue, in one engine.

    Attributes:
        request_id: unique among the engine's requests.
        prompt: tokens are bytes.
        max_tokens: to be generated.
    """

    request_id: Name
    prompt: Prompt
    max_tokens: NumTokens


class Generated(Struct, frozen=True, kw_only=True, tag="generated"):
    """The request is done.

    Attributes:
        tokens: all that were generated.
        report: what the pull moved; None if nothing was pulled.
    """

    tokens: list[int]
    report: TransferReport | None = None


class Drain(Struct, frozen=True, kw_only=True, tag="drain"):
    """Wait until no request is open, and report what is left."""


class Drained(Struct, frozen=True, kw_only=True, tag="drained"):
    """What an engine still holds, when it should hold nothing.

    Attributes:
        blocks_used: not returned to the free list.
        leases_held: offers that have not ended.
        blocks_quarantined: destination blocks that a transfer may still write to.
    """

    blocks_used: int = 0
    leases_held: int = 0
    blocks_quarantined: int = 0

    @property
    def clean(self) -> bool:
        """True if nothing is left."""
        return not (self.blocks_used or self.leases_held or self.blocks_quarantined)


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The request was not served.

    Attributes:
        code: stable name of the kind of error.
        detail: for humans, with the remedy.
    """

    code: str
    detail: str


class Listening(Struct, frozen=True, kw_only=True):
    """The first line that an engine prints: it is ready.

    Attributes:
        address: ``host:port``.
    """

    address: str


Request = Prefill | Decode | Generate | Drain
Reply = Prefilled | Generated | Drained | Failed

_encoder = msgspec.json.Encoder()
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def to_line(message: Struct) -> bytes:
    """Return a message as one line of JSON."""
    return _encoder.encode(message) + b"\n"


def request_from_line(line: bytes) -> Request:
    """Read a request.

    Raises:
        msgspec.DecodeError: it is not one; says where.
    """
    return _requests.decode(line)


def reply_from_line(line: bytes) -> Reply:
    """Read a reply.

    Raises:
        msgspec.DecodeError: it is not one; says where.
    """
    return _replies.decode(line)
