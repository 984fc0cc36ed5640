"""Hooks at the last instants of a read, where every data plane passes: sockets, device memory, and the clock."""

import ctypes
import select
import socket
import time
from contextlib import suppress
from pathlib import Path

MARK_BYTES = 64


class LastBytes:
    """Calls a function just before the last bytes of some blocks are copied out of an exporter's memory.

    A plane that serves reads copies host memory into a socket, and device memory by ``DeviceMemory.fetch``. Within one
    process a reader copies with ``ctypes``. NIXL copies by itself: there the function is called before all bytes.

    Args:
        world: the world of both ends.
        exporter: an end that has not been started.
        block: bytes of a block.
        numbers: the blocks that are read.
        hook: called once, on the thread that copies.
        alone: whether a socket takes the last block with none of the blocks before it.
    """

    def __init__(self, world, exporter, block, numbers, hook, *, alone=False):
        self._world, self._hook, self._alone = world, hook, alone
        content = exporter.cache.bytes()
        self._left = {content[at * block : at * block + MARK_BYTES].tobytes() for at in numbers}
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
            self._send, self._sendmsg = socket.socket.send, socket.socket.sendmsg
            monkeypatch.setattr(socket.socket, "send", lambda *given: self._sent(self._send, *given))
            monkeypatch.setattr(socket.socket, "sendmsg", lambda *given: self._sent(self._sendmsg, *given))

    def fetch(self, device, parts, into):
        """See ``DeviceMemory.fetch``."""
        self._read(parts)
        self._device.fetch(device, parts, into)

    def store(self, device, parts, content):
        """See ``DeviceMemory.store``."""
        self._device.store(device, parts, content)

    def _moved(self, target, source, nbytes):
        self._read([(source, nbytes)])
        return self._move(target, source, nbytes)

    def _read(self, parts):
        self._addresses -= {at for at in self._addresses if any(first <= at < first + n for first, n in parts)}
        if not self._addresses:
            self._happen()

    def _sent(self, send, sock, data, *rest):
        if self.happened:
            return send(sock, data, *rest)
        content = bytes(data) if send is self._send else b"".join(data)
        places = {mark: at for mark in self._left if (at := content.find(mark)) >= 0}
        if self._left <= places.keys():
            last = max(places.values())
            if self._alone and last > min(places.values()):
                data = content[:last] if send is self._send else [content[:last]]
            elif not select.select([], [sock], [], 0)[1]:
                raise BlockingIOError
            else:
                self._happen()
        count = send(sock, data, *rest)
        self._left -= {mark for mark, at in places.items() if at < count}
        return count

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
