"""What the measuring process and the source process say to each other: JSON lines over a pipe or a TCP connection."""

from typing import Any

from msgspec import Struct

from kvflow.bench.geometry import Geometry

LINE_BYTES_MAX = 256 << 20
"""A thousand tickets of a thousand blocks each, as JSON."""


class OpenCache(Struct, frozen=True, tag="open"):
    """Open one more worker with a cache."""

    name: str
    geometry: Geometry


class OfferBlocks(Struct, frozen=True, tag="offer"):
    """Offer the same blocks of one worker several times."""

    name: str
    block_ids: list[list[int]]
    num_tokens: int
    count: int


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
    """

    pid: int
    pid_namespace: str
    manifest: bytes
    agent: str
    metadata: bytes


class Offered(Struct, frozen=True):
    """Tickets, as a router would carry them."""

    params: list[dict[str, Any]]


class Closed(Struct, frozen=True):
    """All workers are closed."""


Request = OpenCache | OfferBlocks | CloseCaches
