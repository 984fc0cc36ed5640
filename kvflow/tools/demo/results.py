"""What the demo found out, and how it is shown: progress, a table per pair of engines, and the verdict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvflow.report import PHASES, TransferReport
from kvflow.tools.demo.messages import MAX_TOKENS, Drained


class PromptResult(Struct, frozen=True):
    """What became of one prompt; ``failure`` says why there are no tokens."""

    tokens: list[int] = []
    report: TransferReport | None = None
    failure: str = ""


class Scenario(Struct, frozen=True, kw_only=True):
    """One pair of engines; ``layout`` and ``kv`` are empty if the engines were started elsewhere."""

    name: str
    layout: str = ""
    kv: str = ""

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{self.name}: {self.layout}, kv={self.kv}" if self.layout else self.name


class ScenarioResult(Struct, frozen=True, kw_only=True):
    """What came out of one scenario."""

    scenario: Scenario
    answers: Sequence[PromptResult]  # one for each prompt
    expected: Sequence[Sequence[int]]  # tokens of the monolithic run, likewise
    left: dict[str, Drained]  # what the engines still held at the end, by role

    @property
    def reports(self) -> list[TransferReport]:
        """The transfers, one per request that was served."""
        return [answer.report for answer in self.answers if answer.report is not None]

    @property
    def failures(self) -> list[str]:
        """Why requests failed."""
        return [answer.failure for answer in self.answers if answer.failure]

    @property
    def tokens_total(self) -> int:
        """Tokens that should have come."""
        return MAX_TOKENS * len(self.answers)

    @property
    def tokens_equal(self) -> int:
        """Tokens that are those of the monolithic run."""
        return sum(
            ours == theirs
            for answer, expected in zip(self.answers, self.expected, strict=True)
            for ours, theirs in zip(answer.tokens, expected, strict=False)
        )

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return sum(report.nbytes for report in self.reports)

    @property
    def descriptors(self) -> int:
        """Descriptors that the transport saw."""
        return sum(report.descriptors for report in self.reports)

    @property
    def gb_per_s(self) -> float:
        """Rate over the time in which bytes moved, in 10**9 bytes per second."""
        moving_s = sum(report.timings_s["post"] + report.timings_s["wire"] for report in self.reports)
        return self.nbytes / moving_s / 1e9 if moving_s else 0.0

    @property
    def passed(self) -> bool:
        """Whether every token is equal and nothing was left leased or quarantined."""
        return self.tokens_equal == self.tokens_total and all(left.clean for left in self.left.values())

    @property
    def figures(self) -> dict[str, object]:
        """What ``kvflow demo --json`` prints of this scenario; phases are of the median and the longest pull."""
        return {
            "name": self.scenario.name,
            "layout": self.scenario.layout,
            "kv": self.scenario.kv,
            "passed": self.passed,
            "requests": (len(self.reports), len(self.answers)),
            "tokens": (self.tokens_equal, self.tokens_total),
            "nbytes": self.nbytes,
            "descriptors": self.descriptors,
            "gb_per_s": self.gb_per_s,
            "phases_ms": {phase: self.phase_ms(phase) for phase in ("total", *PHASES)},
            "failures": sorted(set(self.failures)),
        }

    def phase_ms(self, phase: str) -> tuple[float, float]:
        """Return the milliseconds of a phase in the median pull and in the longest: its phases add up to ``total``."""
        pulls = sorted((report.timings_s for report in self.reports), key=itemgetter("total"))
        median, longest = (pulls[(len(pulls) - 1) // 2], pulls[-1]) if pulls else ({}, {})
        return median.get(phase, 0.0) * 1e3, longest.get(phase, 0.0) * 1e3


class StageProgress:
    """One bar for each stage, of ``num_prompts``."""

    def __init__(self, progress: Progress, num_prompts: int) -> None:
        self._progress = progress
        self._num_prompts = num_prompts
        self._stages: list[TaskID] = []

    def begin(self, stage: str) -> None:
        """Show the bar of a stage."""
        self._stages.append(self._progress.add_task(stage, total=self._num_prompts))

    def advance(self) -> None:
        """Count one prompt."""
        self._progress.advance(self._stages[-1])

    def show(self, result: "ScenarioResult") -> None:
        """Print the table of a scenario above the bars."""
        print_result(self._progress.console, result)


@contextmanager
def show_progress(console: Console, num_prompts: int) -> Iterator[StageProgress]:
    """Show bars while the demo runs; without a terminal only where they ended."""
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield StageProgress(progress, num_prompts)


def print_result(console: Console, result: ScenarioResult) -> None:
    """Print the table of one scenario, and what went wrong in it."""
    table = Table(title=result.scenario.title, title_justify="left", min_width=52)
    table.add_column("")
    table.add_column("median pull", justify="right")
    table.add_column("longest pull", justify="right")
    for name, value in (
        ("requests", f"{len(result.reports)} of {len(result.answers)}"),
        ("tokens equal", f"{result.tokens_equal} of {result.tokens_total}"),
        ("bytes", f"{result.nbytes:,}"),
        ("descriptors", f"{result.descriptors:,}"),
        ("GB/s", f"{result.gb_per_s:.2f}"),
    ):
        table.add_row(name, value, "")
    table.add_section()
    for phase in ("total", *PHASES):
        median, worst = result.phase_ms(phase)
        if phase != "scatter" or worst:  # most reads of the demo are direct
            table.add_row("pull" if phase == "total" else f"  {phase}", f"{median:.3f} ms", f"{worst:.3f} ms")
    console.print(table)
    for failure in sorted(set(result.failures)):
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    for role, left in result.left.items():
        if not left.clean:
            console.print(f"left in {role}: {left}", style="red", markup=False)


def print_verdict(console: Console, results: Sequence[ScenarioResult]) -> None:
    """Print how the layouts compare, and whether all is as it should be."""
    if len(results) > 1:
        counts = [f"{result.descriptors:,} {result.scenario.name}" for result in results]
        most, fewest = max(result.descriptors for result in results), min(result.descriptors for result in results)
        ratio = f" ({most / fewest:.1f} times fewer)" if fewest else ""
        console.print(f"descriptors: {', '.join(counts)}{ratio}", highlight=False)
    if all(result.passed for result in results):
        tokens = sum(result.tokens_equal for result in results)
        equal = f"Prefill in one process, decode in another: all {tokens:,} tokens equal those of one process."
        console.print(
            f"{equal} Nothing was left leased or quarantined.", style="green", highlight=False, soft_wrap=True
        )
    else:
        console.print("FAILED: see above, and the logs.", style="red")
