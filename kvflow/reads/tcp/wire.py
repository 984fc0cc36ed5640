"""The frames of the TCP data plane after its opening, their bounds, and what a producer publishes. Pure.

A reader asks for blocks of a lease. It shows the lease once per connection, and then asks for *runs* of stretches. A
stretch is what ``kvflow.layout.tracks`` cuts: bytes of each block of one group that no other block has. The producer
publishes the stretches, numbers them in order, and computes every address itself.

Every number is little-endian. A request is a header of 24 bytes, and a body::

    LEASE   slot, epoch                 the MAC of its ticket, 32 bytes
    READ    group, runs, slot, epoch    seven int64 for each run, see ``RUN``
    EPOCH   slot                        nothing

Both sides forget all leases of a connection when a LEASE arrives while they know ``LEASES_MAX``.

Answers come in the order of requests. Each has frames of 16 bytes::

    PIECE   nbytes    then the next bytes of the READ, at most ``PIECE_BYTES_MAX``
    DONE    epoch     what the slot held after the last byte had been copied; also the answer to EPOCH
    ENDED   epoch     the lease is not held; no more bytes come
    REFUSED nbytes    then why, as text

Every size is checked before memory is allocated for it. A size out of bounds ends the connection.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvflow.layout.component import ADDRESS_MAX
from kvflow.layout.tracks import TRACKS_MAX, Track

REQUEST = struct.Struct("<BBHIIIQ")
"""Header of a request: kind, 0, group, runs, slot, 0, epoch."""

ANSWER = struct.Struct("<BBHIQ")
"""Header of an answer: kind, 0, 0, 0, bytes or epoch."""

LEASE, READ, EPOCH = 1, 2, 3
PIECE, DONE, ENDED, REFUSED = 1, 2, 3, 4

RUN = struct.Struct("<7q")
"""Stretch, first block, blocks, offset in the stretch, bytes, stride, times: from each block, ``times`` pieces."""

MAC_BYTES = 32
RUNS_MAX = 8192
"""Most runs of one READ, and most pieces of memory that they name. A reader divides a chunk that has more."""

LEASES_MAX = 256
PIECE_BYTES_MAX = 2 << 20
DETAIL_BYTES_MAX = 256
FRAME_BYTES_MAX = REQUEST.size + RUNS_MAX * RUN.size

ROWS_MAX = 1 << 13
"""Most published rows of all groups, some 400 KiB. Groups beyond are not served."""

GROUPS_MAX = 256


class BadFrame(ValueError):
    """The received bytes are not a valid frame of this protocol. The connection ends."""


class ReadRequest(NamedTuple):
    """The header of a request, within its bounds. ``nbytes``: of its body."""

    kind: int
    group: int
    runs: int
    slot: int
    epoch: int
    nbytes: int


def encode_lease(slot: int, epoch: int, mac: bytes) -> bytes:
    """Return the request that shows a lease."""
    return REQUEST.pack(LEASE, 0, 0, 0, slot, 0, epoch) + mac.ljust(MAC_BYTES, b"\0")


def encode_read(group: int, slot: int, epoch: int, runs: npt.NDArray[np.int64] | Sequence[Sequence[int]]) -> bytes:
    """Return the request for runs, int64, shape (n, 7)."""
    header = REQUEST.pack(READ, 0, group, len(runs), slot, 0, epoch)
    if isinstance(runs, np.ndarray):
        return header + np.ascontiguousarray(runs, "<i8").tobytes()
    return header + b"".join([RUN.pack(*run) for run in runs])


def encode_epoch(slot: int) -> bytes:
    """Return the request for the value of a slot."""
    return REQUEST.pack(EPOCH, 0, 0, 0, slot, 0, 0)


def decode_request(frame: bytes | bytearray) -> ReadRequest:
    """Return the header at the front of a frame. Raises ``BadFrame``; no memory was allocated."""
    kind, zero, group, runs, slot, nothing, epoch = REQUEST.unpack_from(frame)
    nbytes = {LEASE: MAC_BYTES, READ: runs * RUN.size, EPOCH: 0}.get(kind, -1)
    if zero or nothing or nbytes < 0 or (not 1 <= runs <= RUNS_MAX if kind == READ else runs or group):
        raise BadFrame(f"a request is out of bounds: kind {kind}, group {group}, {runs} runs")
    return ReadRequest(kind, group, runs, slot, epoch, nbytes)


_Number = Annotated[int, Meta(ge=0, le=ADDRESS_MAX)]


class Row(Struct, frozen=True, array_like=True):
    """Stretches of one group at a constant step: ``times`` of them, numbered in order.

    Stretch ``i`` of block ``b`` begins at ``address + i * step + b * stride``. ``device``: -1 for host memory.
    """

    address: _Number
    step: _Number
    times: Annotated[int, Meta(ge=1, le=TRACKS_MAX)]
    span: Annotated[int, Meta(ge=1, le=ADDRESS_MAX)]
    stride: _Number
    device: Annotated[int, Meta(ge=-1, le=1 << 16)]


class Layout(Struct, frozen=True, array_like=True):
    """What a producer publishes. ``groups``: the rows of each group; none if it is not served."""

    num_blocks: Annotated[int, Meta(ge=1, le=1 << 31)]
    groups: Annotated[tuple[Annotated[tuple[Row, ...], Meta(max_length=ROWS_MAX)], ...], Meta(max_length=GROUPS_MAX)]


_decoder = msgspec.msgpack.Decoder(Layout)


def encode_layout(tracks: Sequence[Sequence[Track]]) -> bytes:
    """Return the layout of these tracks, group by group. Groups with too many rows count as not served."""
    groups: list[tuple[Row, ...]] = []
    room = ROWS_MAX
    for group in tracks[:GROUPS_MAX]:
        rows = _rows(group)
        groups.append(rows if len(rows) <= room else ())
        room -= len(groups[-1])
    counts = {track.count for group in tracks for track in group}
    assert len(counts) <= 1, "all groups of a manifest have the same number of blocks"
    return msgspec.msgpack.encode(Layout(max(counts, default=1), tuple(groups)))


def decode_layout(blob: bytes) -> Layout:
    """Return a peer's layout. Raises ``ValueError``: it is malformed, or a number of it is out of bounds."""
    try:
        layout = _decoder.decode(blob)
    except msgspec.DecodeError as error:
        raise ValueError(f"what it publishes for its TCP data plane is not of this release: {error}") from error
    for rows in layout.groups:
        if sum(row.times for row in rows) > TRACKS_MAX:
            raise ValueError(f"a group of more than {TRACKS_MAX} stretches")
        if any(row.step > (ADDRESS_MAX - row.address) // row.times for row in rows):
            raise ValueError("a stretch beyond the address space")
    return layout


def _rows(tracks: Sequence[Track]) -> tuple[Row, ...]:
    rows: list[list[int]] = []
    for track in tracks:
        alike = [track.span, track.stride, track.device if track.memory == "VRAM" else -1]
        if rows and rows[-1][3:] == alike:
            address, step, times = rows[-1][:3]
            if times == 1 and track.address >= address:
                step = rows[-1][1] = track.address - address
            if track.address == address + step * times:
                rows[-1][2] += 1
                continue
        rows.append([track.address, 0, 1, *alike])
    return tuple(Row(*row) for row in rows)
