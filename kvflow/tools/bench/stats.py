"""Medians and spreads. A single time says little on a shared machine, and a mean says less."""

from collections.abc import Sequence

from msgspec import Struct


class Summary(Struct, frozen=True):
    """Many measurements of one thing, in one unit.

    Attributes:
        p10: a tenth of them is below.
        p50: the median.
        p90: a tenth of them is above.
        p99: one in a hundred is above; the largest of fewer than a hundred.
        count: how many there were.
    """

    p10: float
    p50: float
    p90: float
    p99: float
    count: int


def summarize(samples: Sequence[float]) -> Summary:
    """Summarise at least one measurement."""
    ordered = sorted(samples)
    p10, p50, p90, p99 = (quantile(ordered, share) for share in (0.10, 0.50, 0.90, 0.99))
    return Summary(p10, p50, p90, p99, len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of an ascending sequence does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios round by round: what paired rounds are for."""
    return summarize([above / below for above, below in zip(numerators, denominators, strict=True)]).p50
