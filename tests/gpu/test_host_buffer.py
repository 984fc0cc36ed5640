"""A mirror in pinned host memory: every byte goes there and back, beside kernels that run."""

import pytest
import torch

from kvflow.worker.mirror import HostMirror

from .memory import PACKED, LateWrite, build, fill, pattern, rows, settle

PATIENCE_S = 120.0


@pytest.fixture
def mirrored(device):
    """A cache with a pattern, and its mirror."""
    cache = build(PACKED, device)
    cache.backing.copy_(pattern(cache.backing.numel()))
    settle(cache)
    mirror = HostMirror(cache, memory_bytes=48 * cache.bytes_per_block)
    yield cache, mirror
    mirror.close()


def test_blocks_go_to_host_memory_and_come_back(mirrored):
    cache, mirror = mirrored
    assert mirror.cache.backing.device.type == "cpu"
    assert not cache.backing.is_cuda or mirror.cache.backing.is_pinned()
    blocks, there = list(range(63, 15, -1)), list(range(48))
    expected = rows(cache)[blocks].cpu()
    mirror.save([blocks], [there]).result(timeout=PATIENCE_S)
    assert torch.equal(rows(mirror.cache), expected)
    fill(cache, blocks, 0xEE)
    mirror.load([there], [blocks]).result(timeout=PATIENCE_S)
    assert torch.equal(rows(cache)[blocks].cpu(), expected)


def test_a_copy_waits_for_no_kernel_of_the_engine(mirrored):
    cache, mirror = mirrored
    expected = rows(cache)[[2, 3]].clone()
    settle(cache)
    late = LateWrite(cache, [1], 0x11)
    mirror.save([[2, 3]], [[0, 1]]).result(timeout=PATIENCE_S)
    mirror.load([[0, 1]], [[4, 5]]).result(timeout=PATIENCE_S)
    assert not late.is_over()
    late.release()
    settle(cache)
    assert torch.equal(rows(cache)[[4, 5]], expected)
    assert (rows(cache)[1] == 0x11).all()


def test_a_kernel_after_a_load_sees_its_bytes(mirrored):
    cache, mirror = mirrored
    mirror.save([[7]], [[0]]).result(timeout=PATIENCE_S)
    expected = rows(cache)[7].clone()
    for _ in range(100):
        fill(cache, [8], 0)
        mirror.load([[0]], [[8]]).result(timeout=PATIENCE_S)
        assert torch.equal(rows(cache)[8], expected)
