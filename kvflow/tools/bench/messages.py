"""What the measuring process and the source process say to each other: JSON lines over a pipe or a TCP connection."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from kvflow.tools.bench.geometry import Geometry

LINE_BYTES_MAX = 256 << 20
"""A thousand tickets of a thousand blocks each, as JSON."""


Name = Annotated[str, Meta(min_length=1, max_length=256)]
BlockId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
BlockIds = Annotated[list[BlockId], Meta(max_length=1 << 20)]


class OpenCache(Struct, frozen=True, tag="open"):
    """Open one more worker with a cache."""

    name: Name
    geometry: Geometry


class OfferBlocks(Struct, frozen=True, tag="offer"):
    """Offer the same blocks of one worker several times."""

    name: Name
    block_ids: Annotated[list[BlockIds], Meta(max_length=256)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    count: Annotated[int, Meta(ge=1, le=1 << 14)]


class CloseCaches(Struct, frozen=True, tag="close"):
    """Close all workers."""


class Opened(Struct, frozen=True):
    """A worker that is open, and what bare NIXL and the kernel need in order to read the same memory.

    Attributes:
        pid: of the source process.
        pid_namespace: in which ``pid`` means that process.
        manifest: the cache's manifest, msgpack.
        agent: name of a bare NIXL agent over the same memory.
        metadata: what a bare reader must load.
        streams: ``host:port`` of plain TCP streams of the same memory; empty if it is not host memory.
    """

    pid: int
    pid_namespace: str
    manifest: bytes
    agent: str
    metadata: bytes
    streams: str


class Offered(Struct, frozen=True):
    """Tickets, as a router would carry them."""

    params: list[dict[str, Any]]


class Closed(Struct, frozen=True):
    """All workers are closed."""


Request = OpenCache | OfferBlocks | CloseCaches
