"""A mirror has the bytes of a cache's blocks in rows of host memory, and gives back exactly those."""

import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
import torch

from kvflow.errors import CapacityExceeded, SpecInvalid, WorkerClosed, WorkerSuspended
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, FullAttention, Mamba, Opaque, SlidingWindow, State
from kvflow.memory import rows as module
from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate
from kvflow.planning.plan import plan_transfer
from kvflow.worker.mirror import HostMirror

PATIENCE_S = 60.0
NUM_BLOCKS, NUM_ROWS = 13, 5
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")


def attention(cls=FullAttention, **fields):
    return cls(**{"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "float16"} | fields)


HYBRID = {
    "full": attention(),
    "sliding.0": attention(SlidingWindow, window=32),
    "sliding.1": attention(SlidingWindow, window=32),
}
STATES = {
    "full": attention(page_bytes=4096),
    "mamba": Mamba(
        block_size=16,
        states=(State("conv_x", (12, 3), "bfloat16", shard_axis=0), State("ssm", (2, 4, 4), "float32", shard_axis=0)),
        page_bytes=4096,
    ),
}


def layered(count, **fields):
    return {f"layers.{index}": attention(**fields) for index in range(count)}


def kernel_blocks():
    """A block of 32 tokens is two kernel blocks of 16, and heads lie outside of blocks in the second layer."""
    specs = {name: attention(block_size=32, kernel_block_size=16) for name in ("one", "two")}
    one = torch.zeros((2 * NUM_BLOCKS, 4, 16, 16), dtype=torch.float16)
    two = torch.zeros((4, 2 * NUM_BLOCKS, 16, 16), dtype=torch.float16).transpose(0, 1)
    return adopt({"one": one, "two": two}, specs)


def opaque():
    """Pages of bytes with gaps between them."""
    page = Opaque(block_size=16, nbytes=640, arrangement="like_nothing_else")
    return adopt({"page": torch.zeros((NUM_BLOCKS, 1024), dtype=torch.uint8)[:, :640]}, {"page": page})


CACHES = {
    **{
        f"{layout} {kv}": lambda layout=layout, kv=kv: allocate(layered(3), num_blocks=NUM_BLOCKS, layout=layout, kv=kv)
        for layout in LAYOUTS
        for kv in ("content", "split", "block_split")
    },
    **{
        f"hybrid {layout}": lambda layout=layout: allocate(HYBRID, num_blocks=NUM_BLOCKS, layout=layout)
        for layout in LAYOUTS
    },
    **{
        f"states {layout}": lambda layout=layout: allocate(STATES, num_blocks=NUM_BLOCKS, layout=layout)
        for layout in ("LBNHC", "BLHNC")
    },
    "latent": lambda: allocate(
        {
            "mla": MLA(block_size=64, head_size=576, dtype="bfloat16"),
            "index": MLA(block_size=64, head_size=132, dtype="uint8"),
        },
        num_blocks=NUM_BLOCKS,
        layout="LBNHC",
    ),
    "one of two ranks": lambda: allocate(
        layered(2), num_blocks=NUM_BLOCKS, layout="LBHNC", shard=Shard(tp_rank=1, tp_size=2)
    ),
    "kernel blocks": kernel_blocks,
    "opaque": opaque,
}


@pytest.fixture
def mirrors():
    """Makes mirrors, and closes them."""
    made = []

    def mirror(cache, rows=NUM_ROWS):
        one = HostMirror(cache, memory_bytes=cache.num_blocks * cache.bytes_per_block * 2)
        row_bytes = one.cache.bytes_per_block
        one.close()
        made.append(HostMirror(cache, memory_bytes=rows * row_bytes + row_bytes - 1))
        assert made[-1].cache.num_blocks == rows
        return made[-1]

    yield mirror
    for each in made:
        each.close()


def scribble(cache, seed=0):
    """Write other bytes everywhere."""
    draw = torch.Generator().manual_seed(seed)
    for storage in cache.storages:
        storage.copy_(torch.randint(0, 256, (storage.nbytes,), dtype=torch.uint8, generator=draw))


def parts(cache):
    return [
        (group, layer.name, part.role)
        for group, each in enumerate(cache.manifest().groups)
        for layer in each.layers
        for part in layer.components
    ]


def blocks_of(cache, layer, role):
    """A component, blocks first."""
    view = cache.component(layer, role)
    return view if view.shape[0] == cache.num_blocks else view.unflatten(0, (cache.num_blocks, -1))


def erase(cache, named, blocks):
    for layer, role in named:
        view = blocks_of(cache, layer, role)
        for block in blocks:
            view[block] = 0


def element_bytes(cache, layer, role, block):
    """The bytes of one block of a component, whatever its strides."""
    return blocks_of(cache, layer, role)[block].contiguous().flatten().view(torch.uint8).clone()


def wait(future):
    return future.result(timeout=PATIENCE_S)


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lists(cache, group, ids):
    return [ids if index == group else [-1] * len(ids) for index in range(len(cache.groups))]


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20], ids=["a row at a time", "all rows at once"])
@pytest.mark.parametrize("name", CACHES)
def test_blocks_go_to_the_mirror_and_come_back(name, buffer_bytes, mirrors, monkeypatch):
    monkeypatch.setattr(module, "BUFFER_BYTES", buffer_bytes)
    cache = CACHES[name]()
    mirror = mirrors(cache)
    for group in range(len(cache.groups)):
        scribble(cache, group)
        saved, rows, back = [11, 2, 7, 12], [4, 0, 1, 3], [1, 12, 0, 6]
        wait(mirror.save(lists(cache, group, saved), lists(cache, group, rows)))
        mine = [(layer, role) for owner, layer, role in parts(cache) if owner == group]
        for layer, role in mine:
            for block, row in zip(saved, rows, strict=True):
                there = element_bytes(cache, layer, role, block)
                assert torch.equal(element_bytes(mirror.cache, layer, role, row), there), (layer, role)
        expected = {(*each, block): element_bytes(cache, *each, block) for each in mine for block in saved}
        scribble(cache, 100 + group)
        before = [storage.clone() for storage in cache.storages]
        wait(mirror.load(lists(cache, group, rows), lists(cache, group, back)))
        for layer, role in mine:
            for block, target in zip(saved, back, strict=True):
                assert torch.equal(element_bytes(cache, layer, role, target), expected[layer, role, block])
        # Nothing but the elements of those blocks is written.
        erase(cache, mine, back)
        after = [storage.clone() for storage in cache.storages]
        for storage, old in zip(cache.storages, before, strict=True):
            storage.copy_(old)
        erase(cache, mine, back)
        assert all(torch.equal(*each) for each in zip(after, cache.storages, strict=True))


