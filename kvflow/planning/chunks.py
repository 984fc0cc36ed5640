"""Cut a batch into chunks, by bytes and by merged descriptors.

Descriptors are ordered run by run, and within a run pair by pair; a position is a run and a pair. Time and memory grow
with the numbers of pairs, runs and chunks, not with the number of descriptors.
"""

from bisect import bisect_right
from functools import cached_property, lru_cache
from operator import sub

import numpy as np
import numpy.typing as npt

from kvflow.ids import Ids, Int64s
from kvflow.planning.runs import Bools

CHUNKS_FEW = 24  # up to here, cutting one by one is faster: 2 us each, against 50 us for all at once


class Cutter:
    """The runs of a binding as they decide where a batch is cut; ``dense`` says in which of them neighbors merge."""

    def __init__(self, nbytes: Int64s, dense: Bools) -> None:
        self.nbytes = nbytes
        self.dense = dense
        self.num_dense = int(np.count_nonzero(dense))
        self._bytes_before = _before(nbytes)
        self._dense_before = _before(dense)
        self._unit_bytes = int(self._bytes_before[-1])
        self._num_runs = len(nbytes)
        self._run_bytes = int(nbytes[0]) if (nbytes == nbytes[0]).all() else 0  # the length of each, if all are equal

    def cuts(self, source: Ids, target: Ids, chunk_bytes: int, chunk_descriptors: int) -> Int64s:
        """Return where chunks begin, and the end of the last one. Each chunk is as long as both budgets allow.

        ``source`` and ``target`` are the numbers of each pair's descriptor within any run. A descriptor that is larger
        than ``chunk_bytes`` is a chunk alone.
        """
        count = len(source)
        total = count * self._num_runs
        small = count * self._unit_bytes <= chunk_bytes
        if small and total <= chunk_descriptors:
            return one_chunk(total)
        step = max(1, chunk_bytes // self._run_bytes) if self._run_bytes else 0
        if 0 < step <= chunk_descriptors:
            return _evenly(total, step)  # so few fit that merging does not matter
        saved = num_neighbors(source, target) * self.num_dense
        if small and total - saved <= chunk_descriptors:
            return one_chunk(total)
        if step and not saved:
            return _evenly(total, chunk_descriptors)
        merged = _Merged(neighbors(source, target), self.dense, self._dense_before)
        regular = self._regular(merged, step, chunk_bytes, chunk_descriptors)
        return self._walk(merged, chunk_bytes, chunk_descriptors) if regular is None else regular

    def _regular(self, merged: "_Merged", step: int, chunk_bytes: int, chunk_descriptors: int) -> Int64s | None:
        """Return all cuts at once if there are many, and one budget ends every chunk, as is common."""
        by_bytes = merged.count * self._unit_bytes // chunk_bytes
        by_count = merged.total // chunk_descriptors
        total = merged.count * len(self.nbytes)
        if max(by_bytes, by_count) < CHUNKS_FEW:
            return None
        if by_bytes < by_count:
            cuts = np.empty(-(-merged.total // chunk_descriptors) + 1, np.int64)
            cuts[:-1] = merged.positions(np.arange(0, merged.total, chunk_descriptors))
            cuts[-1] = total
            kept = np.diff(self._bytes(cuts, merged.count)) <= chunk_bytes
        elif step:
            cuts = _evenly(total, step)
            kept = merged.numbers(cuts[1:] - 1) - merged.numbers(cuts[:-1]) < chunk_descriptors
        else:
            return None
        return cuts if kept.all() else None

    def _bytes(self, positions: Int64s, count: int) -> Int64s:
        """Return the bytes before each position of a batch of ``count`` pairs, its end included."""
        run = np.minimum(positions // count, len(self.nbytes) - 1)
        sent: Int64s = self._bytes_before[run] * count + (positions - run * count) * self.nbytes[run]
        return sent

    @cached_property
    def _lists(self) -> tuple[list[int], list[bool], list[int]]:
        """The columns as lists, from which Python reads single numbers faster."""
        return self.nbytes.tolist(), self.dense.tolist(), self._bytes_before.tolist()

    def _walk(self, merged: "_Merged", chunk_bytes: int, chunk_descriptors: int) -> Int64s:
        """Cut chunk after chunk, each where the tighter of the two budgets ends it."""
        count, total = merged.count, merged.count * len(self.nbytes)
        nbytes, dense, bytes_before = self._lists
        merged_before, first_pair = merged.before.tolist(), merged.first_pair.tolist()
        cuts = [0]
        while cuts[-1] < total:
            run, pair = divmod(cuts[-1], count)
            by_bytes = by_count = total
            limit = bytes_before[run] * count + pair * nbytes[run] + chunk_bytes
            if limit < bytes_before[-1] * count:
                at = bisect_right(bytes_before, limit // count) - 1
                by_bytes = at * count + (limit - bytes_before[at] * count) // nbytes[at]
            # A cut inside a merged descriptor splits it, so the count starts with the second part.
            number = bisect_right(first_pair, pair) - 1 if dense[run] else pair
            limit = merged_before[run] + number + chunk_descriptors
            if limit < merged.total:
                at = bisect_right(merged_before, limit) - 1
                inside = limit - merged_before[at]
                by_count = at * count + (first_pair[inside] if dense[at] else inside)
            cuts.append(max(cuts[-1] + 1, min(by_bytes, by_count)))
        return np.array(cuts, np.int64)


class _Merged:
    """The merged descriptors of one batch, numbered in order: how many before each run, and which pair begins each."""

    def __init__(self, follows: Bools, dense: Bools, dense_before: Int64s) -> None:
        self.count = len(follows)
        self.first_pair = (~follows).nonzero()[0]
        self.before = np.arange(len(dense) + 1) * self.count - dense_before * (self.count - len(self.first_pair))
        self.total = int(self.before[-1])
        self._dense = dense

    def numbers(self, positions: Int64s) -> Int64s:
        """Return the number of the merged descriptor at each position."""
        run, pair = positions // self.count, positions % self.count
        dense_number = np.searchsorted(self.first_pair, pair, side="right") - 1
        numbers: Int64s = self.before[run] + np.where(self._dense[run], dense_number, pair)
        return numbers

    def positions(self, numbers: Int64s) -> Int64s:
        """Return the position where each merged descriptor begins."""
        run = np.searchsorted(self.before, numbers, side="right") - 1
        inside = numbers - self.before[run]
        # In other runs ``inside`` may exceed ``first_pair``; the result is then not used.
        dense_pair = self.first_pair.take(inside, mode="clip")
        positions: Int64s = run * self.count + np.where(self._dense[run], dense_pair, inside)
        return positions


def neighbors(source: Ids, target: Ids) -> Bools:
    """Return for each pair whether it directly follows the previous one on both sides; False for the first."""
    here, there = np.asarray(source), np.asarray(target)
    follows = np.zeros(len(here), bool)
    np.logical_and(here[1:] - here[:-1] == 1, there[1:] - there[:-1] == 1, out=follows[1:])
    return follows


def num_neighbors(source: Ids, target: Ids) -> int:
    """Return how many pairs directly follow the previous one on both sides."""
    if isinstance(source, tuple) and isinstance(target, tuple):
        return [*zip(map(sub, source[1:], source), map(sub, target[1:], target), strict=True)].count((1, 1))
    return int(np.count_nonzero(neighbors(source, target)))


def _before(values: npt.NDArray[np.integer] | Bools) -> Int64s:
    """Return the sum of the values before each value, and the total: int64, one entry more than ``values``."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


@lru_cache(maxsize=1024)
def one_chunk(total: int) -> Int64s:
    """Return the cuts of a batch that is one chunk."""
    cuts = np.array((0, total), np.int64)
    cuts.flags.writeable = False
    return cuts


def _evenly(total: int, step: int) -> Int64s:
    cuts = np.arange(0, total + step, step, dtype=np.int64)
    cuts[-1] = total
    return cuts
