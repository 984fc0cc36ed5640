"""What the demo shows: progress while it runs, a table per pair of engines, and the verdict."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvflow.report import PHASES
from kvflow.tools.demo.driver import Engines, run_demo
from kvflow.tools.demo.prompts import cut_prompts, read_texts
from kvflow.tools.demo.results import DemoFigures, ScenarioResult
from kvflow.tools.demo.router import EngineFailed


def run_and_show(
    texts: Path, num_prompts: int, logs: Path, engines: Engines | None = None, *, as_json: bool = False
) -> int:
    """Run the demo on a terminal or off it, and return its exit status.

    Args:
        texts: folder with README.md and docs/, where prompts are taken from.
        num_prompts: at least 2.
        logs: folder for the logs of all processes that are started; exists.
        engines: that run already; None starts some.
        as_json: print the figures as JSON, and nothing else on standard output.
    """
    console = Console(stderr=as_json)
    try:
        prompts = cut_prompts(read_texts(texts), num_prompts)
        with show_progress(Console(quiet=True) if as_json else console, num_prompts) as progress:
            results = uvloop.run(run_demo(prompts, logs, progress, engines))
    except (EngineFailed, FileNotFoundError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    passed = all(result.passed for result in results)
    if as_json:
        figures = DemoFigures(passed=passed, logs=str(logs), scenarios=[result.figures for result in results])
        print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())  # noqa: T201 - as a command does
        return 0 if passed else 1
    for result in results:
        print_result(console, result)
    print_verdict(console, results)
    if engines is None:  # engines elsewhere keep their own logs
        folder = shlex.quote(str(logs))
        console.print(f"logs of all processes: {logs}/*.jsonl", highlight=False, soft_wrap=True)
        command = f"kvflow trace {folder}/*.jsonl --html {folder}/trace.html"
        console.print(f"where the time went: {command}", markup=False, highlight=False, soft_wrap=True)
    return 0 if passed else 1


class StageProgress:
    """One bar per stage.

    Args:
        progress: rich's, running.
        num_prompts: of each stage.
    """

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
    table.add_column("p50", justify="right")
    table.add_column("p99", justify="right")
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
        median, worst = result.quantiles_ms(phase)
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
        console.print("Every token is equal; nothing was left leased or quarantined.", style="green")
    else:
        console.print("FAILED: see above, and the logs.", style="red")
