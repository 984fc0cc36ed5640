"""Copies by torch on tensors of the host do what NumPy's copies do, whatever the widths and strides."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.memory import device as module
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
    Scatterer(like).start(content.numpy()[half:], numbers)
    copies = [(tuple(row[:FIXED]), tuple(_axes(row))) for row in checked.table.tolist()]
    assert stage.scatterer(copies, checked.units).start(stage.content(half, half), numbers) is None
    assert (expected != 0xEE).any()
    assert np.array_equal(target.numpy(), expected)


class Moves(TorchFunctionMode):
    """Notes what moves between host and device, which are one here: copies that wait, and those that do not."""

    def __init__(self):
        super().__init__()
        self.waiting, self.queued = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            (self.queued if kwargs.get("non_blocking") else self.waiting).append(args[0].data_ptr())
        if func in (torch.from_numpy, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist):
            self.waiting.append(func.__name__)
        return func(*args, **kwargs)


def test_unit_numbers_reach_a_device_through_a_pinned_row_of_their_buffer(monkeypatch):
    """The device is the host: its stream does nothing, and its events have passed."""
    draw = np.random.default_rng(0)
    content = torch.from_numpy(draw.integers(0, 256, 1 << 16, dtype=np.uint8))
    stage = TorchStage(content, [target := torch.zeros(1 << 17, dtype=torch.uint8)])
    stage._stream = "the stream of copies"
    pinned = []
    monkeypatch.setattr(module, "_pinned", lambda n: pinned.append(torch.empty(n, dtype=torch.uint8)) or pinned[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, query=lambda: True))
    checked = scatter_of(draw, target.data_ptr(), 8)
    copies = [(tuple(row[:FIXED]), tuple(_axes(row))) for row in checked.table.tolist()]
    scatterer = stage.scatterer(copies, checked.units)
    expected = torch.zeros_like(target)
    half = 1 << 15
    with Moves() as moves:
        for turn in range(6):
            first, numbers = turn % 2 * half, draw.permutation(24)[: SLOTS - turn % 2].astype(np.int32)
            assert scatterer.start(stage.content(first, half), numbers).poll()
            host = TorchStage(content, [expected])
            shifted = [
                ((*row[:3], row[3] - target.data_ptr() + expected.data_ptr(), *row[4:]), axes) for row, axes in copies
            ]
            with torch._C.DisableTorchFunction():
                host.scatterer(shifted, checked.units).start(host.content(first, half), numbers)
    assert torch.equal(target, expected)
    assert target.any()
    assert moves.waiting == []
    rows = [row.data_ptr() for row in pinned]
    assert len(rows) == 2, "one for each buffer"
    assert moves.queued == rows * 3


def test_the_region_of_a_tensor_is_where_it_lies():
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    assert TorchStage(memory, []).region == Region(memory.data_ptr(), 1 << 12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_without_memory_names_the_setting():
    with pytest.raises(TransportUnavailable, match="4,096 bytes of staging memory") as refused:
        torch_stage_of([Region(1 << 20, 8, "VRAM", 3)], 4096)
    assert "staging_bytes" in str(refused.value)
