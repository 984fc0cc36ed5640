"""What is read together, the states of its rank reads, and the report of what was read.

=============  ==========================================================  ================================
state          what holds                                                  deadline
=============  ==========================================================  ================================
``reading``    the data plane has the read                                 ``Tuning``, by the read's phase
``waiting``    its lease is not admitted yet; it is read again later       ``Tuning.fence_s``
``delivered``  all bytes are there, and the fence found the lease held     none
``draining``   the pull has failed; the data plane still has the read      none: only its end ends it
``dead``       the pull has failed and nothing of this rank will write     none
=============  ==========================================================  ================================
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from kvflow.events import PullFailed, TracedGroup, TransferTraced
from kvflow.ids import advance
from kvflow.planning.pairs import joined, merged_pairs
from kvflow.reads.contract import Part, RankRead, ReadEnded
from kvflow.report import TransferReport

RankState = Literal["reading", "waiting", "delivered", "draining", "dead"]
RankEvent = Literal["held", "early", "read_again", "failed", "ended"]

TRANSITIONS: dict[tuple[RankState, RankEvent], RankState] = {
    ("reading", "held"): "delivered",
    ("reading", "early"): "waiting",
    ("waiting", "read_again"): "reading",
    ("reading", "failed"): "draining",
    ("waiting", "failed"): "dead",
    ("delivered", "failed"): "dead",  # another rank of the same pull failed
    ("draining", "ended"): "dead",
}

AWAITED = ("reading", "waiting", "draining")  # states in which something of a rank is still to come


class SourceRank(Struct, eq=False, gc=False):
    """What one source rank gives to a pull."""

    pull_id: int  # not the pull itself: without cycles, the garbage collector need not visit pulls in flight
    read: RankRead  # the current or last read of this rank
    asked_at: float  # when the data plane got the read
    deadline_check_at: float
    state: RankState = "reading"
    early_at: float = math.inf  # when its lease was first found not admitted; infinite before
    told: bool = False  # whether the producer has said that the lease is admitted, and it was read at once
    unserved: bool = False  # whether the producer has refused blocks of a lease that it holds

    @property
    def early(self) -> bool:
        """Whether its lease was found not admitted, and is not known to be."""
        return self.state == "waiting" or (self.state == "reading" and self.read.phase == "queue")

    def move(self, event: RankEvent) -> None:
        """Enter the next state."""
        self.state = advance(TRANSITIONS, self.state, event, "a rank read")


class Pull(Struct, eq=False):
    """One rank read of each source rank, which are delivered together or fail together. Times: the data plane's clock.

    A ticket is read by one pull. An open offer is read by several, one after the other.
    """

    pull_id: int  # of the call that it is read for
    request_id: str
    submitted_at: float  # when its reads were built
    reads: Sequence[RankRead]  # the first read of each source rank that gives something
    nbytes: int  # bytes to move
    ranks: tuple[SourceRank, ...] = ()  # one for each read, once the scheduler has the pull
    missing: int = 0  # ranks that are not delivered
    failed: bool = False  # whether it has failed; then it only drains
    held_back: PullFailed | None = None  # a failure that is reported once nothing of the pull is in flight
    held_since: float = 0.0
    early: int = 0  # how often a rank's lease was found not admitted yet
    early_bytes: int = 0  # of these reads, which are read again
    ended: Sequence[ReadEnded] = ()  # the answers that count, one for each delivered rank

    @property
    def phase(self) -> str:
        """Where it stands: the phase of the ranks that are not delivered; of several that in which bytes move."""
        if self.failed:
            return "draining"
        phases = {rank.read.phase for rank in self.ranks if rank.state == "reading"}
        return next((phase for phase in ("wire", "queue", "fence") if phase in phases), "admission")

    @property
    def nbytes_arrived(self) -> int:
        """Bytes that have certainly arrived."""
        return sum(rank.read.nbytes for rank in self.ranks) or sum(ended.nbytes for ended in self.ended)

    @property
    def awaited(self) -> SourceRank:
        """The rank that the pull waits for; of several the first."""
        return next((rank for rank in self.ranks if rank.state in AWAITED), self.ranks[-1])

    def reading_s(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun, for a pull that the scheduler fails now."""
        started_at = min([rank.read.started_at for rank in self.ranks if rank.read.started_at], default=0.0)
        if not started_at:
            return {"queue": now - self.submitted_at}
        arrived_at = self._arrived_at()
        sums = (0, 0.0, 0, 0, started_at, now if arrived_at is None else arrived_at, now, *_spent(self.ended))
        return dict(zip(TIMED[2:-1], timings_s(sums, (0.0, self.submitted_at, 0.0))[2:-1], strict=True))

    def _arrived_at(self) -> float | None:
        """Return when the last byte of all ranks had arrived; None if some have not."""
        arrived = [each.arrived_at for each in self.ended]
        arrived += [rank.read.since for rank in self.ranks if rank.state != "delivered" and rank.read.phase == "fence"]
        return max(arrived) if len(arrived) == len(self.ranks) else None


