"""Where producers live: in this process over ``loopback``, or in another one over NIXL or TCP. ZeroMQ has CURVE."""

import asyncio
import ctypes
import threading

import pytest
import uvloop

from kvflow.reads.backend import Backend
from kvflow.reads.tcp.backend import TcpBackend

from .consuming import PATIENCE_S, Heard, consuming
from .elsewhere import Child
from .producing import producing
from .shapes import Shape

ELSEWHERE = [pytest.mark.nixl, pytest.mark.processes]

OVER_TCP = {"transport": "tcp"}
"""Of a producer that is stopped while it is read: over shared memory a reader needs nobody who is awake."""


def pytest_configure(config):
    config.addinivalue_line("markers", "both_loops: runs on uvloop, too; every child process does anyway")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item):
    loops = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("both_loops"):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


class Gate:
    """Holds every copy over loopback until it is opened.

    Attributes:
        reached: set when a copy waits, or has waited, at the gate.
    """

    def __init__(self):
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._copy = ctypes.memmove

    def copy(self, target, source, nbytes):
        self.reached.set()
        assert self._opened.wait(PATIENCE_S)
        return self._copy(target, source, nbytes)

    def open(self):
        self._opened.set()


class World:
    """One kind of data plane, and where its producers are."""

    def __init__(self, transport, producing_there):
        self.transport = transport
        self._producing = producing_there

    def producing(self, shape=Shape(), **settings):  # noqa: B008 - frozen
        return self._producing(shape, **{"transport": self.transport, **settings})

    def consuming(self, shape=Shape(), **settings):  # noqa: B008 - frozen
        return consuming(shape, **{"transport": self.transport, **settings})

    def consuming_whole(self, _shape, **settings):
        """One of several ranks that all hold the whole cache, as those of a replicated one do."""
        return self.consuming(**settings)


@pytest.fixture(scope="session")
def elsewhere():
    """A process for producers that nobody kills."""
    child = Child()
    yield child
    child.go()


@pytest.fixture(
    params=["loopback", pytest.param("nixl", marks=ELSEWHERE), pytest.param("tcp", marks=pytest.mark.processes)]
)
def world(request):
    """Every world."""
    if request.param == "loopback":
        return World("loopback", producing)
    return World(request.param, request.getfixturevalue("elsewhere").producing)


@pytest.fixture
def far_world(elsewhere):
    """Two processes, real ZeroMQ with CURVE, real NIXL over UCX."""
    return World("nixl", elsewhere.producing)


@pytest.fixture
def near_world():
    """One process."""
    return World("loopback", producing)


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def late(monkeypatch):
    """Let reads over TCP go on after a cancel until they end by themselves, as over NIXL."""
    monkeypatch.setattr(TcpBackend, "cancel", Backend.cancel)


@pytest.fixture
def spawn():
    """Start processes for producers that may be stopped and killed."""
    children = []

    def start(**environment):
        children.append(Child(**environment))
        return children[-1]

    yield start
    for child in children:
        child.go()


@pytest.fixture
def gate(monkeypatch):
    """Make reads over loopback as slow as a test needs them."""
    gate = Gate()
    monkeypatch.setattr(ctypes, "memmove", gate.copy)
    yield gate
    gate.open()
