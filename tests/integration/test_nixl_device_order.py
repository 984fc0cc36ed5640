"""Where NIXL reads into device memory: which thread has the device, and in which order it is asked for what."""

import ctypes
import mmap
import re
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.memory import device as torch_device
from kvflow.memory.device import TorchDeviceOrder
from kvflow.reads.backend import BackendError
from kvflow.reads.contract import PeerAddress
from kvflow.reads.device import device_order_of
from kvflow.reads.nixl import backend as nixl_backend
from kvflow.reads.nixl.backend import DeviceNixlBackend, Uses
from kvflow.reads.nixl.metadata import Exported
from kvflow.reads.nixl.reading import ReadingAgent
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport


class FakeDevice:
    """Notes what was asked for, and by which thread."""

    def __init__(self):
        self.asked = []
        self.threads = set()

    def note(self, word):
        self.asked.append(word)
        self.threads.add(threading.current_thread().name)

    def enter(self):
        self.note("enter")

    def settle(self):
        self.note("settle")

    def make_visible(self):
        self.note("make visible")


@pytest.fixture
def noted(monkeypatch):
    """A device that notes calls, among those of NIXL."""
    device = FakeDevice()

    def watch(owner, name, word):
        original = getattr(owner, name)

        def call(*args, **options):
            device.note(word)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    watch(nixl_backend, "load_binding", "load")
    watch(nixl_backend.Agent, "destroy", "destroy")
    return device


def memory():
    """4 KiB of this process, for a test: ``region`` is a cache, and ``table`` has epochs."""
    array = np.zeros(1 << 12, np.uint8)
    yield Region(array.ctypes.data, array.nbytes)


region, table = (pytest.fixture(memory, name=name) for name in ("region", "table"))


@pytest.mark.nixl
def test_the_device_is_entered_before_nixl_and_settled_after_the_reader(noted, region, table):
    backend = DeviceNixlBackend(noted, "device order", [region], table)
    assert noted.asked == ["enter", "load"]
    backend.reset()
    assert noted.asked[2:] == ["destroy", "settle"]
    backend.close()
    assert noted.asked[4:] == ["destroy", "settle", "destroy"], "the exporter writes nothing"
    assert not backend.ends_at_once("p"), "so no other thread calls NIXL"


@pytest.mark.nixl
def test_all_calls_come_from_the_read_thread(noted, region, table):
    make = {"nixl": lambda regions, epochs, _: DeviceNixlBackend(noted, "device order", regions, epochs)}
    transport = ThreadedTransport("nixl", make, lambda _: None, StagingMemory(0))
    transport.start([region], table)
    transport.close()
    assert noted.threads == {"kvflow-nixl"}


@pytest.mark.nixl
def test_a_device_that_fails_does_not_keep_reads_from_ending(noted, caplog, region, table):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    noted.settle = fail
    DeviceNixlBackend(noted, "device order", [region], table).close()
    assert noted.asked[-2:] == ["destroy", "destroy"]
    assert "the device failed" in caplog.text


class Ended:
    """A backend whose chunks end when the test says so, and what was asked for before each check was posted."""

    def __init__(self, monkeypatch):
        self.device, self.posted = FakeDevice(), []
        monkeypatch.setattr(nixl_backend.NixlBackend, "__init__", lambda _: None)
        monkeypatch.setattr(nixl_backend.NixlBackend, "post_check", self.note)
        self.backend = DeviceNixlBackend(self.device)
        self.backend._reader = ReadingAgent.__new__(ReadingAgent)
        self.backend._reader.has_arrived = False

    def note(self, peer, _first, _last, _reads, *, fence):
        self.posted.append((peer, fence, self.device.asked.count("make visible")))

    def end(self):
        self.backend._reader._settle(-1, 0)

    def check(self, peer, *, fence):
        self.backend.post_check(peer, 0, 0, (), fence=fence)


def test_arrived_bytes_become_visible_before_a_fence_only(monkeypatch):
    ended = Ended(monkeypatch)
    ended.end()
    ended.check("p", fence=False)
    ended.check("p", fence=True)
    assert ended.posted == [("p", False, 0), ("p", True, 1)]


def test_fences_that_are_due_together_need_one_call_to_the_device(monkeypatch):
    ended = Ended(monkeypatch)
    for _ in range(3):
        ended.end()
    for peer in "pqr":
        ended.check(peer, fence=True)
    ended.end()
    ended.check("p", fence=True)
    assert ended.posted == [("p", True, 1), ("q", True, 1), ("r", True, 1), ("p", True, 2)]


