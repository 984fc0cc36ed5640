"""Hooks at the last instants of a read, where every data plane passes: sockets, device memory, and the clock."""

import ctypes
import time
from contextlib import suppress
from pathlib import Path

from kvflow.reads.tcp import exporter as tcp_exporter


class LastBytes:
    """Calls a function when the last bytes of some blocks are copied out of an exporter's memory.

    A plane that serves reads compares the epoch after it has copied host memory, or fetched that of a device: there the
    function is called between the two. Within one process a reader copies with ``ctypes``, and the function is called
    just before. NIXL copies by itself: there it is called before all bytes.

    Args:
        world: the world of both ends.
        exporter: an end that has not been started.
        block: bytes of a block.
        numbers: the blocks that are read.
        hook: called once, on the thread that copies.
        answer: the number of the read among those of its chunk.
    """

    def __init__(self, world, exporter, block, numbers, hook, *, answer=0):
        self._world, self._hook, self._answer = world, hook, answer
        self._addresses = {exporter.region.address + at * block for at in numbers}
        self._device = exporter.cache.device_memory
        if world.serves and self._device is not None:
            exporter.cache.device_memory = self
        self.happened = False

    def watch(self, monkeypatch, prepared_list):
        """Begin. The list is the one that the blocks are read with."""
        if self._world.kind == "nixl":
            prepared_list.binding.on_bind = self._happen
        elif not self._world.serves:
            self._move = ctypes.memmove
            monkeypatch.setattr(ctypes, "memmove", self._moved)
        elif self._device is None:
            monkeypatch.setattr(tcp_exporter, "order_memory", self._copied)

    def fetch(self, device, parts, into):
        self._device.fetch(device, parts, into)
        self._read(parts)

    def store(self, device, parts, content):
        self._device.store(device, parts, content)

    def _moved(self, target, source, nbytes):
        self._read([(source, nbytes)])
        return self._move(target, source, nbytes)

    def _read(self, parts):
        self._addresses -= {at for at in self._addresses if any(first <= at < first + n for first, n in parts)}
        if not self._addresses:
            self._happen()

    def _copied(self):
        self._answer -= 1
        if self._answer < 0:
            self._happen()

    def _happen(self):
        if not self.happened:
            self.happened = True
            self._hook()


class Clock:
    """The clock of this process, which a test moves on. Ends that are made before do not see it."""

    def __init__(self, monkeypatch):
        self._moved_s, now = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + self._moved_s)

    def move(self, seconds):
        self._moved_s += seconds


def sockets():
    """The sockets that this process has open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith("socket:")}
