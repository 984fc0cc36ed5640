"""``kvflow bench pull`` and ``descriptors`` with a source that runs: what they read, and what they print."""

import asyncio
import importlib.metadata
import os
import re
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvflow.config import SECRET_VARIABLE
from kvflow.tools.bench import Result, header, pull, source, tail
from kvflow.tools.bench.ceilings import process_vm_readv
from kvflow.tools.bench.pull import open_session
from kvflow.tools.bench.source import SourceProcess
from kvflow.tools.doctor.probe import Geometry
from tests.benchmarks import beside, descriptors
from tests.ports import free_port

pytestmark = [pytest.mark.nixl, pytest.mark.usefixtures("secret")]

SMALL = Geometry(layers=2, num_kv_heads=1, head_size=32, num_blocks=16, layout="BLHNC", kv="content")
"""All bytes of a block lie together, and blocks one after the other."""


@pytest.fixture
def secret(monkeypatch):
    """The cluster secret that both sides take from the environment."""
    monkeypatch.setenv(SECRET_VARIABLE, "the secret of those who measure")


@asynccontextmanager
async def told(running):
    """Serve one reader from a source in this process, whose memory a test can see."""
    sockets = socket.socketpair()
    (reader, writer), (asked, answers) = [await asyncio.open_connection(sock=each, limit=1 << 24) for each in sockets]
    serving = asyncio.create_task(source.serve(running, asked, answers))
    try:
        yield SourceProcess(reader, writer)
    finally:
        writer.close()
        await serving
        answers.close()


@asynccontextmanager
async def listening():
    """Serve readers over the network from a source in this process, and say where."""
    address = f"127.0.0.1:{free_port()}"
    serving = asyncio.create_task(source.serve_network(address))
    host, _, port = address.partition(":")
    while True:
        with suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            break
        await asyncio.sleep(0.01)
    try:
        yield address
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@pytest.mark.parametrize("way", ["kvflow", "bare NIXL", "streams", "process_vm_readv"])
async def test_each_way_of_reading_delivers_the_bytes_of_the_source(monkeypatch, way):
    caches, build = [], Geometry.build
    monkeypatch.setattr(Geometry, "build", lambda self: caches.append(build(self)) or caches[-1])
    async with told(source.WorkerSet("127.0.0.1")) as process, open_session("each", process, SMALL) as session:
        there, here = (cache.backing.numpy() for cache in caches)
        there[:] = np.random.default_rng(0).integers(0, 256, len(there), np.uint8)
        here[:] = 0
        ids, nbytes = np.arange(3), 3 * SMALL.block_bytes
        match way:
            case "kvflow":
                (ticket,) = await session.offer(ids)
                seconds, report = await session.pull(ticket, ids)
                assert report.nbytes == nbytes
            case "bare NIXL":
                seconds = session.bare.read(session.bare.bind(ids, ids))
            case "streams":
                seconds = session.streams.read(nbytes)
            case "process_vm_readv":
                seconds = process_vm_readv(session.opened, session.cache, nbytes)
        assert seconds > 0
        assert (here[:nbytes] == there[:nbytes]).all()
        assert not here[nbytes:].any()


async def test_pairs_of_reads_begin_with_kvflow_and_with_nixl_in_turn():
    async with told(source.WorkerSet("127.0.0.1")) as process, open_session("pairs", process, SMALL) as session:
        order = []
        bare_read, pull_once = session.bare.read, session.pull
        session.bare.read = lambda *arguments: order.append("bare") or bare_read(*arguments)
        session.pull = lambda *arguments: order.append("kvflow") or pull_once(*arguments)
        for _ in range(2):
            ours_s, bare_s, report = await session.paired(np.arange(2), np.array([5, 9]))
            assert min(ours_s, bare_s) > 0
            assert report.nbytes == 2 * SMALL.block_bytes
        assert sorted([order[:2], order[2:]]) == [["bare", "kvflow"], ["kvflow", "bare"]]


async def test_another_pid_namespace_is_not_read_by_the_kernel():
    async with told(source.WorkerSet("127.0.0.1")) as process, open_session("kernel", process, SMALL) as session:
        facts = msgspec.structs.replace(session.opened.facts, pid_namespace="another machine")
        opened = msgspec.structs.replace(session.opened, facts=facts)
        assert process_vm_readv(opened, session.cache, 1) is None