@pytest.fixture
def slow(mirrors, monkeypatch):
    """A mirror whose copies wait for a test, the event that they wait for, and what has begun."""
    begun, may = [], threading.Event()
    cache = CACHES["BLHNC content"]()
    mirror = mirrors(cache)

    def late(name):
        copy = getattr(module.RowCopies, name)

        def copy_late(copies, *arguments):
            begun.append(name)
            assert may.wait(PATIENCE_S)
            copy(copies, *arguments)

        monkeypatch.setattr(module.RowCopies, name, copy_late)

    late("save")
    late("load")
    yield cache, mirror, may, begun
    may.set()


def test_a_copy_waits_for_its_pull(slow):
    _, mirror, may, begun = slow
    may.set()
    pull = Future()
    copy = mirror.load([[0]], [[1]], after=pull)
    mirror.settle()
    assert (begun, copy.done()) == ([], False)
    pull.set_result("a report")
    wait(copy)
    assert begun == ["load"]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_pull_that_brings_nothing_is_not_copied(slow, end):
    _, mirror, may, begun = slow
    may.set()
    pull = Future()
    copy = mirror.load([[0]], [[1]], after=pull)
    if end == "failed":
        pull.set_exception(RuntimeError("the peer is gone"))
    else:
        pull.cancel()
    mirror.settle()
    assert copy.cancelled()
    assert begun == []


