"""What descriptors cost by count and size, and what staging saves: token-major pages, TP 1 to 2."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.ids import Int64s
from kvflow.layout.manifest import Manifest
from kvflow.planning.plan import plan_transfer
from kvflow.report import TransferReport
from kvflow.tools.bench import Table, median_ratio, summarize
from kvflow.tools.bench.source import SourceProcess, open_source
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker
from tests.fakes.staging import STAGE_ALL, PlansAt

LAYERS = {2: 32, 8: 32, 32: 8}
"""KV heads of the source -> layers. A target rank reads half of the heads, of 128 elements: 256 B, 1 and 4 KiB."""

BLOCKS = (1, 8, 64)
POOL_BLOCKS = 2 * max(BLOCKS)
"""As many as every second one needs."""

STAGING_BYTES = 64 << 20


class _Cell(Struct):
    """The rounds of one number of blocks."""

    direct: list[float]
    staged: list[float]
    reports: tuple[TransferReport, TransferReport] | None = None


async def run(
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
    source_address: str | None = None,
) -> tuple[Table, ...]:
    """Measure.

    Args:
        rounds: of every size.
        seed: of block ids.
        progress: is told what is measured.
        source_address: ``host:port`` of a source process that runs already; None starts one.

    Raises:
        PeerLost: the source process has ended.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[object, ...]] = []
    async with open_source(source_address) as source:
        for heads in LAYERS:
            rows += await _compare(source, heads, rng, _Rounds(rounds, progress))
    return (_comparison(rows, rounds),)


class _Rounds(NamedTuple):
    """Number of rounds, and the function that receives each."""

    number: int
    progress: Callable[[str], None]


async def _compare(
    source: SourceProcess, heads: int, rng: np.random.Generator, rounds: _Rounds
) -> list[tuple[object, ...]]:
    """Pull the same blocks directly and staged, in turns one or the other first."""
    there = Geometry(
        layers=LAYERS[heads], num_kv_heads=heads, head_size=128, num_blocks=POOL_BLOCKS, layout="LBNHC", kv="split"
    )
    name = f"heads-{heads}"
    opened = await source.open(name, there)
    here = msgspec.structs.replace(there, tp_size=2)
    rows: list[tuple[object, ...]] = []
    async with (
        _reader(here, staged=False) as (direct, manifest),
        _reader(here, staged=True) as (staged, _),
    ):
        chosen = _chosen(msgspec.msgpack.decode(opened.manifest, type=Manifest), manifest)
        for blocks in BLOCKS:
            for ids in ("apart", "in order"):
                cell = _Cell([], [])
                for turn in range(rounds.number + 1):
                    rounds.progress(f"{heads} heads, {blocks} blocks {ids}, round {turn} of {rounds.number}")
                    source_ids, target_ids = (_ids(blocks, rng if ids == "apart" else None) for _ in range(2))
                    num_tokens = blocks * BLOCK_SIZE
                    tickets = await source.offer(name, [source_ids.tolist()], num_tokens=num_tokens, count=2)
                    pulls = [
                        partial(worker.pull, ticket, [target_ids.tolist()])
                        for worker, ticket in zip((direct, staged), tickets, strict=True)
                    ]
                    await _round(pulls, cell, turn)
                _require_both(cell)
                rows.append(_row(cell, heads, blocks, ids, chosen))
    await source.close_caches()
    return rows


@asynccontextmanager
async def _reader(geometry: Geometry, *, staged: bool) -> AsyncIterator[tuple[Worker, Manifest]]:
    """Open a worker that stages all that it can, or nothing."""
    cache = geometry.build()
    environment = msgspec.structs.replace(
        PRODUCTION,
        make_plans=lambda: PlansAt(STAGE_ALL),
        staging=lambda _config, _manifest: STAGING_BYTES if staged else 0,
    )
    config = WorkerConfig(engine_id=f"target-{'staged' if staged else 'direct'}")
    async with open_worker(config, cache, environment=environment) as worker:
        yield worker, cache.manifest()


def _chosen(source: Manifest, target: Manifest) -> str:
    """Return which variant a worker chooses."""
    plan = plan_transfer(source, target, staging_bytes=STAGING_BYTES)
    return "direct" if plan.groups[0].staged is None else "staged"


async def _round(pulls: Sequence[Callable[[], Awaitable[TransferReport]]], cell: _Cell, turn: int) -> None:
    """Pull directly and staged, in turns one or the other first; the first turn connects and is not counted."""
    seconds = [0.0, 0.0]
    reports = {}
    for variant in (0, 1) if turn % 2 else (1, 0):
        started = time.perf_counter()
        reports[variant] = await pulls[variant]()
        seconds[variant] = time.perf_counter() - started
    if turn:
        cell.direct.append(seconds[0])
        cell.staged.append(seconds[1])
    cell.reports = (reports[0], reports[1])


def _require_both(cell: _Cell) -> None:
    """Make sure that two ways of reading were compared: a plan may not be one that can be staged."""
    assert cell.reports is not None
    copied = [report.timings_s["scatter"] > 0 for report in cell.reports]
    assert copied == [False, True], f"read directly and staged: {copied}"


def _ids(blocks: int, rng: np.random.Generator | None) -> Int64s:
    return np.arange(blocks) if rng is None else 2 * rng.permutation(POOL_BLOCKS // 2)[:blocks]


def _row(cell: _Cell, heads: int, blocks: int, ids: str, chosen: str) -> tuple[object, ...]:
    assert cell.reports is not None
    direct, staged = cell.reports
    return (
        heads * 128,
        LAYERS[heads],
        blocks,
        ids,
        direct.descriptors,
        summarize(cell.direct).p50 * 1e3,
        staged.descriptors,
        summarize(cell.staged).p50 * 1e3,
        staged.timings_s["scatter"] * 1e3,
        staged.nbytes / (1 << 20),
        median_ratio(cell.direct, cell.staged),
        chosen,
    )


def _comparison(rows: list[tuple[object, ...]], rounds: int) -> Table:
    return Table(
        title=f"token-major pages of {BLOCK_SIZE} tokens, TP 1 to 2; whole pulls, {rounds} paired rounds",
        columns=(
            "piece B",
            "layers",
            "blocks",
            "ids",
            "direct descriptors",
            "direct ms",
            "staged descriptors",
            "staged ms",
            "scatter ms",
            "MiB",
            "x faster",
            "chosen",
        ),
        rows=tuple(rows),
        notes=(
            "x faster: direct time over staged time, round by round, median.",
            "chosen: by a worker; a staged read reads twice the MiB that it delivers.",
        ),
    )
