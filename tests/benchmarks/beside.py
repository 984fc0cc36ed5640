"""kvflow beside what else moves the same bytes between two processes of a machine, and what each of them promises."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvflow.ids import Int64s
from kvflow.tools.bench import Table, median_ratio, summarize, tail
from kvflow.tools.bench.ceilings import BareNixl, CopiedPiece, Streams
from kvflow.tools.bench.pull import LARGE, Session, open_session
from kvflow.tools.bench.source import open_source

Way = Callable[[Int64s, Int64s, int], Awaitable[list[float]]]
"""Reads blocks of the source into ours so many times, one after the other; returns the seconds of each."""

BLOCKS = (64 << 20) // LARGE.block_bytes


class Size(NamedTuple):
    """Reads of one size."""

    title: str
    blocks: int
    reads: int  # in a round
    scattered: bool


SIZES = (
    Size("64 KiB, one by one", 1, 100, True),
    Size("64 MiB, consecutive blocks of 64 KiB", BLOCKS, 1, False),
    Size("64 MiB, random blocks of 64 KiB", BLOCKS, 1, True),
)
BARE, MOONCAKE = "bare NIXL", "Mooncake over TCP"
INSTALL = "pip install mooncake-transfer-engine-non-cuda requests, and apt install libibverbs1"
CHECKOUT = Path(__file__).parents[2]
VLLM = ("-m", "tests.benchmarks.beside_vllm", "--models", "llama", "--in-flight", "1", "--rounds", "3")
CHECKED = "30 s, renewed", "fence", "ticket, ids, layout"
PROMISES = (
    *((name, "none", "none", "none", "no") for name in (BARE, "plain sockets", MOONCAKE)),
    ("NixlConnector in vLLM", "30 s, renewed", "none", "hash of the layout", "no"),
    ("kvflow over NIXL", *CHECKED, "no"),
    ("kvflow over TCP", *CHECKED, "with tcp_encryption: tls"),
)


async def run(rounds: int, seed: int, progress: Callable[[str], None], *, vllm: str | None = None) -> tuple[Table, ...]:
    """Measure every way in rounds that rotate. ``vllm``: Python of an environment with vLLM; empty for none."""
    notes: list[str] = []
    rng = np.random.default_rng(seed)
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_source())
        session = await stack.enter_async_context(open_session("nixl", source, LARGE))
        over_tcp = await stack.enter_async_context(open_session("tcp", source, LARGE, transport="tcp"))
        ways: dict[str, Way] = {
            "kvflow over NIXL": partial(_pull, session),
            "kvflow over TCP": partial(_pull, over_tcp),
        }
        if session.bare is not None:
            ways[BARE] = partial(_read_bare, session.bare)
        if session.streams is not None:
            ways["plain sockets"] = partial(_read_streams, session.streams)
        # Mooncake brings libraries of its own, which must not end this process: it has two others.
        spawn = multiprocessing.get_context("spawn")
        here, there = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in range(2)]
        try:
            ends = [await asyncio.wrap_future(pool.submit(start_mooncake)) for pool in (here, there)]
            ways[MOONCAKE] = partial(_read_mooncake, here, ends)
        except Exception as problem:  # noqa: BLE001  # whatever its libraries raise
            notes.append(f"{MOONCAKE} was not measured: {problem}. To measure it: {INSTALL}.")
        tables = [await _measure(size, ways, rounds, rng, progress) for size in SIZES]
    progress("NixlConnector in vLLM")
    python = str(CHECKOUT / ".venv-vllm/bin/python") if vllm is None else vllm
    notes += await _measure_in_vllm(python)
    columns = ("way", "lease", "after the last byte", "checks", "encrypted")
    return (*tables, Table(title="what each promises", columns=columns, rows=PROMISES, notes=tuple(notes)))


async def _measure(
    size: Size, ways: dict[str, Way], rounds: int, rng: np.random.Generator, progress: Callable[[str], None]
) -> Table:
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    notes = []
    for turn in range(rounds + 1):  # the first one warms up
        progress(f"{size.title}, round {turn} of {rounds}")
        sources, targets = _ids(size, rng), _ids(size, rng)
        for name in [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]:
            try:
                found[name].append(await ways[name](sources, targets, size.reads))
            except Exception as problem:
                if name != MOONCAKE:
                    raise
                notes.append(f"{MOONCAKE} has failed: {problem}")
                del ways[name], found[name]
    medians = {name: [summarize(each).p50 for each in samples[1:]] for name, samples in found.items()}
    rows = []
    for name, samples in found.items():
        p50 = summarize(medians[name]).p50
        ratio = median_ratio(medians[name], medians[BARE]) if BARE in medians else None
        longest = tail([seconds for each in samples[1:] for seconds in each], 1e6)
        rows.append((name, p50 * 1e6, longest, size.blocks * LARGE.block_bytes / p50 / 1e9, ratio))
    columns = ("way", "p50 us", "p99 or max us", "GB/s", "time / bare NIXL")
    return Table(title=f"{size.title}; {rounds} rounds in turns", columns=columns, rows=tuple(rows), notes=tuple(notes))


def _ids(size: Size, rng: np.random.Generator) -> Int64s:
    return rng.permutation(LARGE.num_blocks)[: size.blocks] if size.scattered else np.arange(size.blocks)


async def _pull(session: Session, source_ids: Int64s, target_ids: Int64s, count: int) -> list[float]:
    tickets = await session.offer(source_ids, count=count)
    return [(await session.pull(ticket, target_ids))[0] for ticket in tickets]


async def _read_bare(bare: BareNixl, source_ids: Int64s, target_ids: Int64s, count: int) -> list[float]:
    bound = bare.bind(source_ids, target_ids)
    return [bare.read(bound) for _ in range(count)]


async def _read_streams(streams: Streams, source_ids: Int64s, target_ids: Int64s, count: int) -> list[float]:
    pieces = _pieces(source_ids, target_ids)
    if len(pieces) == 1 < len(source_ids):  # all connections share it
        return [streams.read(pieces[0][2]) for _ in range(count)]
    return [streams.read_pieces(pieces) for _ in range(count)]


def _pieces(source_ids: Int64s, target_ids: Int64s) -> list[CopiedPiece]:
    """Return a piece for each row of blocks that follow each other on both sides."""
    size, breaks = LARGE.block_bytes, np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1)) + 1
    rows = zip(np.split(source_ids, breaks), np.split(target_ids, breaks), strict=True)
    return [(int(sources[0]) * size, int(targets[0]) * size, len(sources) * size) for sources, targets in rows]


_mooncake: dict[str, Any] = {}
"""Engine and memory of this process, if it is one of Mooncake's."""


