"""Packed against per-layer: the geometry of vLLM's pull request 33339, through ``pull``.

28 layers with split K and V: 56 descriptors for one block of 16 tokens when each layer has a tensor of its own,
one when a block of all layers is one row.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import numpy as np
from msgspec import Struct

from kvflow.ids import Int64s
from kvflow.tools.bench import Table, median_ratio, summarize
from kvflow.tools.bench.pull import Session, open_session
from kvflow.tools.bench.source import HOST, Devices, SourceProcess, open_source
from kvflow.tools.doctor.probe import Geometry

LAYERS = 28
HEAD_SIZE = 128
HALF_PAGES = {8192: 2, 16384: 4, 32768: 8}
"""Bytes of the keys of one layer in one block -> KV heads."""

BLOCKS = (1, 63, 607)
"""Blocks of a prompt of 16, 1,008 and 9,712 tokens."""

POOL_BLOCKS = 704
VARIANTS = {"per-layer": ("LBNHC", "split"), "packed": ("BLNHC", "split")}


class _Cell(Struct):
    """One variant's rounds for one number of blocks."""

    ours: list[float]
    bare: list[float]
    descriptors: int = 0


async def run(rounds: int, seed: int, progress: Callable[[str], None], devices: Devices = HOST) -> tuple[Table, ...]:
    """Measure every combination in paired, interleaved rounds."""
    rng = np.random.default_rng(seed)
    tables = []
    for half_page, heads in HALF_PAGES.items():
        rows: list[tuple[object, ...]] = []
        async with open_source(None, devices) as source:
            for ids in ("consecutive", "random"):
                cells = await _measure(source, heads, rounds, rng if ids == "random" else None, progress)
                rows += _rows(cells, ids, half_page)
        tables.append(_table(half_page, rows, rounds))
    return tuple(tables)


async def _measure(
    source: SourceProcess,
    heads: int,
    rounds: int,
    rng: np.random.Generator | None,
    progress: Callable[[str], None],
) -> dict[tuple[int, str], _Cell]:
    cells: dict[tuple[int, str], _Cell] = defaultdict(lambda: _Cell([], []))
    async with AsyncExitStack() as stack:
        sessions = {
            name: await stack.enter_async_context(open_session(name, source, _geometry(heads, *form)))
            for name, form in VARIANTS.items()
        }
        for turn in range(rounds):
            for blocks in BLOCKS:
                progress(f"{heads} heads, {blocks} blocks, round {turn + 1} of {rounds}")
                await _round(sessions, cells, blocks, rng)
    await source.close_caches()
    return cells


async def _round(
    sessions: Mapping[str, Session],
    cells: Mapping[tuple[int, str], _Cell],
    blocks: int,
    rng: np.random.Generator | None,
) -> None:
    source_ids, target_ids = _ids(blocks, rng), _ids(blocks, rng)
    for name, session in sessions.items():
        ours, bare, report = await session.paired(source_ids, target_ids)
        cell = cells[blocks, name]
        assert bare is not None, "NIXL does not reach a process of this machine"
        cell.ours.append(ours)
        cell.bare.append(bare)
        cell.descriptors = report.descriptors


def _ids(blocks: int, rng: np.random.Generator | None) -> Int64s:
    return np.arange(blocks) if rng is None else rng.permutation(POOL_BLOCKS)[:blocks]


def _geometry(heads: int, layout: str, kv: str) -> Geometry:
    return Geometry(
        layers=LAYERS, num_kv_heads=heads, head_size=HEAD_SIZE, num_blocks=POOL_BLOCKS, layout=layout, kv=kv
    )


def _rows(cells: Mapping[tuple[int, str], _Cell], ids: str, half_page: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for blocks in BLOCKS:
        per_layer, packed = cells[blocks, "per-layer"], cells[blocks, "packed"]
        nbytes = blocks * LAYERS * 2 * half_page
        for name, cell in (("per-layer", per_layer), ("packed", packed)):
            ours = summarize(cell.ours)
            rows.append(
                (
                    ids,
                    blocks,
                    name,
                    cell.descriptors,
                    ours.p50 * 1e3,
                    ours.p10 * 1e3,
                    ours.p90 * 1e3,
                    nbytes / ours.p50 / 1e9,
                    nbytes / summarize(cell.bare).p50 / 1e9,
                    median_ratio(cell.bare, cell.ours),
                    median_ratio(per_layer.ours, cell.ours),
                    median_ratio(per_layer.bare, cell.bare),
                )
            )
    return rows


def _table(half_page: int, rows: list[tuple[object, ...]], rounds: int) -> Table:
    return Table(
        title=f"half pages of {half_page // 1024} KiB, 28 layers, {rounds} paired rounds",
        columns=(
            "ids",
            "blocks",
            "layout",
            "descriptors",
            "pull ms",
            "p10",
            "p90",
            "GB/s",
            "bare GB/s",
            "of bare",
            "x per-layer",
            "bare x",
        ),
        rows=tuple(rows),
        notes=(
            "of bare: bare NIXL's time over ours.",
            "x per-layer: how many times faster than per-layer; bare x: the same of bare NIXL, the most there is.",
        ),
    )
