# ruff: noqa: T201 - a benchmark prints its tables
"""What a pull costs beside its floor: every number of the hot path that needs no vLLM.

    python -m tests.benchmarks.hot_path [--rounds 7] [--only small] [--json out/hot-path.json]

Each participant is a process that has a source process of its own. Participants take turns in every round, and a ratio
is the median of the rounds' own ratios. What was read is compared with the source after each measurement.
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
from typing import Any

import msgspec

from kvflow import Worker
from kvflow.config import SECRET_VARIABLE
from kvflow.tools.bench import Result, Table, header, median_ratio, quantile
from kvflow.tools.doctor.probe import Geometry
from tests.benchmarks.hot_path_calls import Calls
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.hot_path_sides import Sample, open_reader
from tests.benchmarks.layouts import HALF_PAGES, HEAD_SIZE, LAYERS, VARIANTS

KIB, MIB = 1 << 10, 1 << 20
US, MS = 1e6, 1e3
WAYS = [way for way in ("pull", "start_pull", "pull_many") if hasattr(Worker, way)]
PAGES = {"huge": "auto", "small": "never"}
COLUMNS = ("measure", "floor", "kvflow", "found", "goal")

CALLS = ("until it returns", "and its release within 50 ms")
"""What is counted of one pull."""

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


class Readers:
    """Participants that take turns.

    Args:
        kinds: see ``open_reader``; each with its cache and its source's, which is the same if it is not given.
        rounds: how often each is asked.
    """

    def __init__(self, stack: ExitStack, kinds: Mapping[str, tuple[Geometry, ...]], rounds: int) -> None:
        self._rounds = rounds
        self._children: dict[str, Child] = {}
        for name, (geometry, *source) in kinds.items():
            kind = name.partition(":")[0]
            self._children[name] = stack.enter_context(Child(open_reader, kind, geometry, *(source or [geometry])))

    def ask(self, operation: str, *arguments: Any, only: Iterable[str] = (), **named: Any) -> Samples:
        """Ask every participant for one measurement in each round; the first round warms up and does not count.

        Args:
            operation: of the readers, whose first argument is the number of the round.
            arguments: its others.
            only: participants; all when empty.
            named: more arguments.
        """
        found: dict[str, list[Any]] = defaultdict(list)
        names = [name for name in self._children if not only or name in only]
        for turn in range(self._rounds + 1):
            show(f"{operation} {arguments}, round {turn} of {self._rounds}")
            for name in names[:: 1 if turn % 2 else -1]:
                sample = self._children[name].ask(operation, turn, *arguments, **named)
                if turn:
                    found[name].append(sample)
        return found


def small(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure pulls of 64 KiB one after the other, in a row and with pauses, and what a log costs."""
    geometry = packed(1 << 12, 32 * KIB)
    readers = Readers(stack, dict.fromkeys(("bare", "pull", "pull, logged"), (geometry,)), rounds)
    rows = []
    for name, count, pause_s, goal in (("64 KiB, back to back", 400, 0.0, 1.3), ("64 KiB, every 2 ms", 100, 0.002, 2)):
        found = readers.ask("one_by_one", count, 2, pause_s, only=("bare", "pull"))
        for share, limit in ((0.5, f"<= {goal} x"), (0.99, "" if pause_s else "<= 400 us")):
            walls = [[quantile(sorted(each.wall_s), share) for each in found[kind]] for kind in ("bare", "pull")]
            rows.append(times_floor(f"{name}, p{100 * share:.0f}, us", *walls, limit))
        rows.append(times_floor(f"{name}, CPU, us", *([each.cpu_s for each in found[k]] for k in ("bare", "pull")), ""))
    found = readers.ask("one_by_one", 1000, 2, only=("pull", "pull, logged"))
    for name, value in (("CPU", lambda each: each.cpu_s), ("p50", lambda each: statistics.median(each.wall_s))):
        silent, logged = ([value(each) for each in found[kind]] for kind in ("pull", "pull, logged"))
        rows.append(beyond_floor(f"64 KiB, back to back, with a log, {name}, us (floor: without)", silent, logged, 10))
    yield table("one pull after the other; floor: bare NIXL, eight bytes more, one thread hop", rows)


