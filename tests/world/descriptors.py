"""What file descriptors a process holds, so that a leak tells what it is."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def descriptors():
    """Describe every file descriptor of this process: what it is, and of a socket whom it is connected to."""
    described = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            described.append(_described(int(entry.name), str(entry.readlink())))
    return sorted(described)


def _described(number, target):
    kind = target.partition(":")[0]
    if kind != "socket":
        return target if kind in ("", "anon_inode") or target.startswith("/") else kind
    with socket.socket(fileno=os.dup(number)) as connection:
        ours, theirs = connection.getsockname(), "nobody"
        with suppress(OSError):
            theirs = connection.getpeername()
        return f"socket {connection.family.name} {ours} to {theirs}"
