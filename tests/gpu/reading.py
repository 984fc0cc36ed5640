"""A worker that reads from a source in another process."""

import json
from contextlib import contextmanager

import msgspec

import kvflow
from kvflow.leases.tickets import Ticket
from tests.helpers.settings import flat_config
from tests.world.forked import ForkedProcess

from .memory import PACKED, SECRET, build

PATIENCE_S = 120.0


class Remote:
    """The source process."""

    def __init__(self, geometry, device):
        encoded = msgspec.json.encode(geometry).decode()
        self._process = ForkedProcess("tests.gpu.source_process", {}, ["--device", device, "--geometry", encoded])
        assert self._process.stdout.readline() == "ready\n"

    def begin(self, command, **told):
        """Give a command, without waiting for its end."""
        self._process.stdin.write(json.dumps([command, told]) + "\n")
        self._process.stdin.flush()

    def end(self):
        """Wait for the end of a command, and return what it answers."""
        return json.loads(self._process.stdout.readline())

    def do(self, command, **told):
        self.begin(command, **told)
        return self.end()

    def offer(self, request, blocks, command="offer", **told):
        """Have blocks of 16 tokens offered, and return their ticket."""
        told |= {"request": request, "blocks": list(blocks), "num_tokens": 16 * len(blocks)}
        return Ticket.from_params(self.do(command, **told))

    def close(self):
        self._process.stdin.close()  # the end of its input
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()
        assert self._process.poll() == 0


@contextmanager
def reading(devices, *, theirs=PACKED, ours=PACKED, hooks=(), **settings):
    """Open both ends; yield the source, our worker, and our cache.

    Args:
        devices: of the source's and of our cache.
        theirs, ours: geometries.
        hooks: of our worker.
        settings: of our worker.
    """
    source = Remote(theirs, devices[0])
    try:
        cache = build(ours, devices[1])
        config = flat_config(engine_id="target", cluster_secret=SECRET, transport="nixl", **settings)
        with kvflow.run_worker(config, cache, hooks=hooks) as worker:
            yield source, worker, cache
    finally:
        source.close()