def test_a_device_that_fails_at_a_fence_ends_reads_and_is_not_a_defect(monkeypatch):
    ended = Ended(monkeypatch)

    def fail():
        raise RuntimeError("CUDA error: device is lost")

    ended.device.make_visible = fail
    ended.end()
    for _ in range(2):  # nothing was made visible, so the next fence tries again
        with pytest.raises(BackendError, match="transport_error: the device failed: CUDA error: device is lost"):
            ended.check("p", fence=True)
    assert ended.posted == []


def test_a_cache_on_several_devices_is_refused():
    regions = [Region(1 << 20, 8, "VRAM", device) for device in (0, 1)]
    with pytest.raises(TransportUnavailable, match=r"devices \[0, 1\]"):
        device_order_of(regions)


class FakeDriver:
    """What libcuda answers on a platform that orders remote writes so much, on a thread with or without a context."""

    def __init__(self, ordering=0, *, failure=0, context=True):
        self.ordering, self.failure, self.context, self.flushed = ordering, failure, context, []

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = 0xC0DE if self.context else None
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        assert (attribute, device) == (118, 3)
        value._obj.value = self.ordering
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target, scope):  # noqa: N802
        self.flushed.append((target, scope))
        return self.failure


class FakeTorch:
    """What torch does on the thread that enters a device: as on device 0, only work on it makes a context."""

    def __init__(self, monkeypatch, driver):
        self.asked, self._driver = [], driver
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else pytest.fail(name))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.asked.append(("set", device)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.asked.append(("synchronize", device)))
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def zeros(self, count, *, device):
        self.asked.append(("zeros", count, str(device)))
        self._driver.context = True


def entered(monkeypatch, driver):
    """A device that was entered, and what torch was asked for."""
    fake = FakeTorch(monkeypatch, driver)
    order = TorchDeviceOrder(3)
    order.enter()
    return order, fake.asked


def test_entering_a_device_gives_the_thread_a_context(monkeypatch):
    driver = FakeDriver(100, context=False)
    _, asked = entered(monkeypatch, driver)
    assert asked == [("set", 3), ("zeros", 1, "cuda:3")]


def test_a_thread_that_gets_no_context_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(FakeTorch, "zeros", lambda *_, **__: None)
    with pytest.raises(TransportUnavailable, match="no context of CUDA is current") as refused:
        entered(monkeypatch, FakeDriver(context=False))
    assert "CUDA_VISIBLE_DEVICES" in refused.value.remedy


@pytest.mark.parametrize(("ordering", "flushes"), [(0, 3), (100, 0), (200, 0)])
def test_remote_writes_are_flushed_where_the_platform_does_not_order_them(monkeypatch, ordering, flushes):
    driver = FakeDriver(ordering)
    order, _ = entered(monkeypatch, driver)  # tries it once
    order.make_visible()
    order.make_visible()
    assert driver.flushed == [(0, 100)] * flushes


def test_a_flush_that_fails_is_refused_at_the_start(monkeypatch):
    with pytest.raises(TransportUnavailable, match="cuFlushGPUDirectRDMAWrites returns 201") as refused:
        entered(monkeypatch, FakeDriver(0, failure=201))
    assert "driver" in refused.value.remedy


def test_a_device_that_is_gone_is_refused_with_the_words_of_torch(monkeypatch):
    def gone(_device):
        raise RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors might be reported later")

    fake = FakeTorch(monkeypatch, FakeDriver())
    monkeypatch.setattr(torch.cuda, "set_device", gone)
    with pytest.raises(TransportUnavailable, match="torch cannot use device 3: CUDA error: invalid device ordinal \\["):
        TorchDeviceOrder(3).enter()
    assert fake.asked == []


def test_a_rocm_device_is_synchronized_to_make_bytes_visible(monkeypatch):
    monkeypatch.setattr(torch_device.torch.version, "hip", "6.4")
    order, asked = entered(monkeypatch, FakeDriver())
    order.make_visible()
    order.settle()
    assert asked == [("set", 3), ("zeros", 1, "cuda:3"), *[("synchronize", 3)] * 3]


@pytest.mark.nixl
def test_refused_device_memory_names_what_to_check(noted, region, table):
    absent = Region(region.address, region.nbytes, "VRAM", 0)  # this UCX has no device, or the memory is not on one
    with pytest.raises(TransportUnavailable, match="nixl") as refused:
        DeviceNixlBackend(noted, "device order", [absent], table)
    for word in ("nvidia-peermem", "dmabuf", "ulimit -l", "UCX_TLS", "variant"):
        assert word in str(refused.value)


