# ruff: noqa: T201 - a benchmark prints its tables
"""What a pull costs beside its floor: every figure of docs/explanation/performance.md, in one run of six minutes.

    python -m tests.benchmarks.hot_path [--rounds 15] [--only small] [--json out/hot-path.json]

All that is compared runs in one process and reads from one source process, in an order that rotates from round to
round. A ratio is the median of the rounds' own ratios. What was read is compared with the source after each
measurement. ``kvflow bench beside`` is a part of the run, without vLLM.
"""

import argparse
import os
import secrets
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import uvloop

from kvflow.config import SECRET_VARIABLE
from kvflow.report import PHASES
from kvflow.tools.bench import SAMPLES_MIN, Result, Table, header, median_ratio, quantile, tail
from kvflow.tools.doctor.probe import Geometry
from tests.benchmarks import beside as beside_others
from tests.benchmarks.hot_path_calls import Calls
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.hot_path_sides import PEERS, Sample, open_readers
from tests.docs.performance import IDLE_LOAD_MAX

KIB, MIB = 1 << 10, 1 << 20
US, MS = 1e6, 1e3
WAYS = ("pull", "pull_many")
READ_BEFORE, ONE_CORE = "pull, read before", "pull, 1"
"""Pulls of tickets that ``read_ticket`` has read, and pulls with ``copy_threads=1``."""
PAGES = {"huge": "auto", "small": "never"}
COLUMNS = ("measure", "floor", "kvflow", "found", "goal")

CALLS = ("until it returns", "and its release within 50 ms")
"""What is counted of one pull."""

SPREAD_MAX = 0.2  # of bare reads between rounds: beyond it, something else takes part in every figure

FIGURES = Path(__file__).parents[1] / "golden" / "hot_path.json"

Samples = Mapping[str, list[Any]]
"""Of each participant, what each round has found."""


