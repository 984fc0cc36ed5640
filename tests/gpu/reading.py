"""A worker that reads from a source in another process."""

from contextlib import contextmanager

import kvflow
from kvflow.leases.tickets import Ticket
from tests.helpers.settings import flat_config
from tests.world.node import Node

from .memory import PACKED, SECRET, build
from .source import opened_source

PATIENCE_S = 120.0


class Remote(Node):
    """The source process."""

    def __init__(self, geometry, device):
        super().__init__()
        self.open_now(opened_source, geometry, device)

    def offer(self, request, blocks, command="offer", **told):
        """Have blocks of 16 tokens offered, and return their ticket."""
        told |= {"request": request, "blocks": list(blocks), "num_tokens": 16 * len(blocks)}
        return Ticket.from_params(self.ask_now(command, **told))


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
        source.go()