def test_a_copy_can_be_cancelled_until_it_begins(slow):
    _, mirror, may, begun = slow
    first, second, third = (mirror.load([[row]], [[row]]) for row in range(3))
    until(lambda: begun)
    assert not first.cancel()
    assert second.cancel()
    may.set()
    wait(third)
    assert wait(first) is None
    with pytest.raises(CancelledError):
        wait(second)
    assert begun == ["load", "load"]


def test_both_directions_go_on_at_once(slow):
    _, mirror, may, begun = slow
    copies = [mirror.load([[0]], [[1]]), mirror.save([[2]], [[3]])]
    until(lambda: len(begun) == 2)
    may.set()
    for copy in copies:
        wait(copy)


def test_a_copy_that_fails_does_not_end_the_next(mirrors):
    mirror = mirrors(CACHES["BLHNC content"]())
    with pytest.raises((IndexError, ValueError)):
        wait(mirror.save([[NUM_BLOCKS]], [[0]]))
    wait(mirror.save([[NUM_BLOCKS - 1]], [[0]]))


def test_a_suspended_mirror_touches_no_memory_until_it_resumes(slow):
    cache, mirror, may, begun = slow
    running = mirror.load([[0]], [[1]])
    until(lambda: begun)
    suspending = threading.Thread(target=mirror.suspend)
    suspending.start()
    assert not running.done()
    may.set()
    suspending.join(PATIENCE_S)
    assert running.done(), "a copy that has begun is waited for"
    before = cache.backing.clone()
    for copy in (mirror.save([[1]], [[0]]), mirror.load([[0]], [[2]])):
        with pytest.raises(WorkerSuspended):
            wait(copy)
    assert begun == ["load"]
    assert torch.equal(cache.backing, before)
    mirror.resume()
    wait(mirror.save([[1]], [[0]]))


def test_a_closed_mirror_copies_nothing(mirrors):
    mirror = mirrors(CACHES["BLHNC content"]())
    pull = Future()
    late = mirror.load([[0]], [[1]], after=pull)
    mirror.close()
    mirror.close()
    pull.set_result(None)
    for copy in (late, mirror.save([[1]], [[0]])):
        with pytest.raises(WorkerClosed):
            wait(copy)


def test_absent_blocks_are_not_copied(slow):
    cache, mirror, may, begun = slow
    may.set()
    before = cache.backing.clone()
    wait(mirror.load([[-1, -1]], [[3, -1]]))
    assert begun == []
    assert torch.equal(cache.backing, before)


def test_a_mirror_has_no_more_blocks_than_its_cache():
    mirror = HostMirror(CACHES["BLHNC content"](), memory_bytes=1 << 30)
    mirror.close()
    assert mirror.cache.num_blocks == NUM_BLOCKS


def test_memory_for_less_than_a_block_names_the_setting():
    with pytest.raises(CapacityExceeded) as refused:
        HostMirror(CACHES["BLHNC content"](), memory_bytes=100)
    assert "host_buffer_bytes" in refused.value.remedy


def test_elements_that_would_not_be_evenly_spaced_are_refused():
    """Heads lie outside of blocks, and a layer lies between the first two of them alone."""
    heads = torch.zeros((4, NUM_BLOCKS, 16, 16), dtype=torch.float16).transpose(0, 1)
    HostMirror(adopt({"one": heads}, {"one": attention()}), memory_bytes=1 << 30).close()
    backing = torch.zeros((9, NUM_BLOCKS, 16, 16), dtype=torch.float16)
    one = backing.as_strided((NUM_BLOCKS, 4, 16, 16), (256, 2 * NUM_BLOCKS * 256, 16, 1))
    two = backing.as_strided((NUM_BLOCKS, 1, 16, 16), (256, 256, 16, 1), NUM_BLOCKS * 256)
    cache = adopt({"one": one, "two": two}, {"one": attention(), "two": attention(num_kv_heads=1)})
    with pytest.raises(SpecInvalid, match="its elements would not be evenly spaced"):
        HostMirror(cache, memory_bytes=1 << 30)


def test_two_mirrors_of_one_layout_need_one_piece_for_each_block(mirrors):
    one, other = (mirrors(CACHES["LBHNC content"]()) for _ in range(2))
    plan = plan_transfer(one.cache.manifest(), other.cache.manifest())
    assert plan.descriptors(num_blocks=3) == 3