def start_mooncake() -> tuple[str, int]:
    """Start Mooncake's engine in this process; return its name and the address of its memory."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs there
    from mooncake.engine import TransferEngine

    memory, engine = np.ones(LARGE.num_blocks * LARGE.block_bytes, np.uint8), TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(
        memory.ctypes.data, memory.nbytes
    ):
        raise OSError("its engine does not start")
    _mooncake.update(engine=engine, memory=memory)
    return f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data


def read_by_mooncake(peer: str, pieces: tuple[list[int], ...], count: int) -> list[float]:
    """Read pieces so many times; return the seconds of each. ``pieces``: addresses here and there, and sizes."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        if _mooncake["engine"].batch_transfer_sync_read(peer, *pieces):
            raise OSError("a read failed")
        seconds.append(time.perf_counter() - started)
    return seconds


async def _read_mooncake(
    pool: ProcessPoolExecutor, ends: list[tuple[str, int]], source_ids: Int64s, target_ids: Int64s, count: int
) -> list[float]:
    (_, here), (peer, there) = ends
    pieces = [(here + ours, there + theirs, nbytes) for theirs, ours, nbytes in _pieces(source_ids, target_ids)]
    lists = tuple(map(list, zip(*pieces, strict=True)))
    return await asyncio.wrap_future(pool.submit(read_by_mooncake, peer, lists, count))


async def _measure_in_vllm(python: str) -> list[str]:
    """Have a checkout compare the connectors in vLLM; return what it prints, or why it cannot."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(python, *VLLM, cwd=CHECKOUT, stdout=pipe, stderr=pipe)
    except OSError:
        return ["NixlConnector was not measured: name the Python of an environment with vLLM: --vllm PATH."]
    printed, problems = [text.decode(errors="replace").splitlines() for text in await process.communicate()]
    return [f"NixlConnector was not measured: {problems[-1:]}"] if process.returncode else printed
