"""What a probe is: a small cache with known bytes, tickets for it, and facts about the host that offers it."""

import os
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvflow.config import ENDPOINT_PATTERN
from kvflow.errors import ProtocolViolation
from kvflow.reads.reach import HostFacts
from kvflow.worker.snapshot import TOLD_BYTES_MAX

BLOCK_SIZE, BLOCK_BYTES = 16, 16 << 10
"""Tokens and bytes of one block of the cache."""

LARGE_BYTES = 64 << 20
"""Enough that a read of 50 GB/s lasts a millisecond, and small enough that every host has room."""

SMALL_BLOCKS = (1, 4)
"""Of small reads: 16 KiB and 64 KiB."""

LARGE_BLOCKS_MIN = 64
"""Of the large read, where memory is short: 1 MiB."""

MEMORY_SHARE = 8
"""The cache takes at most this part of the memory that is free."""

SHORT = Annotated[str, Meta(max_length=256)]
Variables = Annotated[dict[SHORT, SHORT], Meta(max_length=32)]
Params = Annotated[dict[SHORT, Annotated[str, Meta(max_length=TOLD_BYTES_MAX)]], Meta(max_length=4)]

SmallSize = Annotated[int, Meta(ge=1, le=SMALL_BLOCKS[-1])]


class ProbeOffer(Struct, frozen=True, kw_only=True):
    """What ``kvflow doctor --listen`` tells a member of the cluster.

    Attributes:
        seed: of the bytes of the cache.
        device: that the cache lies on.
        transport: the setting of the worker.
        missing: data planes that could not start there, and why.
        advertised: the control endpoint that its tickets name.
        small: tickets, by number of blocks.
        large: tickets for all blocks.
        large_blocks: how many these are.
        facts: of its host.
    """

    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    device: SHORT
    transport: SHORT
    missing: Variables
    advertised: Annotated[str, Meta(max_length=300, pattern=rf"^{ENDPOINT_PATTERN}\Z")]
    small: Annotated[
        dict[SmallSize, Annotated[tuple[Params, ...], Meta(max_length=8)]], Meta(min_length=1, max_length=4)
    ]
    large: Annotated[tuple[Params, ...], Meta(max_length=4)]
    large_blocks: Annotated[int, Meta(ge=LARGE_BLOCKS_MIN, le=LARGE_BYTES // BLOCK_BYTES)]
    facts: HostFacts


class ReadFailure(Struct, frozen=True, kw_only=True):
    """Why nothing more could be read: as an error of kvflow says it."""

    code: str
    message: str
    remedy: str


class Reads(Struct, frozen=True, kw_only=True):
    """What was read.

    Attributes:
        nbytes: of each read.
        seconds: of each read, from the call of ``pull`` to its result.
        gb_per_s: rate of each, while bytes moved.
        wrong_bytes: that differ from what was offered, in all of them.
    """

    nbytes: int
    seconds: tuple[float, ...]
    gb_per_s: tuple[float, ...]
    wrong_bytes: int


class ProbeFigures(Struct, frozen=True, kw_only=True):
    """What one reader found.

    Attributes:
        reads: by size, the smallest first.
        failure: why the reads ended early; None if they did not.
        plane: data plane that was chosen; empty if no connection was made.
        transport: that carried the bytes, by UCX's name.
        known_by: how that is known, as in ``PeerConnected``.
        missing: data planes that could not start here, and why.
        may_copy: whether the kernel lets us copy the other process's memory; None if that process is elsewhere.
        slow: what ``peer.slow`` said, and its remedy; empty if it did not come.
        facts: of this process.
    """

    reads: tuple[Reads, ...]
    failure: ReadFailure | None
    plane: str
    transport: str
    known_by: str
    missing: dict[str, str]
    may_copy: bool | None
    slow: tuple[str, ...]
    facts: HostFacts


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ProbeOffer)


def encode(offer: ProbeOffer) -> bytes:
    """Return an offer as a worker tells it."""
    return _encoder.encode(offer)


def decode(told: bytes, *, peer: str) -> ProbeOffer | None:
    """Read what a worker has told; None if it offers no probe.

    Raises:
        ProtocolViolation: it is malformed.
    """
    if not told:
        return None
    try:
        return _decoder.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"{peer} offers a malformed probe: {error}", peer=peer) from error


def large_blocks(free_bytes: int) -> int:
    """Return how many blocks the large read has, with so much memory free."""
    return max(LARGE_BLOCKS_MIN, min(LARGE_BYTES, free_bytes // MEMORY_SHARE) // BLOCK_BYTES)


def free_memory() -> int:
    """Return the free bytes of host memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def content(seed: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of the cache: no two blocks are equal, and no byte is certain without the seed."""
    words = np.arange(num_blocks * BLOCK_BYTES // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)
    return words.view(np.uint8)


def tokens(num_blocks: int) -> int:
    """Return the tokens of so many blocks."""
    return num_blocks * BLOCK_SIZE
