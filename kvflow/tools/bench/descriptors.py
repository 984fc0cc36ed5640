"""What descriptors cost by count and size, and what staging saves: token-major pages, TP 1 to 2, direct against staged.

With an output, the constants of the cost model are written as a calibration, and nothing is compared.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.layout.manifest import Manifest
from kvflow.planning.costs import MACHINE_LENGTH_MAX, Calibration, Costs, encode_calibration
from kvflow.planning.pairs import Int64s
from kvflow.planning.plan import plan_transfer
from kvflow.report import TransferReport
from kvflow.tools.bench.constants import measure, measure_reads
from kvflow.tools.bench.geometry import BLOCK_SIZE, HOST, Devices, Geometry
from kvflow.tools.bench.result import Table, header
from kvflow.tools.bench.sourcing import SourceProcess, open_source
from kvflow.tools.bench.stats import median_ratio, summarize
from kvflow.tools.bench.writing import replace_file
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

LAYERS = {2: 32, 8: 32, 32: 8}
"""KV heads of the source -> layers. A target rank reads half of the heads, of 128 elements: 256 B, 1 and 4 KiB."""

BLOCKS = (1, 8, 64)
POOL_BLOCKS = 2 * max(BLOCKS)
"""As many as every second one needs."""

STAGING_BYTES = 64 << 20

ALWAYS = Costs(descriptor_s=1.0, read_byte_s=0.0, copy_s=0.0, piece_s=0.0, copied_byte_s=0.0)
"""With such costs everything is staged that can be."""


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
    output: str | None = None,
    *,
    devices: Devices = HOST,
) -> tuple[Table, ...]:
    """Measure, and write a calibration if that is asked for.

    Args:
        rounds: of every size.
        seed: of block ids.
        progress: is told what is measured.
        source_address: ``host:port`` of a source process that runs already; None starts one.
        output: file of the calibration; None: compare direct and staged reads instead.
        devices: that the caches lie on. Nothing is staged between host memory and a device.

    Raises:
        OSError: the file cannot be written.
        ConfigInvalid: what was measured cannot be, or the memories are of two kinds; nothing is written.
        PeerLost: the source process has ended.
    """
    rng = np.random.default_rng(seed)
    if output is not None and not devices.alike:
        raise ConfigInvalid(
            f"a calibration is of caches in memory of one kind, not on {devices.there} and {devices.here}",
            remedy="Calibrate with both caches on devices, or with none. Reads between both kinds are never staged.",
        )
    async with open_source(source_address, devices) as source:
        if not devices.alike:
            _, _, table = await measure_reads(source, rounds, rng, progress)
            return (table,)
        measured = await measure(source, rounds, rng, progress)
        if output is not None:
            text = encode_calibration(_calibration(measured.costs, source_address, devices))
            await asyncio.to_thread(replace_file, Path(output), text)
            return (*measured.tables, _written(output))
        rows: list[tuple[object, ...]] = []
        for heads in LAYERS:
            rows += await _compare(source, heads, measured.costs, rng, _Rounds(rounds, progress))
    return (*measured.tables, _comparison(rows, rounds))


def _calibration(costs: Costs, source_address: str | None, devices: Devices) -> Calibration:
    about = header()
    return Calibration(
        schema=1,
        machine=f"{about.machine}, {about.cores} cores"[:MACHINE_LENGTH_MAX],
        transport="nixl",
        source=source_address or "same machine",
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        costs=costs,
        memory="DRAM" if devices.in_host_memory else "VRAM",
    )


class _Rounds(NamedTuple):
    """Number of rounds, and the function that receives each."""

    number: int
    progress: Callable[[str], None]


async def _compare(
    source: SourceProcess, heads: int, costs: Costs, rng: np.random.Generator, rounds: _Rounds
) -> list[tuple[object, ...]]:
    """Pull the same blocks directly and staged, in turns one or the other first."""
    there = Geometry(
        layers=LAYERS[heads], num_kv_heads=heads, head_size=128, num_blocks=POOL_BLOCKS, layout="LBNHC", kv="split"
    )
    name = f"heads-{heads}"
    opened = await source.open(name, there)
    devices = source.devices
    here = msgspec.structs.replace(there, tp_size=2, device=devices.here)
    rows: list[tuple[object, ...]] = []
    async with (
        _reader(here, devices, staged=False) as (direct, manifest),
        _reader(here, devices, staged=True) as (staged, _),
    ):
        terms = _calibration(costs, None, devices)
        chosen = _chosen(msgspec.msgpack.decode(opened.manifest, type=Manifest), manifest, terms)
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
async def _reader(geometry: Geometry, devices: Devices, *, staged: bool) -> AsyncIterator[tuple[Worker, Manifest]]:
    """Open a worker that stages all that it can, or nothing."""
    cache = geometry.build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "always.json"
        path.write_bytes(encode_calibration(_calibration(ALWAYS, None, devices)))
        config = WorkerConfig(
            engine_id=f"target-{'staged' if staged else 'direct'}",
            calibration=str(path),
            staging_bytes=STAGING_BYTES if staged else 0,
        )
        async with open_worker(config, cache) as worker:
            yield worker, cache.manifest()


def _chosen(source: Manifest, target: Manifest, costs: Calibration) -> str:
    """Return which variant the measured constants choose."""
    plan = plan_transfer(source, target, costs=costs, staging_bytes=STAGING_BYTES)
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
            "chosen: by the constants above; a staged read reads twice the MiB that it delivers.",
        ),
    )


def _written(output: str) -> Table:
    return Table(title="calibration", columns=("file", "use it with"), rows=((output, f"KVFLOW_CALIBRATION={output}"),))
