"""What a worker holds at one moment, and what it tells a member of the cluster about it.

An inspection is bounded where it is made, and checked where it arrives.
"""

from collections.abc import Callable
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import ProtocolViolation
from kvflow.leases.table import LeaseState
from kvflow.reads.contract import StagingUse
from kvflow.validation import Count, Name, Number
from kvflow.worker.connections import PeerState
from kvflow.worker.destinations import Quarantined
from kvflow.worker.open_pulls import OpenPull

LISTED_MAX = 256
"""Pulls, and leases, that a snapshot lists unless its caller asks for more: about a millisecond of the event loop."""

Many = Meta(max_length=1 << 16)

INSPECTION_BYTES_MAX = 64 << 10  # what ``handshake`` carries as a report

TOLD_BYTES_MAX = 48 << 10
"""What the program above may add to a report: a large ticket or two of ``kvflow doctor --listen``."""

REPORTED_MAX = 64  # entries of each list of the snapshot in an inspection

KEPT_S = 0.25  # a report is made once in this time, however many members ask: making it takes about a millisecond

TEXT_MAX = 300
"""Characters of the engine's own name of a request; the rest is cut. The other names have as many at most."""


class PullState(Struct, frozen=True, kw_only=True):
    """One pull that is under way or draining.

    Attributes:
        pull_id: number of the pull, as in ``PullHandle.id`` and in the events.
        request_id: the producer's name of the request.
        local_request_id: the caller's own name of the request; empty if it has none.
        phase: ``check`` and ``handshake`` until its peers are connected; ``compute`` while it waits for the producer of
            an open offer; ``queue`` until its first chunk is posted;
            ``wire`` while bytes move; ``fence`` while the last epoch is read; ``admission`` while its producer has not
            admitted the lease; ``draining`` after it failed, until nothing can write into its blocks.
        peer: the source rank that it waits for, ``engine/rank/incarnation``; of several the first.
        num_peers: number of source ranks that it reads; 0 until they are connected.
        age_s: seconds since the caller started it.
        nbytes: bytes that have arrived. Of a read over a plane that completes chunks as a whole, those of whole chunks.
        nbytes_wanted: bytes to move; 0 until its peers are connected.
        transport: what carries the bytes, as in ``TransferReport``; empty until its peers are connected.
        plane: the data plane, ``nixl``, ``tcp`` or ``loopback``; likewise.
    """

    pull_id: Count
    request_id: Name
    local_request_id: Name
    phase: Name
    peer: Name
    num_peers: Count
    age_s: Number
    nbytes: Count
    nbytes_wanted: Count
    transport: Name
    plane: Name


class Snapshot(Struct, frozen=True, kw_only=True):
    """What a worker holds at one moment.

    Attributes:
        leases: how many leases are held.
        pulls: how many pulls are under way or draining.
        quarantined: destinations that something may still write into.
        staging: staging buffers: how many there are, are in use, and are in quarantine.
        rejected: connections to this worker that have failed since the start, by code, unauthenticated ones included.
        dropped: producers that were dropped since the start, by code.
        found: questions of peers for content that were answered with a ticket since the start.
        not_held: those that were answered with nothing.
        posted_inline: reads of pulls since the start that were made on the event loop.
        posted_on_thread: those that the read thread made, or ended.
        open_pulls: the oldest pulls that are under way or draining, at most as many as the caller asked for.
        held_leases: the oldest leases that are held, likewise.
        producers: workers that this one reads from, or connects to, likewise.
        readers: workers that are connected to this one to read from it, likewise.
    """

    leases: Count
    pulls: Count
    quarantined: Annotated[tuple[Quarantined, ...], Many]
    staging: StagingUse = StagingUse()
    rejected: Annotated[dict[Name, Count], Many] = {}
    dropped: Annotated[dict[Name, Count], Many] = {}
    found: Count = 0
    not_held: Count = 0
    posted_inline: Count = 0
    posted_on_thread: Count = 0
    open_pulls: Annotated[tuple[PullState, ...], Many] = ()
    held_leases: Annotated[tuple[LeaseState, ...], Many] = ()
    producers: Annotated[tuple[PeerState, ...], Many] = ()
    readers: Annotated[tuple[PeerState, ...], Many] = ()


def state_of(pull: OpenPull, now: float) -> PullState:
    """Describe one pull."""
    members = () if pull.ticket is None else tuple(pull.ticket.members())
    peer = pull.peer or (str(members[0].peer) if members else "")
    return PullState(
        pull_id=pull.pull_id,
        request_id=pull.request_id,
        local_request_id=pull.local_request_id,
        phase=pull.phase,
        peer=str(pull.ranges[-1].awaited.read.peer) if pull.submitted else peer,
        num_peers=len(pull.route.sources),
        age_s=now - pull.called_at,
        nbytes=pull.nbytes_arrived,
        nbytes_wanted=pull.nbytes,
        transport=pull.route.transport,
        plane=pull.route.plane,
    )


class Inspection(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a running worker tells a member of the cluster."""

    stage: Name
    now: Number  # seconds of the worker's clock, with which the times of the snapshot are compared
    snapshot: Snapshot
    told: Annotated[bytes, Meta(max_length=TOLD_BYTES_MAX)] = b""  # what the program above adds; empty for most workers


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Inspection)


def encode_inspection(stage: str, now: float, take: Callable[..., Snapshot], told: bytes = b"") -> bytes:
    """Return a report that is small enough, with fewer entries of each list if it must be."""
    assert len(told) <= TOLD_BYTES_MAX, f"{len(told)} bytes are added to a report"
    limit = REPORTED_MAX
    while True:
        inspection = Inspection(stage=stage, now=now, snapshot=_cut(take(limit=limit), limit), told=told)
        report = _encoder.encode(inspection)
        if len(report) <= INSPECTION_BYTES_MAX:
            return report
        limit //= 2


def decode_inspection(report: bytes, *, peer: str) -> Inspection:
    """Read what a worker has told about itself.

    Raises:
        ProtocolViolation: it is malformed or too large.
    """
    if len(report) > INSPECTION_BYTES_MAX:
        raise ProtocolViolation(f"{peer} sent a report of {len(report)} bytes", peer=peer)
    try:
        return _decoder.decode(report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"{peer} sent an invalid report: {error}", peer=peer) from error


def _cut(snapshot: Snapshot, limit: int) -> Snapshot:
    return msgspec.structs.replace(
        snapshot,
        quarantined=snapshot.quarantined[:limit],
        staging=msgspec.structs.replace(snapshot.staging, waiting=frozenset()),
        rejected=dict(islice(snapshot.rejected.items(), REPORTED_MAX)),
        dropped=dict(islice(snapshot.dropped.items(), REPORTED_MAX)),
        open_pulls=tuple(
            msgspec.structs.replace(pull, local_request_id=pull.local_request_id[:TEXT_MAX])
            for pull in snapshot.open_pulls
        ),
    )
