"""Latency and throughput of one pull by size, with the fence, by phase, beside what else could move the bytes."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import numpy as np

from kvflow.planning.bind import Bound
from kvflow.report import PHASES, TransferReport
from kvflow.tools.bench.ceilings import BareNixl, handed_over, memcpy, process_vm_readv
from kvflow.tools.bench.geometry import HOST, Devices, Geometry
from kvflow.tools.bench.result import Table
from kvflow.tools.bench.session import Session, open_session
from kvflow.tools.bench.sourcing import open_source
from kvflow.tools.bench.stats import median_ratio, summarize

KIB = 1024
SMALL = Geometry(layers=1, num_kv_heads=1, head_size=32, num_blocks=1 << 10, layout="BLHNC", kv="content")
"""Blocks of 2 KiB, for sizes below 64 KiB."""
LARGE = Geometry(layers=4, num_kv_heads=2, head_size=128, num_blocks=1 << 12, layout="BLHNC", kv="content")
"""Blocks of 64 KiB; the pool is 256 MiB."""

SIZES = tuple(4 * KIB << shift for shift in range(0, 17, 2))
"""4 KiB to 256 MiB in steps of four."""

BUDGET_S = 3.0
"""Time for the rounds of one size: many of a small one, at least five of a large one."""


async def run(
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
    source_address: str | None = None,
    *,
    devices: Devices = HOST,
) -> tuple[Table, ...]:
    """Measure every size.

    Args:
        rounds: the most rounds of one size.
        seed: unused; ids are consecutive.
        progress: is told what is measured.
        source_address: ``host:port`` of a source process that runs already; None starts one.
        devices: that the caches lie on.
    """
    del seed
    speed: list[tuple[object, ...]] = []
    phases: list[tuple[object, ...]] = []
    for geometry, sizes in ((SMALL, [size for size in SIZES if size < 64 * KIB]), (LARGE, SIZES[2:])):
        with ThreadPoolExecutor(1) as thread:
            async with (
                open_source(source_address, devices) as source,
                open_session("pull", source, geometry) as session,
            ):
                for size in sizes:
                    progress(f"pull {_name(size)}")
                    one_speed, one_phases = await _measure(session, size, geometry.block_bytes, rounds, thread)
                    speed.append(one_speed)
                    phases.append(one_phases)
    return (
        Table(
            title="one pull of consecutive blocks, with its fence",
            columns=(
                "size",
                "rounds",
                "p50 us",
                "p99 us",
                "floor us",
                "GB/s",
                "bare NIXL GB/s",
                "streams GB/s",
                "readv GB/s",
                "memcpy GB/s",
                "of bare",
                "of streams",
            ),
            rows=tuple(speed),
            notes=(
                "of bare: bare NIXL's time over ours, round by round; bare NIXL reads no fence.",
                "bare NIXL, floor: - where NIXL does not reach the other process; its own TCP is never used.",
                "streams: plain TCP, as many connections as the TCP plane has, with a thread for each on both sides.",
                "floor: another thread reads the same and eight bytes more with bare NIXL, and wakes the event loop.",
                "streams, readv, memcpy: - unless both caches lie in host memory.",
                "readv: - if the two processes share no PID namespace; the kernel copies only within one.",
            ),
        ),
        Table(
            title="phases, median us",
            columns=("size", *PHASES, "total"),
            rows=tuple(phases),
        ),
    )


async def _measure(
    session: Session, size: int, block_bytes: int, rounds: int, thread: Executor
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    ids = np.arange(size // block_bytes)
    await session.paired(ids, ids)
    ours: list[float] = []
    bare: list[float | None] = []
    streams: list[float] = []
    readv: list[float | None] = []
    copied: list[float] = []  # and the three of them empty unless both caches lie in host memory
    floor: list[float] = []
    reports: list[TransferReport] = []
    bare_read = None if session.bare is None else partial(_read_and_look, session.bare, session.bare.bind(ids, ids))
    until = time.perf_counter() + BUDGET_S
    while len(ours) < 5 or (len(ours) < rounds and time.perf_counter() < until):
        one, other, report = await session.paired(ids, ids)
        ours.append(one)
        bare.append(other)
        if bare_read is not None:
            floor.append(await handed_over(bare_read, thread))
        if session.streams is not None:
            streams.append(session.streams.read(size))
            readv.append(process_vm_readv(session.opened, session.cache, size))
            copied.append(memcpy(size))
        reports.append(report)
    summary = summarize(ours)
    rates = [_rate(size, samples) for samples in (ours, bare, streams, readv, copied)]
    found = [sample for sample in bare if sample is not None]
    medians = [summarize([report.timings_s[phase] for report in reports]).p50 * 1e6 for phase in (*PHASES, "total")]
    name = _name(size)
    return (
        (
            name,
            len(ours),
            summary.p50 * 1e6,
            summary.p99 * 1e6,
            summarize(floor).p50 * 1e6 if floor else None,
            *rates,
            median_ratio(found, ours) if found else None,
            median_ratio(streams, ours) if streams else None,
        ),
        (name, *medians),
    )


def _read_and_look(bare: BareNixl, bound: Bound) -> None:
    bare.read(bound)
    bare.read_word()


def _rate(size: int, samples: Sequence[float | None]) -> float | None:
    """Return the median rate in 10**9 bytes per second, or None if that cannot be measured here."""
    seconds = [sample for sample in samples if sample is not None]
    return size / summarize(seconds).p50 / 1e9 if seconds else None


def _name(size: int) -> str:
    return f"{size // KIB} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
