"""The thread around a mover: what it says when the library does not return."""

import threading

from kvflow.layout.region import Region
from kvflow.transport import threaded
from kvflow.transport.owner import RemovePeer
from kvflow.transport.staging import StagingMemory
from kvflow.transport.threaded import ThreadedTransport
from tests.preemption import every_preemption

PATIENCE_S = 60


class StuckMover:
    """A library whose agents cannot be destroyed before it is let go."""

    metadata = b"how to read me"

    def __init__(self):
        self.closing, self.let_go = threading.Event(), threading.Event()

    def close(self):
        self.closing.set()
        assert self.let_go.wait(PATIENCE_S)


def test_closing_waits_for_a_call_that_hangs_and_says_so(monkeypatch):
    monkeypatch.setattr(threaded, "HANGS_S", 0.01)
    mover = StuckMover()
    transport = ThreadedTransport("stuck", lambda _regions, _epochs: mover, lambda _event: None, StagingMemory(0))
    transport.start([Region(4096, 64)], Region(8192, 64))
    told, words = threading.Event(), []

    def error(text, *values):
        words.append(text % values)
        told.set()

    monkeypatch.setattr(threaded._logger, "error", error)
    closing = threading.Thread(target=transport.close)
    closing.start()
    assert mover.closing.wait(PATIENCE_S)
    assert told.wait(PATIENCE_S)
    assert "a call into stuck that does not return" in words[0]
    assert closing.is_alive(), "the memory may not be freed yet"
    mover.let_go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def idle_transport(kind=ThreadedTransport):
    """A transport whose owner thread is played by the test."""
    return kind("played", lambda _regions, _epochs: None, lambda _event: None, StagingMemory(0))


def sleeps_on(transport):
    """Tell whether the owner would go to sleep although a command waits: it does so while nobody has woken it."""
    return bool(transport._commands) and not transport._wake.acquire(blocking=False)


def unheard_commands(kind, within):
    """Return the moments, bytecode by bytecode, at which a command waits until another one comes."""
    unheard = []
    for moment, preemption in enumerate(every_preemption()):
        transport, taken = idle_transport(kind), []
        transport.remove_peer("first")
        # The owner is woken, and takes what is there.
        preemption.interrupt(
            lambda transport=transport, taken=taken: taken.extend(transport._take(-1)),
            lambda transport=transport: transport.remove_peer("second"),
            within=within,
        )
        if not preemption.happened:
            transport.remove_peer("second")
        if sleeps_on(transport):
            unheard.append(moment)
        else:
            taken += transport._take(0.0)
            assert taken == [RemovePeer("first"), RemovePeer("second")]
    return unheard


def test_a_command_wakes_the_owner_whenever_it_comes():
    assert unheard_commands(ThreadedTransport, threaded.__file__) == []


def test_a_command_that_wakes_only_an_empty_queue_is_not_heard():
    class Careless(ThreadedTransport):
        def _put(self, command):
            if not self._commands:
                super()._put(command)
            else:
                self._commands.append(command)

    assert unheard_commands(Careless, threaded.__file__)


def test_a_command_that_is_interrupted_by_the_owner_wakes_it_again():
    for preemption in every_preemption():
        transport, taken = idle_transport(), []
        preemption.interrupt(
            lambda transport=transport: transport.remove_peer("only"),
            lambda transport=transport, taken=taken: taken.extend(transport._take(0.0)),
            within=threaded.__file__,
        )
        assert not sleeps_on(transport)
        taken += transport._take(0.0)
        assert taken == [RemovePeer("only")]


def test_each_command_wakes_an_owner_that_sleeps():
    transport = idle_transport()
    for number in range(3):
        transport.remove_peer(str(number))
        assert transport._wake.acquire(blocking=False), "the owner sleeps on"
        assert transport._take(0.0) == [RemovePeer(str(number))]
