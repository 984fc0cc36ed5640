"""The setting says which data planes a worker opens, and which of them may not be missing."""

import pytest

from kvflow.config import WorkerConfig
from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.reads import thread
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.thread import PLANES, copy_threads_for, create_transport
from tests.helpers.loops import looped
from tests.helpers.settings import flat_config
from tests.unit.kvflow.reads.test_planes import Memory


def opened(monkeypatch, *, absent=(), **settings):
    """Return what is published, where some planes cannot start."""

    def plane(name):
        def open_plane(regions, epochs, *_):
            if name in absent:
                raise TransportUnavailable(f"{name} is not there")
            return LoopbackBackend(f"{name} of the test", regions, epochs)

        return open_plane

    monkeypatch.setattr(thread, "nixl_factory", lambda *_, **_named: plane("nixl"))
    monkeypatch.setattr(thread, "TcpBackend", lambda _name, _settings, *given: plane("tcp")(*given))
    config = flat_config(engine_id="prefill-0", cluster_secret="a secret of the tests", **settings)
    transport, memory = create_transport(config, "prefill-0", lambda _event: None), Memory()
    try:
        transport.start([memory.region], Region(memory.table.address, memory.table.nbytes))
        assert transport.name == config.transport
        return transport.published()
    finally:
        transport.close()


@pytest.mark.parametrize("name", PLANES)
def test_the_setting_chooses_the_planes(monkeypatch, name):
    assert tuple(opened(monkeypatch, transport=name).planes) == PLANES[name]


def test_by_default_nixl_is_preferred_and_tcp_is_there():
    assert PLANES[WorkerConfig(engine_id="prefill-0").transport] == ("nixl", "tcp")


@pytest.mark.parametrize(("absent", "left"), [("nixl", "tcp"), ("tcp", "nixl")])
def test_auto_does_without_a_plane_that_is_not_there(monkeypatch, absent, left):
    published = opened(monkeypatch, absent=[absent])
    (omitted,) = published.missing
    assert (*published.planes, omitted.plane, omitted.detail) == (left, absent, f"{absent} is not there")


@pytest.mark.parametrize("name", ["nixl", "tcp"])
def test_a_plane_that_is_asked_for_by_name_must_be_there(monkeypatch, name):
    with pytest.raises(TransportUnavailable, match=f"{name} is not there"):
        opened(monkeypatch, absent=[name], transport=name)


def test_a_tcp_plane_with_an_address_must_be_there(monkeypatch):
    with pytest.raises(TransportUnavailable, match="tcp is not there"):
        opened(monkeypatch, absent=["tcp"], tcp_bind="tcp://127.0.0.1:5700")


@looped("cores, threads", [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_a_second_thread_copies_where_the_engine_leaves_a_core(cores, threads):
    assert copy_threads_for(cores) == threads
