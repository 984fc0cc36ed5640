"""An exporter in a process of its own."""

from contextlib import contextmanager

import numpy as np

from kvflow.layout.component import Region
from tests.contract.kinds import KINDS, serving
from tests.devices import cache_of


class Exporter:
    """A transport that is only read from, and its cache."""

    def __init__(self, transport, cache, epochs):
        self._transport, self._cache, self._epochs = transport, cache, epochs

    def about(self):
        """Return what a reader needs to know."""
        epochs = Region(self._epochs.ctypes.data, self._epochs.nbytes)
        return {"published": self._transport.published(), "epochs": epochs, "cache": self._cache.region}

    def set_epoch(self, slot, value):
        self._epochs[slot] = value

    def content(self):
        """Return all bytes."""
        return self._cache.bytes().tobytes()


@contextmanager
def exporting(kind, name, *, nbytes, slots, seed, memory="DRAM"):
    """Open an exporter of a kind, whose cache is filled from a seed."""
    content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    cache, epochs = cache_of(memory, content), np.zeros(slots, dtype=np.uint64)
    transport = KINDS[kind](name, lambda _: None)
    transport.start([cache.region], Region(epochs.ctypes.data, epochs.nbytes), serving(cache, epochs))
    try:
        yield Exporter(transport, cache, epochs)
    finally:
        transport.close()
