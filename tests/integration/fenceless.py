"""A transport without the fence, to show that the proofs with the fence can fail."""

import threading

import msgspec

from kvflow.transport.base import FenceFailed, FenceJudged, ReadCompleted, ReadFailed
from kvflow.transport.factory import create_transport


def open_fenceless(name, agent_name, sink):
    """Make one, in place of ``create_transport``."""
    return Fenceless(lambda own_sink: create_transport(name, agent_name, own_sink), sink)


class Fenceless:
    """Wraps a transport: reads are real, and every epoch is said to be what the ticket says, without a look at it."""

    def __init__(self, create, sink):
        self._transport = create(self._on_event)
        self._sink = sink
        self._lock = threading.Lock()
        self._open = set()
        self._waiting = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, read):
        with self._lock:
            self._open.add(read.read_id)
            self._waiting += read.fences
        self._transport.post(msgspec.structs.replace(read, fences=()))

    def _on_event(self, event):
        self._sink(event)
        if isinstance(event, ReadCompleted | ReadFailed):
            failed = isinstance(event, ReadFailed)
            for fence in self._due(event.read_id, failed=failed):
                if failed:
                    self._sink(FenceFailed(fence.fence_id, event.code, event.detail))
                else:
                    self._sink(FenceJudged(fence.fence_id, fence.epoch, 0.0))

    def _due(self, read_id, *, failed):
        """Take the fences that wait for nothing more, now that a read has ended."""
        with self._lock:
            self._open.discard(read_id)
            due = [
                fence
                for fence in self._waiting
                if read_id in fence.after and (failed or self._open.isdisjoint(fence.after))
            ]
            self._waiting = [fence for fence in self._waiting if fence not in due]
        return due
