"""The figures of docs/explanation/performance.md, and its picture, from one run of the benchmarks.

python -m tests.benchmarks.hot_path --json tests/golden/performance.json   # on an idle machine, six minutes
python -m tests.docs.reference_tables
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvflow.tools.bench import Result, Table

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "golden" / "performance.json"
PICTURE = ROOT / "docs" / "explanation" / "performance.svg"

LARGE = re.compile(r"(\d+ MiB), (\w+) blocks, (\w+) pages, (CPU, )?ms")
DRAWN = {
    "64 KiB in a row": "64 KiB",
    "64 KiB every 2 ms": "64 KiB, after 2 ms",
    "16 MiB, random blocks, huge pages": "16 MiB",
    "64 MiB, random blocks, huge pages": "64 MiB",
    "256 MiB, random blocks, huge pages": "256 MiB",
}
"""Pulls of the picture, and what they are called there."""

COLORS = ("#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#8cd17d", "#b6992d", "#e15759", "#b07aa1", "#bab0ac")
LEFT, WIDTH, BAR, STEP = 130, 640, 24, 40


IDLE_LOAD_MAX = 0.5
"""Load average at the start of a run that counts as idle: above it, someone else used a core."""

NOT_IDLE = "**The machine was not idle: times may be shorter, and goals met, on one that is.**"

LEGEND = (
    "Large reads: rate, of bare NIXL's (goal); from 64 MiB on CPU, of bare NIXL's, goal 1.3; gain of the second core."
)


@cache
def run() -> Result:
    """Return the run that the page shows."""
    return msgspec.json.decode(RUN.read_bytes(), type=Result)


def number(value: Any) -> str:
    """Return a cell with three digits."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return a table."""
    lines = [re.sub(r"\|\s+(?=\|)", "| ", f"| {' | '.join(map(number, row))} |") for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def judged() -> list[tuple[Any, ...]]:
    """Return the rows that have a goal."""
    return [row for table in run().tables if table.columns[-1] == "goal" for row in table.rows if row[-1]]


def goal(cell: str) -> str:
    """Return a goal without its sign: rates are to be at least that, and all else at most."""
    return cell.lstrip("<>= ")


def figures() -> str:
    """Return where the run was made, what has a goal, and the large reads."""
    head = run().header
    packages = ", ".join(f"{name} {head.packages[name]}" for name in ("nixl", "uvloop"))
    machine = f"{head.machine}, {head.cores} cores, Python {head.python}, {packages}"
    about = f"{head.started[:10]}, {machine}; load average {head.load_average:.1f}."
    if head.load_average > IDLE_LOAD_MAX:
        about = f"{about} {NOT_IDLE}"
    others = []
    for title, floor, ours, found, aim in judged():
        if not LARGE.fullmatch(title):
            others.append((title, floor, ours, "" if found in number(ours) else found, goal(aim)))
    return "\n\n".join([about, markdown(("measure", "floor", "kvflow", "found", "goal"), others), LEGEND, large()])


def large() -> str:
    """Return the large reads: rate and CPU of bare NIXL's with the goal of the rate, and what the second core gains."""
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for table in run().tables:
        for row in table.rows:
            if found := LARGE.fullmatch(str(row[0])):
                size, order, pages, cpu = found.groups()
                aim = f" ({goal(row[4]).partition(':')[0]})" if row[4] and not cpu else ""
                cells[f"{order}, {pages}"][size].append(f"{row[3].split()[0]}{aim}")
    sizes = ("16 MiB", "64 MiB", "256 MiB")
    rows = [(name, *("; ".join(each[size]) for size in sizes)) for name, each in cells.items()]
    return markdown(("blocks, pages", *sizes), rows)


def others() -> str:
    """Return what else moves the same bytes, and what it promises."""
    sizes = [table for table in run().tables if table.title.endswith("rounds in turns")]
    (promises,) = (table for table in run().tables if table.title == "what each promises")
    rows = []
    for name, *promised in promises.rows:
        times = [{row[0]: row[1] for row in table.rows}.get(name) for table in sizes]
        units = [time and time / unit for time, unit in zip(times, (1, 1e3, 1e3), strict=True)]
        rows.append((name, *units, "; ".join(each for each in promised if each not in ("none", "no")) or "nothing"))
    return markdown(("way", "64 KiB, us", "64 MiB in order, ms", "at random, ms", "lease; fence; checks; TLS"), rows)


def drawn() -> Iterator[tuple[str, float, dict[str, float]]]:
    """Yield name, whole time and parts of each pull of the picture, in microseconds."""
    tables: list[Table] = [table for table in run().tables if table.title.startswith("where the time")]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for table in tables for row in table.rows}
    for title, name in DRAWN.items():
        whole = rows[title]["whole"]
        parts = {phase: rows[title][phase] for phase in tables[0].columns[2:]}
        yield name, whole, {**parts, "rest": max(0.0, whole - sum(parts.values()))}


def picture() -> str:
    """Return a bar for each pull, as long as all the others, and in it the phases of its report."""
    lines = []
    for at, (name, whole, parts) in enumerate(drawn()):
        top, left = STEP * at + 10, float(LEFT)
        shown = f"{whole:.0f} us" if whole < 1000 else f"{whole / 1000:.1f} ms"
        lines.append(f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">{name}</text>')
        lines.append(f'<text x="{LEFT + WIDTH + 8}" y="{top + 17}">{shown}</text>')
        for color, (phase, spent) in zip(COLORS, parts.items(), strict=True):
            width = WIDTH * spent / sum(parts.values())
            share = f"{phase}: {spent:,.0f} us"
            box = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{color}"'
            lines.append(f"<rect {box}><title>{share}</title></rect>")
            left += width
    top = STEP * len(DRAWN) + 14
    for at, (color, phase) in enumerate(zip(COLORS, parts, strict=True)):
        left = LEFT + 72 * at
        lines.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{left + 16}" y="{top + 11}" font-size="11">{phase}</text>')
    size = f'width="{LEFT + WIDTH + 80}" height="{top + 24}"'
    style = 'font-family="sans-serif" font-size="13" fill="#808080"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *lines, "</svg>", ""])
