"""What one worker has counted since vLLM last asked: plain numbers that can be sent and added up."""

from collections.abc import Iterable
from typing import Any

from kvflow import Finished

PHASES = ("total_s", "queue_s", "post_s", "wire_s", "fence_s")
"""Phases of a completed pull in seconds, as in ``TransferReport.timings_s``."""

SERIES = (*PHASES, "nbytes", "descriptors")
"""One number for each completed pull."""

COUNTS = ("failed", "leases", "defects", "untagged")
"""How often each thing happened, by name: pulls that failed, by the error's code; leases that ended, by outcome;
exceptions that were kept from vLLM's scheduler, by the method that raised them; requests without a ticket or a wish
for one, by what their parameters say."""

Tally = dict[str, Any]


def empty_tally() -> Tally:
    """Return a tally of nothing."""
    return {**{name: [] for name in SERIES}, **{name: {} for name in COUNTS}}


def is_empty(tally: Tally) -> bool:
    """Tell whether nothing was counted."""
    return not any(tally[name] for name in (*SERIES, *COUNTS))


def count(tally: Tally, name: str, key: str) -> None:
    """Count one more of what has a name."""
    tally[name][key] = tally[name].get(key, 0) + 1


def count_ends(tally: Tally, ends: Iterable[Finished]) -> None:
    """Count the ends of pulls and of leases."""
    reports = []
    for end in ends:
        if end.report is not None:
            reports.append(end.report)
        elif end.side == "producer":
            count(tally, "leases", end.outcome)
        else:
            count(tally, "failed", end.error.code if end.error else "unknown")
    for name in PHASES:
        phase = name.removesuffix("_s")
        tally[name] += [report.timings_s.get(phase, 0.0) for report in reports]
    tally["nbytes"] += [report.nbytes for report in reports]
    tally["descriptors"] += [report.descriptors for report in reports]


def add_tallies(tally: Tally, other: Tally) -> Tally:
    """Add another tally to the first one, and return that."""
    for name in SERIES:
        tally[name].extend(other[name])
    for name in COUNTS:
        for key, number in other[name].items():
            tally[name][key] = tally[name].get(key, 0) + number
    return tally


def summary(tally: Tally) -> dict[str, int | float]:
    """Return what a tally says in one line of a log."""
    transfers = len(tally["total_s"])
    line: dict[str, int | float] = {"Num successful transfers": transfers}
    if transfers:
        seconds, megabytes = sum(tally["total_s"]), sum(tally["nbytes"]) / 2**20
        line |= {
            "Avg transfer time (ms)": round(seconds / transfers * 1e3, 3),
            "P90 transfer time (ms)": round(_at(tally["total_s"], 0.9) * 1e3, 3),
            "Avg MB per transfer": round(megabytes / transfers, 3),
            "Throughput (MB/s)": round(megabytes / seconds, 3) if seconds else 0.0,
            "Avg number of descriptors": round(sum(tally["descriptors"]) / transfers, 1),
        }
    line["Num failed transfers"] = sum(tally["failed"].values())
    line |= {f"Num failed ({code})": number for code, number in sorted(tally["failed"].items())}
    line |= {f"Num leases {outcome}": number for outcome, number in sorted(tally["leases"].items())}
    line |= {f"Num defects ({method})": number for method, number in sorted(tally["defects"].items())}
    line |= {f"Num untagged requests ({params})": number for params, number in sorted(tally["untagged"].items())}
    return line


def _at(series: list[float], share: float) -> float:
    return sorted(series)[min(len(series) - 1, int(len(series) * share))]