class TokenRange(Pull, kw_only=True):
    """The tokens ``[first, end)`` of an open offer.

    The last range has also what the producer told with the seal: sliding windows and states.
    """

    first: int
    end: int
    completed_at: float = math.inf  # infinite until it is delivered


# --- the report of a call that has ended ---

Times = tuple[float, float, float]  # of the call, when its peers were connected and its blocks paired, and of its end

# Of a pull: descriptors, share that merging has saved, bytes and chunks that were read. If anything was read, also when
# the reads began, when the last byte had arrived, when the last fence was read, and seconds to bind, post and scatter.
Sums = tuple[Any, ...]

TIMED = ("handshake", "total", "queue", "bind", "post", "wire", "scatter", "fence", "deliver")
"""Keys of ``TransferReport.timings_s``, in their order."""

TRACED_MAX = 4096
"""Chunks of one traced pull, and merged pairs of each of its groups, that its record lists: some 100 KiB of JSON."""

new_report = object.__new__


def report_of(
    request_id: str, nbytes: int, pulls: Sequence[Pull], times: Times, sealed_at: float = math.inf
) -> TransferReport:
    """Return the report of what a call has read. What follows from the reads and their answers is computed when read.

    ``sealed_at``: of an open offer, when the last rank has said that everything is settled. The caller sets
    ``transport`` and ``plane``.
    """
    report = new_report(TransferReport)
    report.request_id, report.nbytes = request_id, nbytes
    report.ranges = 0 if sealed_at == math.inf else len(pulls)
    report.seal_s = max(0.0, times[2] - sealed_at)
    report.deferred = measure, (pulls, times)  # type: ignore[misc]  # mypy ignores the slots of the base class
    return report


def measure(report: TransferReport, pulls: Sequence[Pull], times: Times) -> None:
    """Set the fields of a report that ``report_of`` leaves out, from all reads and their answers."""
    sums = sums_of(pulls)
    report.descriptors, report.merged, report.read_bytes, report.reads, *_ = sums
    report.early, report.early_bytes = sum([each.early for each in pulls]), sum([each.early_bytes for each in pulls])
    seconds = dict(zip(TIMED, timings_s(sums, times), strict=False))
    ranges = [each for each in pulls if isinstance(each, TokenRange)]
    if ranges:  # between two of them, the call waited for its producer
        phases = [
            timings_s(summed((), each.ended), (each.submitted_at, each.submitted_at, each.completed_at))
            for each in ranges
        ]
        reading = dict(zip(TIMED, map(sum, zip(*phases, strict=True)), strict=True))
        queue_s = reading["queue"] + times[2] - times[1] - reading["total"]
        seconds = reading | {"handshake": seconds["handshake"], "total": seconds["total"], "queue": queue_s}
    report.timings_s = seconds


def sums_of(pulls: Sequence[Pull]) -> Sums:
    """Return what a report says of the reads of these pulls and of their answers."""
    given = [part for pull in pulls for read in pull.reads for part in read.parts]
    return summed(given, [ended for pull in pulls for ended in pull.ended])


