"""What makes the memory and the threads of a process say something."""

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

M_ARENA_MAX = -8
"""Source: malloc.h of glibc."""

PLANES = {
    "auto": {"transport": "auto"},
    "tcp": {"transport": "tcp"},
    "tls": {"transport": "tcp", "tcp_encryption": "tls"},
}
"""What the bytes go over -> the settings of all workers."""


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
