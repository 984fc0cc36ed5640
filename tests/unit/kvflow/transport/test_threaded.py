"""The thread around a mover: what it says when the library does not return."""

import threading

from kvflow.layout.region import Region
from kvflow.transport import threaded
from kvflow.transport.staging import StagingMemory
from kvflow.transport.threaded import ThreadedTransport

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
