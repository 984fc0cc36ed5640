"""Two network namespaces and the wire between them, in a process of its own: packets are lost and late as it is told.

The wire is a pair of TUN devices, one in each namespace, and this process, which carries every packet from one to the
other. So it needs root, ``ip`` and ``/dev/net/tun``, and nothing of the kernel's traffic control. Lines of JSON on
standard input say how the wire is from then on, for example ``{"loss": 0.01, "delay_s": 0.005}``; what is not named is
nothing. The end of the input ends the process, and the namespaces with it, however its parent ended.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import random
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
"""Source: linux/if_tun.h; IFF_TUN and IFF_NO_PI."""
PACKET_MAX = 65536
QUEUED_MAX = 2000
"""Packets on their way: 3 MB, more than TCP has under way here. What comes then is lost, as in any queue."""
DEVICE = "wire0"
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
"""Source: clone(2)."""
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
"""Source: mount(2), umount(2)."""


def namespaces(pid):
    """Return the names of the two namespaces of a process."""
    return [f"kvflow-chaos-{pid}-{side}" for side in "ab"]


def address(side):
    """Return the address of an end: 0 or 1. Source: RFC 2544, addresses for such purposes."""
    return f"198.18.0.{side + 1}"


def enter(namespace):
    """Have this process, which has one thread, live in a namespace, as ``ip netns exec`` does.

    UCX looks for network devices in ``/sys``, so that has to be the namespace's, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as entrance:
        done = [
            libc.setns(entrance.fileno(), CLONE_NEWNET),
            libc.unshare(CLONE_NEWNS),
            libc.mount(b"", b"/", b"none", MS_REC | MS_SLAVE, None),
            libc.umount2(b"/sys", MNT_DETACH),
            libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None),
        ]
    assert not any(done), f"{done}: {os.strerror(ctypes.get_errno())}"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Wire:
    """The wire.

    Args:
        devices: file descriptors of both ends.
        seed: of what is lost and late.
    """

    def __init__(self, devices, seed):
        self._devices = devices
        self._rng = random.Random(seed)
        self._queued = 0
        self._loop = asyncio.get_running_loop()
        self.be()

    def be(self, loss=0.0, delay_s=0.0, jitter_s=0.0, double=0.0):
        """Treat packets like this from now on.

        Args:
            loss: share that is lost; 1 for all.
            delay_s: that every packet takes.
            jitter_s: that it takes more, by chance, so that packets overtake each other.
            double: share that comes twice.
        """
        self._loss, self._delay_s, self._jitter_s, self._double = loss, delay_s, jitter_s, double

    def carry(self, side):
        """Take what there is from one end."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self._devices[side], PACKET_MAX)
                for _ in range(1 + (self._rng.random() < self._double)):
                    if self._rng.random() >= self._loss and self._queued < QUEUED_MAX:
                        self._queued += 1
                        delay_s = self._delay_s + self._jitter_s * self._rng.random()
                        self._loop.call_later(delay_s, self._arrive, self._devices[1 - side], packet)

    def _arrive(self, device, packet):
        self._queued -= 1
        with suppress(OSError):  # full: lost, as in any queue
            os.write(device, packet)


def open_end(name, side):
    """Make a namespace with one end of the wire; return the other end of its device, which is ours."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    outside = f"kvc{os.getpid()}{side}"
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", outside.encode(), TUN_WITHOUT_HEADER))
    ip("netns", "add", name)
    ip("link", "set", outside, "netns", name)
    ip("-n", name, "link", "set", outside, "name", DEVICE)
    ip("-n", name, "addr", "add", f"{address(side)}/30", "dev", DEVICE)
    ip("-n", name, "link", "set", DEVICE, "up")
    ip("-n", name, "link", "set", "lo", "up")
    return device


async def main():
    names = namespaces(os.getpid())
    loop = asyncio.get_running_loop()
    devices = []
    try:
        devices += [open_end(name, side) for side, name in enumerate(names)]
        wire = Wire(devices, seed=sys.argv[1])
        for side, device in enumerate(devices):
            loop.add_reader(device, wire.carry, side)
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while line := await lines.readline():
            wire.be(**json.loads(line))
    finally:
        for device in devices:  # which go with their namespaces
            loop.remove_reader(device)
        for name in names:
            with suppress(subprocess.CalledProcessError):  # that was never made
                ip("netns", "delete", name)


if __name__ == "__main__":
    asyncio.run(main())