def test_a_variant_of_nixl_alone_is_enough(monkeypatch):
    version = importlib.metadata.version

    def without_the_package(name):
        if name in ("nixl", "nixl-cu12"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_the_package)
    packages = header().packages
    assert "nixl-cu13" in packages
    assert not {"nixl", "nixl-cu12"} & packages.keys()


async def test_what_copies_host_memory_is_not_compared_with_devices(monkeypatch):
    monkeypatch.setattr(pull, "SIZES", (4 << 10,))
    monkeypatch.setattr(source.Devices, "in_host_memory", False)  # as of a GPU; the bytes stay where they are
    speed, _ = await pull.run(5, 0, lambda _: None)
    (row,) = speed.rows
    shown = dict(zip(speed.columns, row, strict=True))
    absent = {name for name, value in shown.items() if value is None}
    assert absent == {"streams GB/s", "readv GB/s", "memcpy GB/s", "of streams"}


async def test_caches_lie_on_the_devices_that_are_named(monkeypatch):
    asked = []
    build = Geometry.build
    monkeypatch.setattr(
        Geometry,
        "build",
        lambda self: asked.append(self.device) or build(msgspec.structs.replace(self, device="cpu")),
    )
    async with told(source.WorkerSet("127.0.0.1")) as process:
        process.devices = source.Devices(here="cuda:1", there="cuda:7")
        async with open_session("devices", process, SMALL) as session:
            assert session.streams is None
    assert asked == ["cuda:7", "cuda:1"]


async def test_every_size_of_a_pull_is_measured_beside_what_else_could_move_it(monkeypatch):
    monkeypatch.setattr(pull, "SIZES", (4 << 10, 16 << 10, 64 << 10))
    monkeypatch.setattr(pull, "LARGE", msgspec.structs.replace(pull.LARGE, num_blocks=4))
    said = []
    tables = await pull.run(5, 0, said.append)
    assert said == ["pull 4 KiB", "pull 16 KiB", "pull 64 KiB"]
    speed, phases = tables
    for table in tables:
        assert [row[0] for row in table.rows] == ["4 KiB", "16 KiB", "64 KiB"]
        assert all(len(row) == len(table.columns) for row in table.rows)
    for row in speed.rows:
        assert row[1] == 5
        assert row[3].startswith("max ")
        assert all(value > 0 for value in (row[2], *row[4:]))
    for row in phases.rows:
        timings = dict(zip(phases.columns[1:], row[1:], strict=True))
        assert 0 <= timings["wire"] < timings["total"]
    printed = str(Result(name="pull", header=header(), tables=tables))
    assert printed.startswith("kvflow bench pull, 20")
    assert all(table.title in printed for table in tables)
    assert re.search(r"^ *16 KiB +5 +\d", printed, re.MULTILINE)


@pytest.fixture
def few(monkeypatch):
    """Have ``kvflow bench descriptors`` measure little."""
    monkeypatch.setattr(descriptors, "LAYERS", {2: 2})
    monkeypatch.setattr(descriptors, "BLOCKS", (1, 4))
    monkeypatch.setattr(descriptors, "POOL_BLOCKS", 8)


@pytest.mark.usefixtures("few")
async def test_direct_and_staged_reads_are_compared_by_count_and_order_of_blocks():
    said = []
    async with listening() as address:
        (compared,) = await descriptors.run(2, 0, said.append, address)
    found = [dict(zip(compared.columns, row, strict=True)) for row in compared.rows]
    assert [(row["blocks"], row["ids"]) for row in found] == [
        (blocks, ids) for blocks in (1, 4) for ids in ("apart", "in order")
    ]
    for row in found:
        assert row["staged descriptors"] < row["direct descriptors"]
        assert row["scatter ms"] > 0
    assert "2 heads, 4 blocks in order, round 2 of 2" in said


@pytest.mark.parametrize(("direct_s", "staged_s"), [(0.0, 0.0), (1e-3, 1e-3), (1e-3, 0.0)])
def test_two_ways_of_reading_are_compared_or_nothing(direct_s, staged_s):
    reports = tuple(SimpleNamespace(timings_s={"scatter": scatter_s}) for scatter_s in (direct_s, staged_s))
    with pytest.raises(AssertionError, match="read directly and staged"):
        descriptors._require_both(SimpleNamespace(reports=reports))