def packed(num_blocks: int, block_bytes: int) -> Geometry:
    """Return a cache with a row for each block."""
    layers = 4 if block_bytes >= 32 * KIB else 1
    heads = max(1, block_bytes // (32 * KIB))
    geometry = Geometry(
        layers=layers,
        num_kv_heads=heads,
        head_size=block_bytes // (layers * heads * 64),
        num_blocks=num_blocks,
        layout="BLHNC",
        kv="content",
    )
    assert geometry.block_bytes == block_bytes
    return geometry


def spread(rounds: Sequence[float]) -> float:
    """Return by which share the rounds differ that three quarters and one quarter do not exceed."""
    ordered = sorted(rounds)
    return quantile(ordered, 0.75) / quantile(ordered, 0.25) - 1


class Readers:
    """Participants of one process that take turns.

    ``spreads``: by how much bare reads have varied between rounds, of all that were measured one by one.

    Args:
        kinds: see ``open_readers``.
        geometry: of their cache.
        source: of the source's, if it is another.
        rounds: how often each is asked.
    """

    spreads: ClassVar[list[float]] = []

    def __init__(
        self,
        stack: ExitStack,
        kinds: Sequence[str],
        geometry: Geometry,
        rounds: int,
        *,
        source: Geometry | None = None,
        peers: int = 1,
    ) -> None:
        self._rounds = rounds
        self._child = stack.enter_context(Child(open_readers, kinds, geometry, source or geometry, peers))

    def ask(self, operation: str, *arguments: Any, only: Sequence[str] = (), **named: Any) -> Samples:
        """Ask every participant for one measurement in each round; the first round warms up and does not count.

        Args:
            operation: of the readers, whose first argument is the number of the round.
            arguments: its others.
            only: participants; all when empty.
            named: more arguments.
        """
        found: dict[str, list[Any]] = defaultdict(list)
        for turn in range(self._rounds + 1):
            show(f"{operation} {arguments}, round {turn} of {self._rounds}")
            samples = self._child.ask("each", operation, turn, *arguments, only=only, **named)
            for name, sample in samples.items() if turn else ():
                found[name].append(sample)
        if operation == "one_by_one" and "bare" in found:
            self.spreads.append(spread(walls(found["bare"])[0]))
        return found


def small(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure pulls of 64 KiB one after the other, in a row and with pauses."""
    readers = Readers(stack, ("bare", "pull", READ_BEFORE), packed(1 << 12, 32 * KIB), rounds)
    rows = []
    phases = []
    for name, count, pause_s, goals in (
        ("64 KiB in a row", 400, 0.0, {"pull": 3.8, READ_BEFORE: 3.5}),
        ("64 KiB every 2 ms", 100, 0.002, {"pull": 4.0, READ_BEFORE: 4.0}),
    ):
        found = readers.ask("one_by_one", count, 2, pause_s)
        for kind, goal in goals.items():
            title = f"{name}{', read_ticket' if kind == READ_BEFORE else ''}"
            rows.append(times_floor(f"{title}, p50, us", *walls(found["bare"], found[kind]), goal, US))
            rows.append(on_thread(title, found[kind], 1, 1))
        longest = (tail([one for each in found[kind] for one in each.wall_s], US) for kind in ("bare", "pull"))
        rows.append((f"{name}, tail, us", *longest, "", ""))
        rows.append(beyond_floor(f"{name}, CPU, us", *cpus(found["bare"], found["pull"]), None))
        phases.append(phase_row(name, found["pull"]))
    yield table("one pull after the other; floor: two bare reads, data and eight bytes, on the calling thread", rows)
    yield phase_table(phases)


def in_flight(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure many pulls at once."""
    readers = Readers(stack, ("bare", *WAYS), packed(20_480, 32 * KIB), rounds, source=packed(1 << 12, 32 * KIB))
    rows = []
    for count in (100, 1_000):
        found = readers.ask("at_once", count, 16, repeat=max(1, 500 // count))
        for way in WAYS:
            title = f"512 KiB, {count:,} in flight, {way}: CPU, us"
            rows.append(beyond_floor(title, *cpus(found["bare"], found[way]), None))
            rows.append(on_thread(f"512 KiB, {count:,} in flight, {way}", found[way], count, None))
        source = statistics.median(each.source_cpu_s for each in found["pull"]) * US
        title = f"offer, admit, release, {count:,} in flight: CPU, us"
        rows.append((title, None, source, f"{source:.1f}", judged(source, "<=", 25) if count == 100 else ""))
    yield table("many pulls at once, random blocks of 32 KiB; floor: bare NIXL", rows)


LARGE_GOALS = {
    (16, "small"): (0.85, 0.85),
    (16, "huge"): (0.7, 0.7),
    (64, "small"): (1.25, 1.5),
    (64, "huge"): (0.95, 1.2),
    (256, "small"): (1.25, 1.5),
    (256, "huge"): (0.95, 1.2),
}
"""MiB and pages -> least rate of consecutive blocks and of random ones, of bare NIXL's."""


def large(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure large reads beside bare NIXL, and what the second core gains, with huge pages and with small ones."""
    del stack
    rows, gains, phases = [], [], []
    for pages, how in PAGES.items():
        geometry = msgspec.structs.replace(packed(4_097, 64 * KIB), huge_pages=how)
        with ExitStack() as own:
            readers = Readers(own, ("bare", "pull", ONE_CORE), geometry, rounds)
            for size in (16, 64, 256):
                for scattered in (False, True):
                    found = readers.ask("at_once", 1, size * MIB // (64 * KIB), scattered=scattered)
                    title = f"{size} MiB, {'random' if scattered else 'consecutive'} blocks, {pages} pages"
                    bare, both, one = walls(*(found[kind] for kind in ("bare", "pull", ONE_CORE)))
                    rows.append(of_floor(f"{title}, ms", bare, both, LARGE_GOALS[size, pages][scattered]))
                    if size > 16:
                        rows.append(times_floor(f"{title}, CPU, ms", *cpus(found["bare"], found["pull"]), 1.3))
                    gains.append(of_floor(f"{title}, ms", one, both, None))
                    if scattered:
                        phases.append(phase_row(title, found["pull"]))
    yield table("large reads, blocks of 64 KiB; floor: bare NIXL with the same pages", rows)
    yield table("what the second core gains; floor: copy_threads=1", gains)
    yield phase_table(phases)


def beside(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what happens beside a pull of 1 GiB."""
    blocks = (1 << 30) // (64 * KIB)
    readers = Readers(stack, ("pull",), packed(blocks + 512, 64 * KIB), rounds)
    lags = [each for _ in range(2) for each in readers.ask("lag", blocks)["pull"]]  # for 1,000 samples
    idle, busy = ([lag for each in lags for lag in each[kind]] for kind in ("idle", "busy"))
    (found,) = readers.ask("urgent", blocks, 0.01, -(-SAMPLES_MIN // rounds)).values()
    urgent = [wall for each in found for wall in each["urgent"]]
    alone, with_urgent = ([statistics.median(each[name]) for each in found] for name in ("alone_s", "beside_s"))
    alone_ms = statistics.median(alone) * MS
    rows = [
        tail_row("lag of the event loop, ms", idle, busy, 1),
        tail_row(f"urgent 64 KiB, of {len(urgent):,}, ms", [], urgent, 3),
        ("1 GiB alone, ms", None, alone_ms, f"{alone_ms:.1f}", judged(alone_ms, "<=", 65)),
        of_floor("1 GiB with an urgent pull every 10 ms, ms", alone, with_urgent, 0.95),
    ]
    yield table("beside 1 GiB of random blocks of 64 KiB; floor: idle, or alone", rows)


def tail_row(title: str, floor: Sequence[float], ours: Sequence[float], goal: float) -> tuple[Any, ...]:
    """Return the row of medians and tails, of which ours has a goal."""
    shown = [f"p50 {statistics.median(each) * MS:.2f}, {tail(each, MS)}" if each else None for each in (floor, ours)]
    found = quantile(sorted(ours), 0.99 if len(ours) >= SAMPLES_MIN else 1) * MS
    return (title, *shown, f"{found:.2f}", judged(found, "<=", goal))


def waiting(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what pulls take that wait for their admission."""
    readers = Readers(stack, ("start_pull",), packed(1 << 14, 4 * KIB), min(rounds, 3))
    (found,) = readers.ask("waiting", 10_000, 8.0).values()
    none, share = (statistics.median(100 * each[name] for each in found) for name in ("none", "waiting"))
    rows = [("10,000 pulls that wait for admission, % of a core", none, share, f"{share:.1f}", judged(share, "<=", 1))]
    yield table("tickets that are admitted late; floor: no pull", rows)


def peers(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure pulls from many peers."""
    readers = Readers(
        stack, ("start_pull",), packed(1 << 10, 64 * KIB), rounds, source=packed(1 << 6, 64 * KIB), peers=PEERS
    )
    (found,) = readers.ask("of_peers", 1_000).values()
    one, many = ([each[number] for each in found] for number in (1, PEERS))
    rows = [times_floor(f"64 KiB, 1,000 in flight, {PEERS} peers: CPU, us", one, many, 1.2, US)]
    yield table("pulls from many peers; floor: from one", rows)


OBSERVED = {
    ("JSON lines", "64 KiB"): 1.10,
    ("JSON lines", "1 MiB"): 1.05,
    ("hook", "64 KiB"): 1.05,
    ("http", "64 KiB"): 1.10,
}
"""Way and size -> most CPU, of a pull that nobody observes."""


def observed(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what it costs to observe a pull."""
    del stack
    from tests.benchmarks.observing import costs  # which imports this module

    rows = []
    for size, way, floor_us, cpu_us, ratio in costs(rounds, 40):
        goal = OBSERVED.get((way, size))
        verdict = judged(ratio, "<=", goal) if goal else ""
        rows.append((f"{size}, {way}: CPU, us", floor_us, cpu_us, f"{ratio:.2f} x", verdict))
    yield table("what it costs to observe a pull; floor: nobody does", rows)


def others(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Compare with what else moves the same bytes."""
    del stack
    return uvloop.run(beside_others.run(rounds, 0, show, vllm=""))


def calls(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Count what one pull executes."""
    readers = Readers(stack, ("pull, traced",), packed(1 << 12, 32 * KIB), rounds)
    (found,) = readers.ask("calls", 2).values()
    commit, figures = known_figures()
    rows: list[tuple[Any, ...]] = []
    notes: list[str] = []
    for number, title in enumerate(CALLS):
        counted = least(each[number] for each in found)
        known = figures.get(title, {})
        for name, value in executed(counted).items():
            goal = judged(value, "<=", 2_100) if (number, name) == (0, "bytecodes") else ""
            rows.append((f"{name} of 64 KiB, {title}", known.get(name), value, f"{value:,}" if goal else "", goal))
        made = ", ".join(f"{count} {name}" for name, count in counted.records.most_common())
        most = ", ".join(
            f"{count} {Path(path).stem}.{name}" for (path, name), count in counted.functions.most_common(25)
        )
        notes += [f"records {title}: {made}", f"bytecodes {title}, most: {most}"]
    yield table(f"what one pull of 64 KiB executes, all threads; floor: at {commit}", rows, *notes)


def least(rounds: Iterable[Calls]) -> Calls:
    """Return the round in which nothing else came between."""
    return min(rounds, key=lambda each: each.bytecodes)


def executed(counted: Calls) -> dict[str, int]:
    """Return the numbers that a list of figures has of one pull."""
    return {
        "calls": counted.calls,
        "functions": len(counted.functions),
        "modules": counted.modules,
        "bytecodes": counted.bytecodes,
        "records": counted.records.total(),
    }


def known_figures() -> tuple[str, Mapping[str, Mapping[str, int]]]:
    """Return a commit, and what a pull executed there with this version of Python; nothing if it was not measured."""
    known = msgspec.json.decode(FIGURES.read_bytes())
    return known["commit"], known["python"].get("{}.{}".format(*sys.version_info), {})


SCENARIOS: Mapping[str, Callable[[ExitStack, int], Iterable[Table]]] = {
    scenario.__name__: scenario
    for scenario in (small, calls, in_flight, large, beside, waiting, peers, observed, others)
}


def table(title: str, rows: Sequence[tuple[Any, ...]], *notes: str) -> Table:
    return Table(title=title, columns=COLUMNS, rows=tuple(rows), notes=notes)


def walls(*kinds: Sequence[Sample]) -> list[list[float]]:
    """Return the median time of each round, kind by kind."""
    return [[statistics.median(sample.wall_s) for sample in samples] for samples in kinds]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def judged(value: float, sign: str, goal: float) -> str:
    """Return a goal, and whether it was met."""
    met = value <= goal if sign == "<=" else value >= goal
    return f"{sign} {goal:,}: {'met' if met else 'missed'}"


def on_thread(title: str, samples: Sequence[Sample], at_once: int, goal: float | None) -> tuple[Any, ...]:
    """Return the row of the share of pulls that the read thread has made; so many share each wall time."""
    share = 100 * sum(each.on_thread for each in samples) / sum(len(each.wall_s) * at_once for each in samples)
    judgement = "" if goal is None else judged(share, "<=", goal)
    return (f"{title}, by the read thread, %", None, share, f"{share:.1f}", judgement)


def cpus(*kinds: Sequence[Sample]) -> list[list[float]]:
    """Return the process time of one read in each round, kind by kind."""
    return [[sample.cpu_s for sample in samples] for samples in kinds]


def times_floor(
    title: str, floor: Sequence[float], ours: Sequence[float], goal: float, unit: float = MS
) -> tuple[Any, ...]:
    """Return the row of what is so many times its floor."""
    ratio = median_ratio(ours, floor)
    return (title, *medians(floor, ours, unit), f"{ratio:.2f} x", judged(ratio, "<=", goal))


def of_floor(title: str, floor: Sequence[float], ours: Sequence[float], goal: float | None) -> tuple[Any, ...]:
    """Return the row of a rate that is such a share of the floor's."""
    share = median_ratio(floor, ours)
    verdict = "" if goal is None else judged(share, ">=", goal)
    return (title, *medians(floor, ours, MS), f"{share:.2f} x", verdict)


def beyond_floor(title: str, floor: Sequence[float], ours: Sequence[float], goal: int | None) -> tuple[Any, ...]:
    """Return the row of what is spent beyond the floor."""
    beyond = statistics.median(one - other for one, other in zip(ours, floor, strict=True)) * US
    return (title, *medians(floor, ours, US), f"+ {beyond:.1f}", "" if goal is None else judged(beyond, "<=", goal))


def medians(floor: Sequence[float], ours: Sequence[float], unit: float) -> tuple[float, float]:
    return statistics.median(floor) * unit, statistics.median(ours) * unit


PHASES_TITLE = "where the time of a pull goes, us"


def phase_row(title: str, samples: Sequence[Sample]) -> tuple[Any, ...]:
    """Return how long a pull took, and of that each phase of its report."""
    phases = [statistics.median(each.phases_s[phase] for each in samples) * US for phase in PHASES]
    return (title, statistics.median(walls(samples)[0]) * US, *phases)


def phase_table(rows: Sequence[tuple[Any, ...]]) -> Table:
    return Table(title=PHASES_TITLE, columns=("pull", "whole", *PHASES), rows=tuple(rows))


def show(text: str) -> None:
    """Show one line that replaces itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hot_path", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement (default: %(default)s)")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="one of the scenarios; may be repeated")
    parser.add_argument(
        "--json", type=Path, help="write the result into this file, too; tables of other scenarios stay"
    )
    parser.add_argument("--busy", action="store_true", help="write it although the machine is not idle or steady")
    options = parser.parse_args()
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    about, tables = header(), []
    if options.json and about.load_average > IDLE_LOAD_MAX and not options.busy:
        parser.error(
            f"the load average is {about.load_average:.1f}, and one busy neighbor changes every figure: "
            f"wait until it is below {IDLE_LOAD_MAX}, or add --busy, and the page says that the machine was not idle"
        )
    for name in options.only or SCENARIOS:
        with ExitStack() as stack:
            for each in SCENARIOS[name](stack, options.rounds):
                show("")
                print(each, end="\n\n", flush=True)
                tables.append(each)
    if options.only and options.json and options.json.exists():
        measured = {(each.title, each.rows[0][0]) for each in tables}
        before = msgspec.json.decode(options.json.read_bytes(), type=Result).tables
        tables += [each for each in before if (each.title, each.rows[0][0]) not in measured]
    result = Result(name=f"hot_path --rounds {options.rounds}", header=about, tables=tuple(tables))
    print(f"{str(result).partition(chr(10) * 2)[0]}; {options.rounds} paired rounds")
    most = max(Readers.spreads, default=0.0)
    if options.json and most > SPREAD_MAX and not options.busy:
        print(
            f"bare reads vary by {most:.0%} between rounds, and by at most {SPREAD_MAX:.0%} on a host that measures: "
            "nothing was written. Try again, or add --busy.",
            file=sys.stderr,
        )
        return 1
    if options.json:
        options.json.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