def summed(given: Sequence[Part], ended: Sequence[ReadEnded]) -> Sums:
    """Return what a report says of the parts of all reads and of their answers."""
    descriptors = units = nbytes = 0
    for part in given:
        if (binding := part.binding) is not None:
            count = len(part.pairs.source)
            descriptors += binding.count_merged(part.pairs)
            units += count * binding.unit_descriptors
            nbytes += count * binding.read_bytes
    merged = 1 - descriptors / units if units else 0.0
    if len(ended) == 1:  # quickly
        (one,) = ended
        arrived_at = one.arrived_at
        moved = one.started_at, arrived_at, arrived_at + one.fence_s, one.bind_s, one.post_s, one.scatter_s
        return descriptors, merged, nbytes, one.chunks, *moved
    counts = descriptors, merged, nbytes, sum([each.chunks for each in ended])
    if not ended:
        return counts
    started_at, arrived_at = min([each.started_at for each in ended]), max([each.arrived_at for each in ended])
    fenced_at = max([each.arrived_at + each.fence_s for each in ended])
    return *counts, started_at, arrived_at, fenced_at, *_spent(ended)


def _spent(ended: Sequence[ReadEnded]) -> tuple[float, float, float]:
    binding, posting = sum([each.bind_s for each in ended]), sum([each.post_s for each in ended])
    return binding, posting, sum([each.scatter_s for each in ended])


def timings_s(sums: Sums, times: Times) -> tuple[float, ...]:
    """Return the seconds of each phase of ``TIMED``, or of the first two if nothing was read."""
    called_at, submitted_at, ended_at = times
    if len(sums) == 4:
        return submitted_at - called_at, ended_at - called_at
    _, _, _, _, started_at, arrived_at, fenced_at, bind_s, post_s, scatter_s = sums
    wire_s = max(0.0, arrived_at - started_at - bind_s - post_s - scatter_s)
    before = submitted_at - called_at, ended_at - called_at, started_at - submitted_at
    return *before, bind_s, post_s, wire_s, scatter_s, fenced_at - arrived_at, ended_at - fenced_at


def trace_of(pulls: Sequence[Pull], called_at: float) -> TransferTraced:
    """Return when each chunk of a traced call arrived, and which units were paired: of its pulls, at least one."""
    reads = [read for pull in pulls for read in pull.reads]
    peers = list(dict.fromkeys(read.peer for read in reads))
    lists: dict[int, list[Part]] = {}  # every peer has its own; reads of several ranges share them
    peer_of: dict[int, int] = {}
    for read in reads:
        for part in read.parts:
            lists.setdefault(part.list_id, []).append(part)
            peer_of[part.list_id] = peers.index(read.peer)
    of_list = {list_id: at for at, list_id in enumerate(lists)}
    chunks: list[tuple[int, float, float, int, int]] = []
    for read in reads:
        before = 0
        for chunk in read.arrived or ():
            # A lease that is not admitted yet makes a rank give everything again.
            nbytes = chunk.read_bytes - before if chunk.read_bytes >= before else chunk.read_bytes
            before = chunk.read_bytes
            posted_s, arrived_s = (
                _rounded(chunk.posted_at - called_at),
                _rounded(chunk.arrived_at - called_at),
            )
            chunks.append((of_list[chunk.list_id], posted_s, arrived_s, nbytes, chunk.descriptors))
    return TransferTraced(
        pulls[0].pull_id,
        pulls[0].request_id,
        tuple(map(str, peers)),
        tuple([_traced_group(peer_of[list_id], parts) for list_id, parts in lists.items()]),
        tuple(chunks[:TRACED_MAX]),
        chunks_omitted=max(0, len(chunks) - TRACED_MAX),
        ranges=tuple(
            (
                each.first,
                each.end,
                _rounded(each.submitted_at - called_at),
                _rounded(each.completed_at - called_at),
            )
            for each in pulls[-TRACED_MAX:]
            if isinstance(each, TokenRange)
        ),
    )


def _traced_group(peer: int, parts: Sequence[Part]) -> TracedGroup:
    pairs, binding = joined([part.pairs for part in parts]), parts[0].binding
    assert binding is not None
    group = binding.group
    merged = merged_pairs(pairs)
    return TracedGroup(
        peer=peer,
        source_group=group.source_group,
        target_group=group.target_group,
        source_units=group.source.per_block,
        target_units=group.target.per_block,
        unit_bytes=binding.unit_bytes,
        unit_descriptors=binding.unit_descriptors,
        descriptors=binding.count_merged(pairs),
        staged=binding.scatter is not None,
        pairs=tuple(merged[:TRACED_MAX]),
        pairs_omitted=max(0, len(merged) - TRACED_MAX),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 9)