def in_flight(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure many pulls at once."""
    for block_kib, num_blocks, cases in (
        (32, 20_480, ((2, 100), (2, 1_000), (2, 10_000), (16, 100), (16, 1_000))),
        (4, 163_840, ((16, 100), (16, 1_000), (16, 10_000))),
    ):
        geometries = packed(num_blocks, block_kib * KIB), packed(1 << 12, block_kib * KIB)
        with ExitStack() as own:
            readers = Readers(own, dict.fromkeys(("bare", *WAYS), geometries), rounds)
            rows = []
            for blocks, count in cases:
                found = readers.ask("at_once", count, blocks, repeat=max(1, 500 // count))
                rows += rows_in_flight(
                    f"{count:,} in flight of {blocks}", found, asked=block_kib == 32 and blocks == 16
                )
        yield table(f"many pulls at once, random blocks of {block_kib} KiB; floor: bare NIXL", rows)


def rows_in_flight(title: str, found: Samples, *, asked: bool) -> Iterable[tuple[Any, ...]]:
    """Return the rows of one number of pulls in flight."""
    bare = found["bare"]
    for way in WAYS:
        goal = {"pull": 90, "pull_many": 60}.get(way) if asked else None
        cpu = [[each.cpu_s for each in samples] for samples in (bare, found[way])]
        yield beyond_floor(f"{title}, {way}: CPU of each, us", *cpu, goal)
    for way in WAYS:
        yield times_floor(f"{title}, {way}: time, ms", *walls(bare, found[way]), "", MS)
    for way in WAYS:
        source = statistics.median(each.source_cpu_s for each in found[way]) * US
        yield (f"{title}, {way}: source's CPU of each, us", None, source, "", "<= 25" if asked else "")


def large(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure large reads beside bare NIXL, with huge pages on both sides and with small ones."""
    geometry = packed(4_097, 64 * KIB)
    paged = {name: msgspec.structs.replace(geometry, huge_pages=how) for name, how in PAGES.items()}
    kinds = {f"{kind}: {name}": (cache,) for name, cache in paged.items() for kind in ("bare", "pull")}
    readers = Readers(stack, kinds, rounds)
    rows = []
    for scattered in (False, True):
        for size in (64, 256):
            found = readers.ask("at_once", 1, size * MIB // (64 * KIB), scattered=scattered)
            for name in PAGES:
                title = f"{size} MiB, {'random' if scattered else 'consecutive'} blocks, {name} pages, ms"
                rows.append(of_floor(title, *walls(found[f"bare: {name}"], found[f"pull: {name}"]), ">= 0.96"))
    yield table("large reads, blocks of 64 KiB; floor: bare NIXL with the same pages", rows)


def pages(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what huge pages gain, and on which side."""
    geometry = packed(2_048, 64 * KIB)
    paged = {name: msgspec.structs.replace(geometry, huge_pages=how) for name, how in PAGES.items()}
    kinds = {
        f"{kind}: {here} here, {there} there": (paged[here], paged[there])
        for kind in ("bare", "pull")
        for here in PAGES
        for there in PAGES
    }
    readers = Readers(stack, kinds, rounds)
    rows = []
    for scattered in (False, True):
        found = readers.ask("at_once", 1, 64 * MIB // (64 * KIB), scattered=scattered)
        for name in [name for name in kinds if "huge" in name]:
            small_pages = found[f"{name.partition(':')[0]}: small here, small there"]
            title = f"{'random' if scattered else 'consecutive'} blocks, {name}, ms"
            rows.append(of_floor(title, *walls(small_pages, found[name]), ""))
    yield table("64 MiB, blocks of 64 KiB, reader here, source there; floor: small pages on both sides", rows)


def layouts(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what packing gains, through ``pull`` and with bare NIXL."""
    del stack
    rows = []
    for half_page, heads in list(HALF_PAGES.items())[:2]:  # the third needs 9 GiB
        kinds = {
            f"{kind}: {name}": (
                Geometry(layers=LAYERS, num_kv_heads=heads, head_size=HEAD_SIZE, num_blocks=640, layout=layout, kv=kv),
            )
            for kind in ("bare", "pull")
            for name, (layout, kv) in VARIANTS.items()
        }
        with ExitStack() as own:
            readers = Readers(own, kinds, rounds)
            for blocks in (63, 607):
                found = readers.ask("at_once", 1, blocks)
                gains = {
                    kind: ratios(*walls(found[f"{kind}: per-layer"], found[f"{kind}: packed"]))
                    for kind in ("bare", "pull")
                }
                share = median_ratio(gains["pull"], gains["bare"])
                medians = [statistics.median(gains[kind]) for kind in ("bare", "pull")]
                title = f"half pages of {half_page // KIB} KiB, {blocks} random blocks: gain"
                rows.append((title, *medians, f"{share:.2f} of it", ">= 0.97"))
    yield table("packed over per-layer; floor: the gain of bare NIXL", rows)


def beside(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what happens beside a pull of 1 GiB."""
    blocks = (1 << 30) // (64 * KIB)
    readers = Readers(stack, {"pull": (packed(blocks + 512, 64 * KIB),)}, rounds)
    (lags,) = readers.ask("lag", blocks).values()
    busy, idle = (sorted(lag for each in lags for lag in each[kind]) for kind in ("busy", "idle"))
    rows: list[tuple[Any, ...]] = [
        (f"lag of the event loop, p{100 * share:.0f}, ms", *values, "", "<= 1" if share > 0.5 else "")
        for share in (0.5, 0.99)
        for values in [(quantile(idle, share) * MS, quantile(busy, share) * MS)]
    ]
    (found,) = readers.ask("urgent", blocks, 0.01).values()
    urgent = sorted(wall for each in found for wall in each["urgent"])
    for share, goal in ((0.5, ""), (0.99, "<= 5")):
        title = f"urgent 64 KiB, p{100 * share:.0f} of {len(urgent)}, ms"
        rows.append((title, None, quantile(urgent, share) * MS, "", goal))
    alone, with_urgent = ([each[name] for each in found] for name in ("alone_s", "beside_s"))
    rows.append(of_floor("1 GiB with an urgent pull every 10 ms, ms (floor: alone)", alone, with_urgent, ">= 0.90"))
    yield table("beside 1 GiB of random blocks of 64 KiB; floor of the lag: nothing moves", rows)


def late(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Measure what is read in vain where leases are held after their tickets are read."""
    readers = Readers(stack, {"pull": (packed(1 << 12, 32 * KIB),)}, rounds)
    rows = []
    for count, blocks in ((16, 16), (1, 1_024)):
        (found,) = readers.ask("late", count, blocks, 0.1).values()
        in_vain = sum(each["in_vain"] for each in found) / sum(each["nbytes"] for each in found)
        title = f"{count} pulls of {blocks} blocks"
        rows.append((f"{title}: bytes read in vain, of those that were delivered", None, in_vain, "", "0"))
        rows.append((f"{title}: done after the admission, ms", None, median(found, "after_s") * MS, "", ""))
    yield table("tickets that are admitted 100 ms late, blocks of 32 KiB", rows)


def calls(stack: ExitStack, rounds: int) -> Iterable[Table]:
    """Count what one pull executes."""
    readers = Readers(stack, {"pull, traced": (packed(1 << 12, 32 * KIB),)}, rounds)
    (found,) = readers.ask("calls", 2).values()
    commit, figures = known_figures()
    rows: list[tuple[Any, ...]] = []
    notes: list[str] = []
    for number, title in enumerate(CALLS):
        counted = least(each[number] for each in found)
        goals = ("<= 80", "<= 45", "", "<= 2,000", "<= 10") if number == 0 else ("",) * 5
        known = figures.get(title, {})
        rows += [
            (f"{name}, {title}", known.get(name), value, "", goal)
            for (name, value), goal in zip(executed(counted).items(), goals, strict=True)
        ]
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
    scenario.__name__: scenario for scenario in (small, in_flight, large, pages, layouts, beside, late, calls)
}


def table(title: str, rows: Sequence[tuple[Any, ...]], *notes: str) -> Table:
    return Table(title=title, columns=COLUMNS, rows=tuple(rows), notes=notes)


def walls(*kinds: Sequence[Sample]) -> list[list[float]]:
    """Return the median time of each round, kind by kind."""
    return [[statistics.median(sample.wall_s) for sample in samples] for samples in kinds]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def times_floor(
    title: str, floor: Sequence[float], ours: Sequence[float], goal: str, unit: float = US
) -> tuple[Any, ...]:
    """Return the row of a time that is so many times its floor."""
    return (title, *medians(floor, ours, unit), f"{median_ratio(ours, floor):.2f} x", goal)


def of_floor(title: str, floor: Sequence[float], ours: Sequence[float], goal: str) -> tuple[Any, ...]:
    """Return the row of a rate that is such a share of the floor's."""
    return (title, *medians(floor, ours, MS), f"{median_ratio(floor, ours):.2f} times the rate", goal)


def beyond_floor(title: str, floor: Sequence[float], ours: Sequence[float], goal: int | None) -> tuple[Any, ...]:
    """Return the row of what is spent beyond the floor."""
    beyond = statistics.median(one - other for one, other in zip(ours, floor, strict=True)) * US
    return (title, *medians(floor, ours, US), f"+ {beyond:.1f}", "" if goal is None else f"<= {goal}")


def medians(floor: Sequence[float], ours: Sequence[float], unit: float) -> tuple[float, float]:
    return statistics.median(floor) * unit, statistics.median(ours) * unit


def median(samples: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in samples)


def show(text: str) -> None:
    """Show one line that replaces itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hot_path", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement (default: %(default)s)")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="one of the scenarios; may be repeated")
    parser.add_argument("--json", type=Path, help="write the result into this file, too")
    options = parser.parse_args()
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    about, tables = header(), []
    for name in options.only or SCENARIOS:
        with ExitStack() as stack:
            for each in SCENARIOS[name](stack, options.rounds):
                show("")
                print(each, end="\n\n", flush=True)
                tables.append(each)
    result = Result(name="hot_path", header=about, tables=tuple(tables))
    print(f"{str(result).partition(chr(10) * 2)[0]}; {options.rounds} paired rounds")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
