"""The record of one pull, the states of its rank reads, and its report.

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
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from kvflow.events import PullFailed, TracedGroup, TransferTraced
from kvflow.planning.pairs import merged_pairs
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

EARLY_RETRY_S = 0.005
EARLY_RETRY_S_MAX = 0.5
"""Pause before the leases of a peer that are not admitted yet are probed again. It doubles, because an engine may take
seconds, and is short again when another one is found."""


S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)


class IllegalTransition(Exception):
    """An event that a state does not have: a defect of kvflow. Nothing has changed."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """Return the next state of ``what``; raise ``IllegalTransition`` if the table has no such entry."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{what} that is {state} cannot be {event}") from None


class SourceRank(Struct, eq=False, gc=False):
    """What one source rank gives to a pull."""

    pull_id: int  # not the pull itself: without cycles, the garbage collector need not visit pulls in flight
    read: RankRead  # the current or last read of this rank
    asked_at: float  # when the data plane got the read
    deadline_check_at: float
    state: RankState = "reading"
    early_at: float = math.inf  # when its lease was first found not admitted; infinite before
    unserved: bool = False  # whether the producer has refused blocks of a lease that it holds

    def move(self, event: RankEvent) -> None:
        """Enter the next state."""
        self.state = advance(TRANSITIONS, self.state, event, "a rank read")


