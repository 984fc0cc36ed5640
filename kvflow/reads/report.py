"""Compute the reports of pulls, and the seconds of their phases."""

from collections.abc import Sequence

from kvflow.events import TracedGroup, TransferTraced
from kvflow.planning.pairs import merged_pairs
from kvflow.reads.contract import Part, RankRead, ReadEnded
from kvflow.report import TransferReport

Times = tuple[float, float, float]
"""When a pull was called, when its reads were created, and when it was completed, in seconds of the data plane's
clock."""

KEPT_BYTES_MAX = 1 << 20
"""Reports of more bytes are computed at once, so that they keep no long lists of blocks."""


TRACED_MAX = 4096
"""Chunks of one traced pull, and merged pairs of each of its groups, that its record lists: some 100 KiB of JSON."""

new_report = object.__new__


def report_of(
    request_id: str,
    nbytes: int,
    given: Sequence[Part],
    ended: Sequence[ReadEnded],
    times: Times,
    *,
    transport: str,
    plane: str,
    early: int = 0,
    early_bytes: int = 0,
) -> TransferReport:
    """Return the report of a pull. Fields that follow from ``given`` and ``ended`` are computed when they are read.

    Args:
        request_id: see ``TransferReport``.
        nbytes: see ``TransferReport``.
        given: the parts of all reads, with their bindings.
        ended: the answers of all source ranks; none if there was nothing to move.
        times: times of the pull.
        transport: see ``TransferReport``.
        plane: see ``TransferReport``.
        early: see ``TransferReport``.
        early_bytes: see ``TransferReport``.
    """
    report = new_report(TransferReport)
    report.request_id, report.nbytes, report.early, report.early_bytes = request_id, nbytes, early, early_bytes
    report.transport, report.plane = transport, plane
    report.deferred = measure, (given, ended, times)  # type: ignore[misc]  # mypy ignores the slots of the base class
    if nbytes > KEPT_BYTES_MAX:
        report.compute()
    return report


def measure(report: TransferReport, given: Sequence[Part], ended: Sequence[ReadEnded], times: Times) -> None:
    """Set the fields of a report that ``report_of`` leaves out. The arguments are those of ``report_of``."""
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

    Args:
        ended: the answers of the ranks that have delivered.
        submitted_at: when the pull's reads were created.
        started_at: when the first of them left the queue.
        arrived_at: when the last byte had arrived, or now.
        fence_s: seconds from then to the last verdict.
    """
    bind_s = sum([each.bind_s for each in ended])
    post_s = sum([each.post_s for each in ended])
    scatter_s = sum([each.scatter_s for each in ended])
    return {
        "queue": started_at - submitted_at,
        "bind": bind_s,
        "post": post_s,
        "wire": max(0.0, arrived_at - started_at - bind_s - post_s - scatter_s),
        "scatter": scatter_s,
        "fence": fence_s,
    }


def trace_of(pull_id: int, request_id: str, reads: Sequence[RankRead], called_at: float) -> TransferTraced:
    """Return when each chunk of a traced pull arrived, and which units it paired.

    Args:
        pull_id: see ``TransferTraced``.
        request_id: see ``TransferTraced``.
        reads: the rank reads of the pull, whose parts have their bindings.
        called_at: when the pull was called, in seconds of the data plane's clock.
    """
    groups: list[TracedGroup] = []
    chunks: list[tuple[int, float, float, int, int]] = []
    for number, read in enumerate(reads):
        of_list = {part.list_id: len(groups) + at for at, part in enumerate(read.parts)}
        groups += [_traced_group(number, part) for part in read.parts]
        before = 0
        for chunk in read.arrived or ():
            # A lease that is not admitted yet makes a rank give everything again.
            nbytes = chunk.read_bytes - before if chunk.read_bytes >= before else chunk.read_bytes
            before = chunk.read_bytes
            posted_s, arrived_s = _rounded(chunk.posted_at - called_at), _rounded(chunk.arrived_at - called_at)
            chunks.append((of_list[chunk.list_id], posted_s, arrived_s, nbytes, chunk.descriptors))
    return TransferTraced(
        pull_id,
        request_id,
        tuple([str(read.peer) for read in reads]),
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
