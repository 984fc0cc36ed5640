"""One rank read: the request of a worker to its data plane, and the answer."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.planning.bind import AnyBinding
from kvflow.planning.pairs import UnitPairs

PRIORITY_MAX = 1 << 31
"""Largest priority in either direction. A float still adds it to a time with enough precision."""

Phase = Literal["queue", "wire", "fence"]
Verdict = Literal["held", "early", "stale", "failed"]


class Part(Struct, frozen=True, eq=False, gc=False):
    """What one group of a source rank gives to a pull.

    Attributes:
        list_id: prepared list of the peer.
        pairs: units to copy, at least one pair, ascending by source.
        binding: the binding of the list, for the report of the pull. The data plane uses that of its list.
    """

    list_id: int
    pairs: UnitPairs
    binding: AnyBinding | None = None


class LeaseName(Struct, frozen=True, gc=False):
    """One lease of a peer, and the proof that this worker may read under it.

    Attributes:
        slot: its index in the peer's epoch table.
        epoch: value of the slot while the lease is held. A lower value: not admitted yet. A higher value: ended.
        mac: MAC of its ticket, which a producer that serves reads requires.
    """

    slot: int
    epoch: int
    mac: bytes = b""


@dataclass(slots=True)
class Outstanding:
    """Whether a peer owes something that was posted.

    Attributes:
        since: when it last completed something, or when something was first posted if that is later, in seconds of the
            data plane's clock; infinite while it owes nothing.

    Thread: the data plane writes, any thread reads.
    """

    since: float = math.inf


class ArrivedChunk(NamedTuple):
    """One chunk of a read that has arrived, for the trace of its pull.

    Attributes:
        list_id: prepared list that it was read with.
        posted_at: when its post began, in seconds of the data plane's clock.
        arrived_at: when all of it was where it belongs, likewise.
        read_bytes: bytes of the read that had arrived by then, with this chunk.
        descriptors: descriptors of the chunk before neighbors merge. Other reads may have shared it.
    """

    list_id: int
    posted_at: float
    arrived_at: float
    read_bytes: int
    descriptors: int


class RankRead(Struct, eq=False, gc=False):
    """Everything that one source rank gives to one pull: check, chunks, fence.

    Attributes:
        read_id: chosen by the caller, unique in its data plane.
        peer: the source rank.
        lease: the lease under which the bytes are read. One read has one lease.
        parts: what to copy, group by group; at least one.
        check_first: whether the ticket may be early. Then the slot is compared before any chunk is posted, and the read
            may end ``early`` or ``stale`` before a byte is read.
        priority: lower is more urgent.
        phase: its phase. The data plane writes this and the next fields; any thread reads them. ``queue``: no chunk was
            posted yet; includes the first check. ``wire``: chunks were posted. ``fence``: all bytes have arrived.
        since: when it entered this phase, in seconds of the data plane's clock; infinite before the data plane has
            taken it.
        outstanding: what its peer owes.
        started_at: when it left the queue, in seconds of the same clock; 0 before.
        nbytes: bytes that have arrived so far.
        arrived: takes the chunks that arrive, if the pull is traced; None if nobody wants them.
    """

    read_id: int
    peer: PeerId
    lease: LeaseName
    parts: tuple[Part, ...]
    check_first: bool = False
    priority: int = 0
    phase: Phase = "queue"
    since: float = math.inf
    outstanding: Outstanding | None = None
    started_at: float = 0.0
    nbytes: int = 0
    arrived: list[ArrivedChunk] | None = None


class CancelReads(Struct, frozen=True):
    """Drop the chunks of these reads that were not posted yet."""

    read_ids: tuple[int, ...]


class ReadEnded(Struct, frozen=True, gc=False):
    """A rank read has ended, and will not write to memory.

    Attributes:
        read_id: id of the read.
        verdict: ``held``: all bytes are in the target, and the fence found the lease held. ``early``:
            the lease is not admitted yet; read again later. ``stale``: the lease has ended. ``failed``: see ``code``.
        code: code of a failure: ``peer_lost``, ``cancelled``, ``program_unknown``, ``bounds`` or ``transport_error``.
        detail: message of the library, for a failure.
        phase: its phase when it ended.
        observed: value of the epoch slot, if it was read.
        unserved: the lease is held now, but the exporter refused bytes before: read again. Only with ``early``.
        nbytes: bytes that were filled, also by a read that failed.
        chunks: how many chunks carried it, some of them shared with other reads.
        started_at: when it left the queue, before its first chunk was bound, in seconds of the data plane's clock; 0 if
            no chunk was.
        arrived_at: when its last byte had arrived; 0 if none has.
        bind_s: seconds of its chunks in computing descriptor numbers.
        post_s: seconds of its chunks in posting calls (over shared memory this is the copy).
        scatter_s: seconds spent in copies from staging buffers.
        fence_s: seconds from the last byte to the verdict.
    """

    read_id: int
    verdict: Verdict
    code: str = ""
    detail: str = ""
    phase: Phase = "fence"
    observed: int = 0
    unserved: bool = False
    nbytes: int = 0
    chunks: int = 0
    started_at: float = 0.0
    arrived_at: float = 0.0
    bind_s: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0
    fence_s: float = 0.0
