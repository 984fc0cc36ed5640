"""What a benchmark returns and how it is shown: medians and spreads, a header, tables as text or as JSON."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from kvflow.version import __version__


class Summary(Struct, frozen=True):
    """Many measurements of one thing, in one unit. Show ``p99`` by ``tail``: few samples have none."""

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


SAMPLES_MIN = 1000
"""The 99th percentile of fewer samples is decided by fewer than ten of them."""


def tail(samples: Sequence[float], unit: float) -> str:
    """Name and return the 99th percentile; of fewer than a thousand samples the largest. ``unit``: of one second."""
    name, share = ("p99", 0.99) if len(samples) >= SAMPLES_MIN else ("max", 1.0)
    return f"{name} {_shown(quantile(sorted(samples), share) * unit)}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of an ascending sequence does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios round by round: what paired rounds are for."""
    return summarize([above / below for above, below in zip(numerators, denominators, strict=True)]).p50


PACKAGES = ("nixl", "nixl-cu13", "nixl-cu12", "pyzmq", "msgspec", "torch", "numpy", "uvloop")


class Header(Struct, frozen=True, kw_only=True):
    """Where and with what a run was made."""

    machine: str
    cores: int
    python: str
    packages: dict[str, str]
    load_average: float
    started: str


class Table(Struct, frozen=True, kw_only=True):
    """Rows of figures: columns are names with units, and notes what must be known in order to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [self.columns, *([_shown(value) for value in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = ["  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([self.title, *lines, *self.notes])


class Result(Struct, frozen=True, kw_only=True):
    """One benchmark's outcome."""

    name: str
    header: Header
    tables: tuple[Table, ...]

    def __str__(self) -> str:
        header = self.header
        versions = ", ".join(f"{name} {version}" for name, version in header.packages.items())
        first = f"kvflow bench {self.name}, {header.started}: {header.machine}, {header.cores} cores"
        second = f"Python {header.python}, {versions}; load average {header.load_average:.1f}"
        return "\n\n".join(["\n".join([first, second]), *(str(table) for table in self.tables)])


def header() -> Header:
    """Describe this machine and its software."""
    return Header(
        machine=_processor(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        packages={"kvflow": __version__, **_releases()},
        load_average=os.getloadavg()[0],
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _releases() -> dict[str, str]:
    """Return the release of each package that is installed. An engine may have one variant of NIXL alone."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines: Sequence[str] = info.read_text().splitlines() if info.exists() else ()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
