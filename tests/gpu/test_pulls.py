"""Pulls between two processes whose caches lie on the host or on a GPU: right bytes, and no late ones."""

import random
import threading

import msgspec
import pytest
import torch

from kvflow.errors import StaleLease
from kvflow.events import PeerMeasured, TransferRetried
from kvflow.tools.doctor.probe import Geometry

from .memory import PACKED, build, fill, pattern, rows
from .reading import PATIENCE_S, reading

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

ROUNDS = {"cpu": 12, "cuda": 300}
SOURCES, TARGETS = list(range(0, 64, 2)), list(range(31, -1, -1))
ENGINES = 0xA5
"""What an engine writes into blocks that it reuses."""

LAYOUTS = {
    "packed": (PACKED, PACKED),
    "per layer": (msgspec.structs.replace(PACKED, layout="LBNHC", kv="split"),) * 2,
    "half of the heads": (
        msgspec.structs.replace(PACKED, layout="LBNHC", kv="split"),
        msgspec.structs.replace(PACKED, layout="LBHNC", tp_size=2),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_arrives(devices, name):
    theirs, ours = LAYOUTS[name]
    with reading(devices, theirs=theirs, ours=ours) as (source, worker, cache):
        source.pattern_now()
        ticket = source.offer("request", SOURCES)
        report = worker.pull(ticket, [TARGETS]).result(PATIENCE_S)
        assert report.plane == "nixl"
        expected = build(theirs, "cpu")
        expected.backing.copy_(pattern(expected.backing.numel()))
        for layer in expected.views:
            for role in ("k", "v"):
                there, here = expected.component(layer, role), cache.component(layer, role).cpu()
                heads = slice(0, here.shape[1])
                assert torch.equal(here[TARGETS].view(torch.int16), there[SOURCES][:, heads].view(torch.int16))
        untouched = [block for block in range(64) if block not in TARGETS]
        assert (cache.component("layers.0", "k")[untouched].view(torch.int16) == 0x0101).all()


def test_no_read_delivers_what_a_kernel_writes_after_the_lease(device):
    draw = random.Random(1)
    delivered = stale = 0
    large = msgspec.structs.replace(PACKED, num_blocks=256)
    blocks = list(range(200))  # 13 MiB
    with reading([device, device], theirs=large, ours=large) as (source, worker, cache):
        source.fill_now(blocks=blocks, value=0)
        for version in range(ROUNDS[device]):
            ticket = source.offer(f"request-{version}", blocks)
            patient = version % 2 == 0
            if not patient:
                told = {"request": f"request-{version}", "blocks": blocks, "value": version + 1}
                recycling = source.begin("recycle", **told, delay_s=draw.uniform(0, 3e-3))
            fill(cache, blocks, ENGINES)
            pull = worker.pull(ticket, [blocks])
            try:
                pull.result(PATIENCE_S)
            except StaleLease:
                stale += 1
            else:
                delivered += 1
                assert (rows(cache)[blocks] == version).all()
            if patient:
                source.fill_now(blocks=blocks, value=version + 1)
            else:
                recycling.result(PATIENCE_S)
    assert delivered >= ROUNDS[device] // 2
    assert stale > 0


@pytest.mark.parametrize("behind_event", [True, False])
def test_a_write_that_is_queued_is_read_only_behind_its_event(device, behind_event):
    retried = threading.Event()

    def hook(event):
        if isinstance(event, TransferRetried):
            retried.set()

    blocks = list(range(8))
    with reading([device, device], hooks=[hook]) as (source, worker, cache):
        source.fill_now(blocks=blocks, value=1)
        ticket = source.offer("late", blocks, "offer_late", value=2, behind_event=behind_event)
        pull = worker.pull(ticket, [blocks])
        if behind_event:
            assert retried.wait(PATIENCE_S), "it was read before it was admitted"
            source.release_now()
            assert pull.result(PATIENCE_S).early > 0
            assert (rows(cache)[blocks] == 2).all()
        else:  # or the test above could not fail
            pull.result(PATIENCE_S)
            assert (rows(cache)[blocks] == 1).all()
            source.release_now()


def test_nothing_is_written_after_a_worker_was_closed(device):
    size = 1024 if device == "cpu" else 65536  # 64 MiB, 4 GiB
    large = msgspec.structs.replace(PACKED, num_blocks=size)
    blocks = list(range(size))
    with reading([device, device], theirs=large, ours=large) as (source, worker, cache):
        source.fill_now(blocks=[0], value=3)
        worker.pull(source.offer("first", [0]), [[0]]).result(PATIENCE_S)  # connects
        pull = worker.pull(source.offer("second", blocks), [blocks])
        worker.close()
        fill(cache, blocks, ENGINES)
        source.go()  # nothing can come now
        assert (cache.backing == ENGINES).all()
        assert pull.done()


def test_the_rate_between_the_memories_is_told(devices):
    measured = threading.Event()
    told = []

    def hook(event):
        if isinstance(event, PeerMeasured):
            told.append(event)
            measured.set()

    large = Geometry(layers=4, num_kv_heads=8, head_size=128, num_blocks=256, layout="BLHNC", kv="content")
    blocks = list(range(256))  # 64 MiB
    with reading(devices, theirs=large, ours=large, hooks=[hook]) as (source, worker, _):
        for number in range(2):
            worker.pull(source.offer(f"request-{number}", blocks), [blocks]).result(PATIENCE_S)
        assert measured.wait(PATIENCE_S)
    (rate,) = told
    memories = {"cpu": "DRAM", "cuda": "VRAM"}
    assert [rate.source_memory, rate.target_memory] == [memories[each] for each in devices]
    assert rate.gb_per_s > 0
