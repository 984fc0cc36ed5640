"""Memory in a mapping of its own, and huge pages under it.

The kernel copies a process's memory page by page, so another process's cache is read faster if its pages are huge. If
the kernel's setting is ``madvise``, memory gets huge pages only if its process asks for them. It gets them at once only
where nothing was written before.
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
_COLLAPSE = 25
"""MADV_COLLAPSE, since Linux 6.1: makes pages that were written before huge, now."""

_libc = ctypes.CDLL(None)


@cache
def huge_page_size() -> int:
    """Return the bytes of a huge page; 0 where the platform has none that a process may ask for."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def map_bytes(nbytes: int, *, huge: bool = False) -> npt.NDArray[np.uint8]:
    """Return zeroed memory that begins at a page and shares no page with other memory; it is freed with the array.

    Args:
        nbytes: 1 or more.
        huge: begin at a huge page, and ask for such pages; changes nothing where there are none.

    Raises:
        OSError: there is not so much memory.
    """
    size = huge_page_size() if huge else 0
    # Private, or a forked child would write into it. The bytes before and behind the array are never touched.
    mapping = mmap.mmap(-1, nbytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.ndarray(1, np.uint8, mapping).ctypes.data
    array: npt.NDArray[np.uint8] = np.ndarray(nbytes, np.uint8, mapping, -address % size if size else 0)
    if huge:
        ask_for_huge_pages(array.ctypes.data, nbytes)
    return array


def ask_for_huge_pages(address: int, nbytes: int, *, now: bool = False) -> None:
    """Ask for huge pages under the part of a range that can have them. What is refused stays as it is.

    Args:
        address: of the range.
        nbytes: of the range.
        now: also make pages huge that were written before, at the cost of a copy; needs Linux 6.1.
    """
    size = huge_page_size()
    if not size:
        return
    first, end = -(-address // size) * size, (address + nbytes) // size * size
    if first < end:
        for advice in (mmap.MADV_HUGEPAGE, *([_COLLAPSE] if now else [])):
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))


def bytes_in_huge_pages(ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many bytes of ranges lie in huge pages at this moment; 0 where the platform does not tell.

    The kernel counts the huge pages of whole mappings. If a mapping is larger than a range, this is the most that the
    range can have.

    Args:
        ranges: address and bytes of each.
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