@pytest.mark.nixl
def test_transports_that_forbid_cuda_are_named_at_the_start(noted, monkeypatch, region, table):
    """NIXL refuses them where it sees a GPU: here a stand-in does."""

    def refuse(_agent, *_):
        raise nixl_backend.error_types(nixl_backend.load_binding())[0]("NIXL_ERR_BACKEND")

    monkeypatch.setenv("UCX_TLS", "rc,sm")
    monkeypatch.setattr(nixl_backend.Agent, "register", refuse)
    with pytest.raises(TransportUnavailable, match="UCX_TLS is 'rc,sm'") as refused:
        DeviceNixlBackend(noted, "device order", [region], table)
    assert "UCX_TLS, if set, allows cuda" in refused.value.remedy


@pytest.mark.nixl
def test_registered_bytes_are_logged(noted, caplog, region, table):
    caplog.set_level("INFO", "kvflow.reads.nixl.binding")
    DeviceNixlBackend(noted, "device order", [region], table).close()
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "kvflow.reads: NIXL registered 0.0 MiB",  # exporter
        "kvflow.reads: NIXL registered 4.0 MiB",  # reader, with its scratch
    ]


@pytest.mark.nixl
def test_the_memory_that_checks_land_in_has_whole_pages_of_its_own(region, table):
    backend = nixl_backend.NixlBackend("pages", [region], table)
    scratch = backend._reader.scratch
    assert (scratch.ctypes.data % mmap.PAGESIZE, scratch.nbytes % mmap.PAGESIZE) == (0, 0)
    backend.close()


@pytest.mark.nixl
@pytest.mark.parametrize("has_network", [False, True])
def test_a_thread_without_the_device_makes_progress_for_network_cards_only(
    noted, monkeypatch, has_network, region, table
):
    monkeypatch.setattr(Exported, "has_network", has_network)
    backend = DeviceNixlBackend(noted, "progress", [region], table)
    try:
        assert backend._reader.progress == has_network
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("carrier", "progress", "descriptors"),
    [
        ("cuda_ipc", False, 1024),
        ("cuda_ipc|rc_mlx5", True, 1024),
        ("rc_mlx5", True, 8192),
        ("unknown", True, 1024),
        ("cma", False, 0),
    ],
)
def test_copies_of_a_gpu_are_posted_in_large_chunks_without_that_thread(carrier, progress, descriptors):
    backend = nixl_backend.NixlBackend.__new__(nixl_backend.NixlBackend)
    backend._reader = SimpleNamespace(progress=progress)
    backend._peers = {"p": SimpleNamespace(carrier=carrier)}
    assert backend.chunk_descriptors("p") == descriptors


REGISTERED = {
    "both": [("exporter", 4.0), ("reader/0", 8.0)],
    "producer": [("exporter", 4.0)],
    "consumer": [("exporter", 0.0), ("reader/0", 8.0)],
}
"""Role -> what registers how many MiB at the start: 4 of a cache, 4 where checks of a reader land, and epochs."""


@pytest.mark.nixl
@pytest.mark.parametrize("role", REGISTERED)
def test_a_cache_is_registered_for_what_its_role_needs(caplog, role, table):
    caplog.set_level("INFO", "kvflow.reads.nixl.binding")
    cache = np.zeros(4 << 20, np.uint8)
    large = Region(cache.ctypes.data, cache.nbytes)
    nixl_backend.NixlBackend(role, [large], table, uses=Uses(role)).close()
    told = [re.fullmatch(r".* registered (.*) MiB in .* as (.*)", each.getMessage()) for each in caplog.records]
    assert [(each[2].removeprefix(f"{role}/"), float(each[1])) for each in told] == REGISTERED[role]


@pytest.mark.nixl
@pytest.mark.parametrize("device", [False, True])
def test_a_connection_to_memory_of_a_device_is_not_kept(noted, monkeypatch, device, region, table):
    forgotten = []
    monkeypatch.setattr(nixl_backend.Agent, "remove_remote", lambda _, name: forgotten.append(name))
    exporter = nixl_backend.NixlBackend("peer", [region], table)
    kind = partial(DeviceNixlBackend, noted) if device else nixl_backend.NixlBackend
    reader = kind("device order", [region], table)
    reader.add(PeerAddress("p", {"nixl": exporter.metadata}, table))
    reader.remove("p", gone=False)
    assert forgotten == (["peer/exporter"] if device else [])
    reader.close()
    exporter.close()


@pytest.mark.parametrize(("backend", "level"), [(DeviceNixlBackend, "WARN"), (nixl_backend.NixlBackend, "FATAL")])
def test_warnings_of_nixl_are_shown_for_device_memory_only(monkeypatch, backend, level):
    asked = []

    def load(log_level):
        asked.append(log_level)
        raise TransportUnavailable("not needed")

    monkeypatch.setattr(nixl_backend, "load_binding", load)
    arguments = (FakeDevice(),) if backend is DeviceNixlBackend else ()
    with pytest.raises(TransportUnavailable, match="not needed"):
        backend(*arguments, "device order", [], Region(0, 8))
    assert asked == [level]
