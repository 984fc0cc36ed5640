"""One rank read: what a worker asks of its data plane, and the one answer to it."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.transfer.pairs import UnitPairs

PRIORITY_MAX = 1 << 31
"""Largest priority either way: beside a time, a float holds it and its age exactly enough."""

Phase = Literal["queue", "wire", "fence"]
Verdict = Literal["held", "early", "stale", "failed"]


class Part(Struct, frozen=True, eq=False, gc=False):
    """What one group of a source rank gives to a pull.

    Attributes:
        program_id: prepared descriptor lists of the peer.
        pairs: units to copy, at least one pair, ascending by source.
    """

    program_id: int
    pairs: UnitPairs


class LeaseName(NamedTuple):
    """One lease of a peer, and what proves that we may read under it.

    Attributes:
        slot: its index in the peer's epoch table.
        epoch: what the slot holds while the lease is held. Below: not admitted yet. Above: it has ended.
        mac: of its ticket, which a producer that serves reads asks for.
    """

    slot: int
    epoch: int
    mac: bytes = b""


@dataclass(slots=True)
class Owing:
    """Whether a peer owes us something that was posted.

    Attributes:
        since: when it last completed something, or when something was first posted if that is later, in seconds of the
            data plane's clock; infinite while it owes nothing.

    Thread: written by the data plane, read by any.
    """

    since: float = math.inf


class RankRead(Struct, eq=False, gc=False):
    """Everything that one source rank gives to one pull: check, chunks, fence.

    Attributes:
        read_id: chosen by the caller, unique in its data plane.
        peer: the source rank.
        lease: what the bytes are read under. One read has one lease.
        parts: what is to be copied, group by group; at least one.
        check_first: whether the lease may have been admitted after its ticket was signed. Then its slot is compared
            before any chunk is posted, and the read ends ``early`` or ``stale`` without having read a byte.
        priority: lower is more urgent.
        phase: where it is; the data plane writes, any thread reads. ``queue``: no chunk was posted yet, its first check
            included. ``wire``: chunks were posted. ``fence``: all bytes have arrived.
        since: when it entered this phase, in seconds of the data plane's clock; infinite before the data plane has
            taken it. Written and read likewise.
        owing: of its peer. Written and read likewise.
        started_at: when it left the queue, in seconds of the same clock; 0 before. Written and read likewise.
        nbytes: bytes that have arrived so far. Written and read likewise.
    """

    read_id: int
    peer: PeerId
    lease: LeaseName
    parts: tuple[Part, ...]
    check_first: bool = False
    priority: int = 0
    phase: Phase = "queue"
    since: float = math.inf
    owing: Owing | None = None
    started_at: float = 0.0
    nbytes: int = 0


class ReadEnded(Struct, frozen=True, gc=False):
    """A rank read is over, and nothing of it will write to memory.

    Attributes:
        read_id: which read.
        verdict: ``held``: all bytes have arrived, are where they belong, and the fence found the lease held. ``early``:
            the lease is not admitted yet; read again later. ``stale``: the lease has ended. ``failed``: see ``code``.
        code: of a failure: ``peer_lost``, ``cancelled``, ``program_unknown``, ``bounds`` or ``transport_error``.
        detail: of a failure: the foreign library's own words.
        phase: where it was when it ended.
        observed: what the epoch slot held, if it was read.
        unserved: the lease is held by now, but the exporter did not serve something that was read before: read again.
            Comes with ``early``.
        nbytes: bytes that were filled, also of a read that did not end well.
        chunks: how many chunks carried it, some of them shared with other reads.
        started_at: when it left the queue, before its first chunk was bound, in seconds of the data plane's clock; 0 if
            none was.
        arrived_at: when its last byte so far had arrived; 0 if none has.
        bind_s: seconds spent in computing descriptor numbers, of its chunks.
        post_s: seconds spent in posting calls (on shared memory this is the copy), of its chunks.
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
