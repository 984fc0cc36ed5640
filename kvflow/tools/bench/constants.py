"""Measure the five constants of the cost model: what kvflow itself takes to read and to scatter here.

Reads are pulls through two workers, with ids apart so that nothing merges. Copies are carried out by the transport's
own code. Of the rounds of each size the fastest tenth counts, because neighbors only add. Constants are fitted by least
squares of the relative error, so that small sizes count as much as large ones.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvflow.layout.region import Region
from kvflow.memory.cache import KVCache
from kvflow.planning.costs import Costs
from kvflow.planning.strided_copies import AXES_MAX, FIXED
from kvflow.reads.bounds import CheckedScatter
from kvflow.reads.staging import StagingMemory, evenly_spaced
from kvflow.tools.bench.ceilings import enter_device
from kvflow.tools.bench.geometry import Geometry
from kvflow.tools.bench.result import Table
from kvflow.tools.bench.session import open_session
from kvflow.tools.bench.sourcing import SourceProcess
from kvflow.tools.bench.stats import summarize

READS = {(1, 32): 1024, (2, 64): 4096, (4, 128): 16384, (8, 256): 65536}
"""KV heads and head size of one layer -> bytes of a block, K and V: two descriptors of half as much."""

COUNTS = (256, 1024)
"""Blocks of one pull; twice as many descriptors."""

READ_BYTES_MAX = 32 << 20
"""Of one pull: more says nothing new, and takes longer."""

COPIES = ((1, 64), (1, 4096), (16, 65536), (256, 256), (1024, 64), (1024, 1024), (256, 4096))
"""Pieces of one copy, and bytes of each."""

STAGING_BYTES = 64 << 20
"""As a worker has by default: buffers of 8 MiB."""

TARGET = Geometry(layers=4, num_kv_heads=8, head_size=128, num_blocks=256, layout="LBNHC", kv="split")
"""Where copies go: 64 MiB, more than a cache of the processor holds."""

UNITS_MAX = 512
"""In one measurement."""


class Measured(Struct, frozen=True):
    """Constants, and what they were fitted to."""

    costs: Costs
    tables: tuple[Table, ...]


async def measure_reads(
    source: SourceProcess, rounds: int, rng: np.random.Generator, progress: Callable[[str], None]
) -> tuple[list[tuple[int, int]], list[float], Table]:
    """Measure reads from a source process.

    Args:
        source: where to read from.
        rounds: of each size.
        rng: of block ids.
        progress: is told what is measured.

    Returns:
        Descriptors and bytes of each size, its seconds, and a table of both.
    """
    counted, seconds = await _reads(source, rounds, rng, progress)
    rows = [
        (descriptors, nbytes // descriptors, took * 1e3, took / descriptors * 1e6, nbytes / took / 1e9)
        for (descriptors, nbytes), took in zip(counted, seconds, strict=True)
    ]
    return counted, seconds, _read_table(rows)


async def measure(
    source: SourceProcess, rounds: int, rng: np.random.Generator, progress: Callable[[str], None]
) -> Measured:
    """Measure reads from a source process, then copies here.

    Args:
        source: where to read from.
        rounds: of each size.
        rng: of block ids.
        progress: is told what is measured.
    """
    counted, read_s, reads = await measure_reads(source, rounds, rng, progress)
    reading = fit([(1, descriptors, nbytes) for descriptors, nbytes in counted], read_s)
    copied, copy_s = [], []
    memory = copy_memory(source.devices.here)
    for pieces, nbytes in COPIES:
        progress(f"copies of {pieces} x {nbytes} bytes")
        copies, units, seconds = _copies(memory, pieces, nbytes, rounds, rng)
        copied.append((copies, units * pieces, units * pieces * nbytes))
        copy_s.append(seconds)
    copying = fit(copied, copy_s)
    costs = Costs(
        descriptor_s=reading[1],
        read_byte_s=reading[2],
        copy_s=copying[0],
        piece_s=copying[1],
        copied_byte_s=copying[2],
    )
    scatters = [
        (copies, pieces, total // pieces, seconds / copies * 1e6, total / seconds / 1e9)
        for (copies, pieces, total), seconds in zip(copied, copy_s, strict=True)
    ]
    return Measured(costs, (reads, _copy_table(scatters), _constants(costs)))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return what one of each thing costs, none of it negative.

    Args:
        rows: how many of each thing one measurement had.
        seconds: what it took.
    """
    weights = 1 / np.array(seconds)
    matrix = np.array(rows, float) * weights[:, None]
    scale = np.abs(matrix).max(axis=0)
    kept = list(range(matrix.shape[1]))
    while kept:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]  # what seems to cost less than nothing is lost in the noise
    costs = [0.0] * matrix.shape[1]
    for index, value in zip(kept, (found / scale[kept]).tolist() if kept else [], strict=True):
        costs[index] = value
    return costs