@pytest.fixture
def brief(monkeypatch):
    """Have ``kvflow bench beside`` measure little, and without vLLM."""
    sizes = [beside.Size("one", 1, 3, True), beside.Size("a row", 4, 1, False), beside.Size("several", 4, 1, True)]
    monkeypatch.setattr(beside, "SIZES", sizes)
    monkeypatch.setattr(beside, "LARGE", msgspec.structs.replace(beside.LARGE, num_blocks=16))
    return partial(beside.run, 2, 0, lambda _: None, vllm="no such Python")


OURS = ["kvflow over NIXL", "kvflow over TCP", "bare NIXL", "plain sockets"]


async def test_kvflow_is_compared_with_what_is_there(brief, monkeypatch):
    monkeypatch.setattr(beside, "start_mooncake", missing_mooncake)
    *sizes, promises = await brief()
    assert [table.title for table in sizes] == [f"{name}; 2 rounds in turns" for name in ("one", "a row", "several")]
    for table in sizes:
        assert [row[0] for row in table.rows] == OURS
        found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert all(row["p50 us"] > 0 and row["GB/s"] > 0 and row["p99 or max us"].startswith("max ") for row in found)
        assert found[2]["time / bare NIXL"] == 1
    assert {*OURS, beside.MOONCAKE} < {row[0] for row in promises.rows}
    mooncake, vllm = promises.notes
    assert mooncake == f"Mooncake over TCP was not measured: No library. To measure it: {beside.INSTALL}."
    assert vllm.startswith("NixlConnector was not measured: name the Python of an environment with vLLM: --vllm")


def missing_mooncake():
    raise ImportError("No library")


async def test_a_mooncake_that_crashes_ends_its_rows_alone(brief, monkeypatch):
    monkeypatch.setattr(beside, "start_mooncake", started_mooncake)
    monkeypatch.setattr(beside, "read_by_mooncake", crashing_mooncake)
    first, *others, _ = await brief()
    assert [row[0] for row in first.rows] == OURS
    assert first.notes[0].startswith("Mooncake over TCP has failed: A process in the process pool was terminated")
    assert all([row[0] for row in table.rows] == OURS and not table.notes for table in others)


def started_mooncake():
    return "127.0.0.1:1", 0


def crashing_mooncake(*_):
    os._exit(11)


@pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is not installed")
async def test_mooncake_is_compared_where_it_is_installed(brief):
    *sizes, promises = await brief()
    assert all([row[0] for row in table.rows] == [*OURS, beside.MOONCAKE] for table in sizes)
    assert len(promises.notes) == 1


def test_pieces_are_rows_of_blocks_that_follow_each_other_on_both_sides():
    size = beside.LARGE.block_bytes
    pieces = beside._pieces(np.array([4, 5, 6, 8, 9]), np.array([0, 1, 7, 8, 9]))
    assert pieces == [(4 * size, 0, 2 * size), (6 * size, 7 * size, size), (8 * size, 8 * size, 2 * size)]


async def test_plain_sockets_read_pieces_to_where_they_belong(monkeypatch):
    caches, build = [], Geometry.build
    monkeypatch.setattr(Geometry, "build", lambda self: caches.append(build(self)) or caches[-1])
    async with told(source.WorkerSet("127.0.0.1")) as process, open_session("pieces", process, SMALL) as session:
        there, here = (cache.backing.numpy() for cache in caches)
        there[:] = np.random.default_rng(0).integers(0, 256, len(there), np.uint8)
        for pieces in ([(10, 700, 50)], [(10, 700, 50), (300, 0, 40), (0, 500, 7)]):
            here[:] = 0
            assert session.streams.read_pieces(pieces) > 0
            expected = np.zeros_like(here)
            for first, target, nbytes in pieces:
                expected[target : target + nbytes] = there[first : first + nbytes]
            assert (here == expected).all()


@pytest.mark.parametrize(("count", "shown"), [(999, "max 999.00"), (1000, "p99 991.00")])
def test_only_many_samples_have_a_percentile(count, shown):
    assert tail([number / 1e6 for number in range(1, count + 1)], 1e6) == shown
