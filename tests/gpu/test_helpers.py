"""What only a GPU can run, over stand-ins: late writes are late, and pairs that nothing carries are skipped."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from . import conftest, facts
from .conftest import GPU, HOST, require_pair
from .memory import LateWrite


class Queued(TorchFunctionMode):
    """Notes what torch is asked for. A copy to the device waits for what is queued there."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.asked.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Backing:
    """The memory of a cache, said to be on a GPU."""

    is_cuda = True
    device = torch.device("cpu")

    def __init__(self, memory):
        self.view = memory.view


def test_a_late_write_asks_for_nothing_that_waits_behind_its_kernel(monkeypatch):
    memory = torch.zeros(8 * 16, dtype=torch.uint8)
    with Queued() as queued:
        for name in ("stream", "synchronize", "Stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: queued.asked.append("record")))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: queued.asked.append("sleep"))
        LateWrite(SimpleNamespace(backing=Backing(memory), num_blocks=8), [1, 5], 7)
    behind = queued.asked[queued.asked.index("sleep") + 1 :]
    assert [each for each in behind if each != "view"] == ["index_fill_", "record"]
    assert memory.view(8, -1)[:, 0].tolist() == [0, 7, 0, 0, 0, 7, 0, 0]


@pytest.mark.parametrize("devices", [(HOST, HOST), (GPU, GPU), (HOST, GPU), (GPU, HOST)], ids="-to-".join)
@pytest.mark.parametrize("transports", [("cma", "cuda_ipc"), ("cma", "rc_mlx5")])
def test_pairs_that_only_rdma_could_carry_are_skipped_without_it(monkeypatch, devices, transports):
    monkeypatch.setattr(conftest, "require", lambda device: device)
    monkeypatch.setattr(conftest, "start_agent", lambda: SimpleNamespace(transports=transports))
    conftest.has_rdma.cache_clear()
    try:
        if len(set(devices)) == 2 and "rc_mlx5" not in transports:
            with pytest.raises(pytest.skip.Exception, match="over RDMA alone"):
                require_pair(devices)
        else:
            assert require_pair(devices) == devices
    finally:
        conftest.has_rdma.cache_clear()


@pytest.mark.parametrize(
    ("real", "parts"), [(False, ["commands", "agents"]), (True, ["commands", "contexts", "agents"])]
)
def test_facts_ask_cuda_only_where_a_gpu_is_meant(monkeypatch, capsys, real, parts):
    asked = []
    for part in ("commands", "contexts", "agents"):
        call = lambda _device, part=part: asked.append(part)  # noqa: E731
        call.__name__ = part
        monkeypatch.setattr(facts, part, call)
    monkeypatch.setattr(facts, "REAL", real)
    assert facts.main() == 0
    assert asked == parts
    assert capsys.readouterr().out.endswith("failed: nothing\n")
