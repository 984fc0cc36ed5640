"""Allocate memory in a separate mapping, and ask for huge pages.

The kernel copies a process's memory page by page, so a cache in huge pages is read faster. With the kernel's setting
``madvise``, memory gets them only if its process asks, and at once only for pages that were never written.
"""

import ctypes
import mmap
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS = Path("/proc/self/smaps")
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1

_libc = ctypes.CDLL(None)


@cache
def huge_page_size() -> int:
    """Return the size of a huge page; 0 if the platform has none that a process may ask for."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def map_bytes(nbytes: int, *, huge: bool = False) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` of zeroed memory that start at a page boundary and share no page with other memory.

    ``huge`` starts at the boundary of a huge page, and asks for huge pages, where there are any. Raises OSError.
    """
    size = huge_page_size() if huge else 0
    # Private, because a forked child would otherwise write into it. The bytes before and after the array are never
    # touched.
    mapping = mmap.mmap(-1, nbytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.ndarray(1, np.uint8, mapping).ctypes.data
    array: npt.NDArray[np.uint8] = np.ndarray(nbytes, np.uint8, mapping, -address % size if size else 0)
    if huge:
        ask_for_huge_pages(array.ctypes.data, nbytes)
    return array


def ask_for_huge_pages(address: int, nbytes: int, *, now: bool = False) -> None:
    """Ask for huge pages for the part of a range that can have them. It is not an error if the kernel refuses.

    ``now`` also copies pages that were written before into huge pages; needs Linux 6.1.
    """
    size = huge_page_size()
    if not size:
        return
    first, end = -(-address // size) * size, (address + nbytes) // size * size
    if first < end:
        for advice in (mmap.MADV_HUGEPAGE, *([_COLLAPSE] if now else [])):
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))


def bytes_in_huge_pages(ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many bytes of ranges (address, length) are in huge pages now; 0 if the platform does not report it.

    An upper bound if a mapping is larger than a range, because the kernel counts huge pages of whole mappings.
    """
    try:
        text = _MAPS.read_text()
    except OSError:
        return 0
    found = 0
    for mapped in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)+?AnonHugePages: +(\d+) kB", text, re.MULTILINE):
        first, end, huge = int(mapped[1], 16), int(mapped[2], 16), int(mapped[3]) << 10
        for address, nbytes in ranges if huge else ():
            inside = min(end, address + nbytes) - max(first, address)
            found += max(0, min(inside, huge))
    return found
