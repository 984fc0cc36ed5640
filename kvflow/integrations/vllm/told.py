"""Which sources keep which prompts, as they have told: it decides which of them a finder asks, and nothing else."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from kvflow import Told
from kvflow.errors import CapacityExceeded

END_BYTES = 8  # of a digest
STRIDE_TOKENS = 1024  # a source may keep less than so many tokens more than it has told
SOURCE_ENDS_MAX = 1 << 16  # as many as one worker has
ENDS_MAX = 1 << 19  # of all sources: 100 MiB

SourceT = TypeVar("SourceT", bound=Hashable)


class ToldIndex(Generic[SourceT]):
    """The ends that sources have told. Thread: the finder's."""

    def __init__(self) -> None:
        self._by_end: dict[bytes, tuple[SourceT, ...]] = {}
        self._ends: dict[SourceT, set[bytes]] = {}
        self._complete: set[SourceT] = set()
        self._count = 0

    def knows(self, source: SourceT) -> bool:
        """Return whether a source has told all that it keeps."""
        return source in self._complete

    def take(self, source: SourceT, told: Told) -> None:
        """Take what a source tells; raise ``CapacityExceeded`` if that is too much, so that it has to begin again."""
        if told.is_anew:
            self.drop(source)
            self._ends[source] = set()
        ends = self._ends.get(source)
        if ends is None:
            raise CapacityExceeded("ends of all sources", ENDS_MAX)
        self._remove(source, ends.intersection(told.gone))
        for end in told.new:
            if end not in ends:
                ends.add(end)
                self._by_end[end] = (*self._by_end.get(end, ()), source)
                self._count += 1
        if told.is_all:
            self._complete.add(source)
        else:
            self._complete.discard(source)
        if len(ends) > SOURCE_ENDS_MAX:
            self.drop(source)
            raise CapacityExceeded("ends of one source", SOURCE_ENDS_MAX)
        while self._count > ENDS_MAX:
            self.drop(max(self._ends, key=lambda each: len(self._ends[each])))

    def drop(self, source: SourceT) -> None:
        """Forget what a source has told."""
        self._complete.discard(source)
        if source in self._ends:
            self._remove(source, set(self._ends[source]))
            del self._ends[source]

    def holders(self, digests: Sequence[bytes]) -> Iterator[tuple[SourceT, int]]:
        """Yield each source that has told some of these digests, and how many lead to the last of those."""
        ends, seen = [digest[:END_BYTES] for digest in digests], set[SourceT]()
        told = self._by_end.keys() & ends
        for count in range(len(ends), 0, -1) if told else ():
            if ends[count - 1] in told:
                for source in self._by_end[ends[count - 1]]:
                    if source not in seen:
                        seen.add(source)
                        yield source, count

    def _remove(self, source: SourceT, gone: set[bytes]) -> None:
        self._ends[source] -= gone
        self._count -= len(gone)
        for end in gone:
            if others := tuple([each for each in self._by_end[end] if each != source]):
                self._by_end[end] = others
            else:
                del self._by_end[end]