class Pull(Struct, eq=False):
    """One pull, from the call that starts it until nothing writes into its blocks. The worker adds what it needs."""

    pull_id: int
    request_id: str
    called_at: float  # when the caller called, in seconds of the data plane's clock
    step: str = "check"  # the phase that the pull is in, until the scheduler has it
    submitted_at: float = math.inf  # when its reads were built; infinite before
    reads: Sequence[RankRead] = ()  # the first read of each source rank that gives something
    nbytes: int = 0  # bytes to move
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
        if not self.ranks:
            return self.step
        if self.failed:
            return "draining"
        phases = {rank.read.phase for rank in self.ranks if rank.state == "reading"}
        return next((phase for phase in ("wire", "queue", "fence") if phase in phases), "admission")

    @property
    def awaited(self) -> SourceRank:
        """The rank that the pull waits for; of several the first."""
        return next((rank for rank in self.ranks if rank.state in AWAITED), self.ranks[-1])

    @property
    def given(self) -> Sequence[Part]:
        """What all source ranks give."""
        return self.reads[0].parts if len(self.reads) == 1 else [part for read in self.reads for part in read.parts]

    def reading_s(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun, for a pull that the scheduler fails now."""
        started_at = min([rank.read.started_at for rank in self.ranks if rank.read.started_at], default=0.0)
        if not started_at:
            return {"queue": now - self.submitted_at}
        arrived_at = self._arrived_at()
        if arrived_at is None:
            return phases_s(self.ended, self.submitted_at, started_at, now, 0.0)
        return phases_s(self.ended, self.submitted_at, started_at, arrived_at, now - arrived_at)

    def _arrived_at(self) -> float | None:
        """Return when the last byte of all ranks had arrived; None if some have not."""
        arrived = [each.arrived_at for each in self.ended]
        arrived += [rank.read.since for rank in self.ranks if rank.state != "delivered" and rank.read.phase == "fence"]
        return max(arrived) if len(arrived) == len(self.ranks) else None


# --- the report of a pull that has ended ---

Times = tuple[float, float, float]  # when a pull was called, when its reads were created, and when it was completed

KEPT_BYTES_MAX = 1 << 20  # reports of more bytes are computed at once, so that they keep no long lists of blocks


TRACED_MAX = 4096
"""Chunks of one traced pull, and merged pairs of each of its groups, that its record lists: some 100 KiB of JSON."""

new_report = object.__new__


def report_of(pull: Pull, ended_at: float, transport: str, plane: str) -> TransferReport:
    """Return the report of a pull. What follows from its reads and their answers is computed when it is read."""
    report = new_report(TransferReport)
    report.request_id, report.nbytes, report.early = pull.request_id, pull.nbytes, pull.early
    report.early_bytes, report.transport, report.plane = pull.early_bytes, transport, plane
    given_and_ended = (pull.given, pull.ended, (pull.called_at, pull.submitted_at, ended_at))
    report.deferred = measure, given_and_ended  # type: ignore[misc]  # mypy ignores the slots of the base class
    if pull.nbytes > KEPT_BYTES_MAX:
        report.compute()
    return report


def measure(report: TransferReport, given: Sequence[Part], ended: Sequence[ReadEnded], times: Times) -> None:
    """Set the fields of a report that ``report_of`` leaves out, from the parts of all reads and their answers."""
    called_at, submitted_at, ended_at = times
    bound = [(part.binding, part.pairs) for part in given if part.binding is not None]
    units = sum([len(pairs.source) * binding.unit_descriptors for binding, pairs in bound])
    report.descriptors = sum([binding.count_merged(pairs) for binding, pairs in bound])
    report.read_bytes = sum([len(pairs.source) * binding.read_bytes for binding, pairs in bound])
    report.merged = 1 - report.descriptors / units if units else 0.0
    report.reads = sum([each.chunks for each in ended])
    timings_s = {"handshake": submitted_at - called_at, "total": ended_at - called_at}
    if ended:
        started_at = min([each.started_at for each in ended])
        arrived_at = max([each.arrived_at for each in ended])
        fenced_at = max([each.arrived_at + each.fence_s for each in ended])
        timings_s |= phases_s(ended, submitted_at, started_at, arrived_at, fenced_at - arrived_at)
        timings_s["deliver"] = ended_at - fenced_at
    report.timings_s = timings_s


def phases_s(
    ended: Sequence[ReadEnded], submitted_at: float, started_at: float, arrived_at: float, fence_s: float
) -> dict[str, float]:
    """Return the seconds of each phase: see ``TransferReport.timings_s``.

    ``arrived_at`` is when the last byte had arrived, or now; ``fence_s`` are the seconds from then to the last verdict.
    """
    bind_s = sum([each.bind_s for each in ended])
    post_s = sum([each.post_s for each in ended])
    rest_s = max(0.0, arrived_at - started_at - bind_s - post_s)
    scatter_s = min(rest_s, sum([each.scatter_s for each in ended]))  # a device copies while others are posted
    return {
        "queue": started_at - submitted_at,
        "bind": bind_s,
        "post": post_s,
        "wire": rest_s - scatter_s,
        "scatter": scatter_s,
        "fence": fence_s,
    }


def trace_of(pull: Pull) -> TransferTraced:
    """Return when each chunk of a traced pull arrived, and which units it paired."""
    groups: list[TracedGroup] = []
    chunks: list[tuple[int, float, float, int, int]] = []
    for number, read in enumerate(pull.reads):
        of_list = {part.list_id: len(groups) + at for at, part in enumerate(read.parts)}
        groups += [_traced_group(number, part) for part in read.parts]
        before = 0
        for chunk in read.arrived or ():
            # A lease that is not admitted yet makes a rank give everything again.
            nbytes = chunk.read_bytes - before if chunk.read_bytes >= before else chunk.read_bytes
            before = chunk.read_bytes
            posted_s, arrived_s = (
                _rounded(chunk.posted_at - pull.called_at),
                _rounded(chunk.arrived_at - pull.called_at),
            )
            chunks.append((of_list[chunk.list_id], posted_s, arrived_s, nbytes, chunk.descriptors))
    return TransferTraced(
        pull.pull_id,
        pull.request_id,
        tuple([str(read.peer) for read in pull.reads]),
        tuple(groups),
        tuple(chunks[:TRACED_MAX]),
        chunks_omitted=max(0, len(chunks) - TRACED_MAX),
    )


def _traced_group(peer: int, part: Part) -> TracedGroup:
    pairs, binding = part.pairs, part.binding
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
