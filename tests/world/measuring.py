"""What processes take: memory, file descriptors, threads, time of a core; and what makes that say something."""

import ctypes
import os
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

M_ARENA_MAX = -8
"""Source: malloc.h of glibc."""

PLANES = {
    "auto": {"transport": "auto"},
    "tcp": {"transport": "tcp"},
    "tls": {"transport": "tcp", "tcp_encryption": "tls"},
}
"""What the bytes go over -> the settings of all workers."""
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
WARM = 0.2
"""Share of the rounds after which memory is compared: allocators, caches of plans and pools of connections are full."""
WINDOW = 0.1
"""Share of the rounds of which the median is taken, at both ends."""


@dataclass
class Sample:
    """One process at one moment. Source: proc(5).

    Attributes:
        rss: bytes of resident memory.
        descriptors: open files, by kind.
        threads: of the process.
        cpu_s: seconds of a core since its start.
    """

    rss: int
    descriptors: Counter
    threads: int
    cpu_s: float


def sample(pid):
    """Look at a process."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Sample(
        rss=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=Counter(kinds_of_files(folder / "fd")),
        threads=int(status["Threads"]),
        cpu_s=(int(user) + int(system)) / TICKS,
    )


def kinds_of_files(folder):
    """Yield for each open file what it is, without its number."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # of the one that reads the folder
            yield str(path.readlink()).partition(":[")[0].partition(" (deleted)")[0].rstrip("0123456789")


def more(now, before, spare=0):
    """Say what there is more of than there was, of what must not grow at all, but for so many files to spare."""
    texts = []
    if now.descriptors.total() > before.descriptors.total() + spare:
        kinds = ", ".join(f"{number} {kind}" for kind, number in (now.descriptors - before.descriptors).items())
        texts.append(f"files are {now.descriptors.total()}, and were {before.descriptors.total()}; more are {kinds}")
    if now.threads > before.threads:
        texts.append(f"threads are {now.threads}, and were {before.threads}")
    return "; ".join(texts)


class Growth:
    """How the memory of one process has changed after its warm-up.

    Args:
        samples: one of each round.
        pulls: of one round.
    """

    def __init__(self, samples, pulls):
        self.window = max(1, round(WINDOW * len(samples)))
        first = min(round(WARM * len(samples)), len(samples) - 1)
        self.before = median(one.rss for one in samples[first : first + self.window])
        self.after = median(one.rss for one in samples[-self.window :])
        self.share = self.after / self.before - 1
        between = max(1, len(samples) - first - self.window)
        self.bytes_per_pull = (self.after - self.before) / (between * pulls)


def one_arena():
    """Have all threads allocate from one arena.

    Otherwise each thread of a pool in which a worker is opened has one, which keeps what that took: memory grows until
    each of them, eight for each core, has had its turn, and that is longer than a soak.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def thread_pool(size):
    """Make a pool with all its threads, so that their number says something."""
    pool, all_here = ThreadPoolExecutor(size), threading.Barrier(size)
    for waiting in [pool.submit(all_here.wait) for _ in range(size)]:
        waiting.result()
    return pool


def threads():
    """Name every thread of this process."""
    return sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


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
