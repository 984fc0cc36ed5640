"""Copies by torch on tensors of the host do what NumPy's copies do, whatever the widths and strides."""

import numpy as np
import pytest
import torch

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.memory.device import TorchStage, torch_stage_of
from kvflow.planning.staging import AXES_MAX, FIXED
from kvflow.reads.bounds import CheckedScatter
from kvflow.reads.staging import Scatterer, _axes

SLOTS = 6


def scatter_of(draw, address, piece):
    """Return two copies of units with pieces on two axes, of three blocks with two kernel blocks of four units."""
    units = (3, 2, 4)
    rows, first = [], 0
    for _ in range(2):
        count, layers = draw.integers(1, 4, 2).tolist()
        unit = count * layers * piece
        axes = [(layers, SLOTS * count * piece, piece), (count, piece, layers * piece)]
        axes = [number for axis in [*axes, *[(1, 0, 0)] * (AXES_MAX - 2)] for number in axis]
        steps = [8 * unit, 4 * unit, unit]
        rows.append([piece, first * 16, count * piece, address + first * 16, *steps, *axes])
        first += -(-units[0] * 8 * unit // 16)
    reach = [24 * row[6] for row in rows]
    return CheckedScatter(
        table=np.array(rows, np.int64),
        places=SLOTS,
        units=units,
        reach=np.array(reach, np.int64),
        unit_bytes=0,
        fetch_runs=1,
        source_units=SLOTS,
    )


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 6, 8, 16, 24, 56])
@pytest.mark.parametrize("seed", range(4))
def test_torch_copies_what_numpy_copies(piece, seed):
    draw = np.random.default_rng(seed)
    content = torch.from_numpy(draw.integers(0, 256, 1 << 16, dtype=np.uint8))
    stage = TorchStage(content, [target := torch.full((1 << 17,), 0xEE, dtype=torch.uint8)])
    checked = scatter_of(draw, target.data_ptr(), piece)
    expected = target.numpy().copy()
    shifted = checked.table.copy()
    shifted[:, 3] += expected.ctypes.data - target.data_ptr()
    numbers = draw.permutation(24)[:SLOTS].astype(np.int32)
    half = 1 << 15
    like = CheckedScatter(shifted, SLOTS, checked.units, checked.reach, 0, 1, SLOTS)
    Scatterer(like).run(content.numpy()[half:], numbers)
    copies = [(tuple(row[:FIXED]), tuple(_axes(row))) for row in checked.table.tolist()]
    assert stage.scatterer(copies, checked.units).start(stage.content(half, half), numbers) is None
    assert (expected != 0xEE).any()
    assert np.array_equal(target.numpy(), expected)


def test_the_region_of_a_tensor_is_where_it_lies():
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    assert TorchStage(memory, []).region == Region(memory.data_ptr(), 1 << 12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_without_memory_names_the_setting():
    with pytest.raises(TransportUnavailable, match="4,096 bytes of staging memory") as refused:
        torch_stage_of([Region(1 << 20, 8, "VRAM", 3)], 4096)
    assert "staging_bytes" in str(refused.value)
