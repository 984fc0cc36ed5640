"""A heap whose items can be removed and moved."""

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

SPARE_MAX = 16  # dead entries that do not cause a rebuild


class Heap(Generic[Item]):
    """Items in the order of their keys; items with equal keys in the order of insertion.

    An item that is removed or moved leaves a dead entry behind. The heap is rebuilt when more than half of its entries
    are dead, so that each call costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._live: dict[Item, tuple[Any, int, Item]] = {}
        self._entries: list[tuple[Any, int, Item]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def entries(self) -> int:
        """Number of entries, including dead ones."""
        return len(self._entries)

    def put(self, item: Item, key: Any) -> None:
        """Add an item, or move it to another key."""
        self._puts += 1
        entry = (key, self._puts, item)
        self._live[item] = entry
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + SPARE_MAX:
            self._rebuild()

    def remove(self, item: Item) -> None:
        """Remove an item; do nothing if it is not in the heap."""
        if self._live.pop(item, None) is not None and len(self._entries) > 2 * len(self._live) + SPARE_MAX:
            self._rebuild()

    def first(self) -> tuple[Any, Item] | None:
        """Return the smallest key and its item; None if there is none."""
        entries = self._entries
        while entries:
            key, _, item = entries[0]
            if self._live.get(item) is entries[0]:
                return key, item
            heapq.heappop(entries)
        return None

    def take_until(self, key: Any) -> list[Item]:
        """Remove and return every item whose key is not greater than the limit, in order."""
        taken: list[Item] = []
        while (first := self.first()) is not None and first[0] <= key:
            taken.append(first[1])
            del self._live[first[1]]
            heapq.heappop(self._entries)
        return taken

    def _rebuild(self) -> None:
        self._entries = list(self._live.values())
        heapq.heapify(self._entries)