def copy_memory(device: str = "cpu") -> tuple[StagingMemory, KVCache]:
    """Return staging buffers and a cache on a device, all of whose pages were touched."""
    cache = replace(TARGET, device=device).build()
    staging = StagingMemory(STAGING_BYTES)
    enter_device(cache.manifest().regions)
    staging.place(cache.manifest().regions)
    staging.content(0)[:] = 1
    return staging, cache


async def _reads(
    source: SourceProcess, rounds: int, rng: np.random.Generator, progress: Callable[[str], None]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Pull blocks of several sizes; return descriptors and bytes, and seconds, of each."""
    counted, seconds = [], []
    async with AsyncExitStack() as stack:
        for (heads, head_size), block_bytes in READS.items():
            geometry = Geometry(
                layers=1, num_kv_heads=heads, head_size=head_size // 2, num_blocks=2048, layout="LBNHC", kv="split"
            )
            assert geometry.block_bytes == block_bytes
            session = await stack.enter_async_context(open_session(f"read-{block_bytes}", source, geometry))
            for blocks in COUNTS:
                if blocks * block_bytes > READ_BYTES_MAX:
                    continue
                progress(f"reads of {2 * blocks} x {block_bytes // 2} bytes")
                samples = []
                for _ in range(rounds):
                    source_ids, target_ids = (rng.permutation(geometry.num_blocks)[:blocks] for _ in range(2))
                    (ticket,) = await session.offer(source_ids)
                    _, report = await session.pull(ticket, target_ids)
                    samples.append(report.timings_s["post"] + report.timings_s["wire"])
                    descriptors = report.descriptors
                counted.append((descriptors, blocks * block_bytes))
                seconds.append(summarize(samples).p10)
    await source.close_caches()
    return counted, seconds


def _copies(
    memory: tuple[StagingMemory, KVCache], pieces: int, nbytes: int, rounds: int, rng: np.random.Generator
) -> tuple[int, int, float]:
    """Scatter units of pieces that lie apart in a buffer; return copies, units and seconds.

    Args:
        memory: staging buffers and a cache. What a page costs depends on where it comes from, so these are real ones.
        pieces: of one unit.
        nbytes: of each.
        rounds: at least five are made.
        rng: of units, new ones in each round: a transfer writes where nothing was read before.
    """
    staging, target = memory[0], memory[1].manifest().regions[0]
    content = staging.content(0)
    units = min(UNITS_MAX, len(content) // (2 * pieces * nbytes))
    in_all = target.nbytes // (pieces * nbytes)
    scatterer = staging.scatterer(_one_box(target, (units, in_all), pieces, nbytes))
    samples = []
    for _ in range(max(rounds, 5)):
        numbers = rng.permutation(in_all)[:units].astype(np.int32)
        started = time.perf_counter()
        scattering = scatterer.start(content, numbers)
        while scattering is not None and not scattering.poll():
            pass
        samples.append(time.perf_counter() - started)
    copies = units  # a kernel copies all of them, and what its launch takes is divided among them
    if staging.memory == "DRAM":
        copies = sum(1 for _ in evenly_spaced(numbers.tolist()))  # two neighbors at any distance are one copy
    return copies, units, summarize(samples).p10


def _one_box(target: Region, units: tuple[int, int], pieces: int, nbytes: int) -> CheckedScatter:
    """Describe one copy to a unit: its pieces touch in the target, and lie apart in the buffer."""
    unit_bytes = pieces * nbytes
    axes = [pieces, 2 * nbytes, nbytes, *[1, 0, 0] * (AXES_MAX - 1)]
    row = [nbytes, 0, 2 * unit_bytes, target.address, unit_bytes, 0, 0, *axes]
    assert len(row) == FIXED + 3 * AXES_MAX
    return CheckedScatter(
        table=np.array([row], np.int64),
        places=units[0],
        units=(units[1], 1, 1),
        reach=np.array([target.nbytes], np.int64),
        unit_bytes=unit_bytes,
        fetch_runs=1,
        source_units=units[0],
    )


def _read_table(rows: list[tuple[int, int, float, float, float]]) -> Table:
    return Table(
        title="reads: pulls of descriptors that do not merge, fastest tenth of the rounds",
        columns=("descriptors", "bytes each", "ms", "us each", "GB/s"),
        rows=tuple(rows),
    )


def _copy_table(rows: list[tuple[int, int, int, float, float]]) -> Table:
    return Table(
        title="copies from a staging buffer, fastest tenth of the rounds",
        columns=("copies", "pieces", "bytes each", "us per copy", "GB/s"),
        rows=tuple(rows),
    )


def _constants(costs: Costs) -> Table:
    rows = (
        ("a descriptor", costs.descriptor_s * 1e9),
        ("a KiB that is read", costs.read_byte_s * 1e9 * 1024),
        ("a copy", costs.copy_s * 1e9),
        ("a piece of a copy", costs.piece_s * 1e9),
        ("a KiB that is copied", costs.copied_byte_s * 1e9 * 1024),
    )
    return Table(title="constants of the cost model", columns=("of", "ns"), rows=rows)
