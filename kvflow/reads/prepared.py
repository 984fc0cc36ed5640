"""Check prepared lists, bind pairs of units to their descriptors in portions, and estimate what a post costs. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from kvflow.layout.component import Region
from kvflow.planning.bind import Bound
from kvflow.planning.chunks import one_chunk
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import CheckedList, Chunk, Portion, Share, Staged
from kvflow.reads.bounds import (
    CheckedScatter,
    OutOfBounds,
    check_bound,
    check_ends,
    check_inside,
    check_rows,
    check_scatter,
    check_staged_bound,
)
from kvflow.reads.contract import CHUNK_BYTES_MAX, CHUNK_DESCRIPTORS_MAX, PreparedList
from kvflow.reads.pacing import Pace
from kvflow.reads.staging import StagingMemory

PORTION_BYTES_MAX = 32 << 20
"""Most bytes that are read for one portion, unless one pair has more: four chunks, so that binding is amortized."""

PORTION_DESCRIPTORS_MAX = 8192  # most descriptors of one portion before they merge: about 100 us of binding

# Estimates of the seconds that a post blocks its thread. Each post corrects them.

READ_S = 12e-6  # seconds of one read without its posts: the fence, and the work in Python

POST_S = 8e-6
DESCRIPTOR_S = 0.5e-6
BYTE_S = 1 / 6e9
"""Seconds of one chunk over shared memory: per call, per descriptor before merging, and per byte. ``PostCosts.ratio``
compares measured times with these estimates."""

SLOWEST = 64.0
"""A post counts as at most this many times slower than its estimate, so that a peer recovers within about ten posts."""

WEIGHT = 0.25  # the weight of the last post: after a pause, one in ten takes five times as long, and must not dominate


class PostCosts:
    """The measured costs of posts for one peer: ``ratio`` of measured times to the estimates. Thread: one at a time."""

    def __init__(self) -> None:
        self.ratio = 1.0

    def learn(self, measured_s: float, expected_s: float, within_s: float = 0.0) -> None:
        """Record how long a post took, and the estimate; forget half of what was learned if it took less than this.

        ``within_s``: what was allowed to a post that was handed over only because it was expected to take longer.
        """
        self.ratio += (min(SLOWEST, measured_s / expected_s) - self.ratio) * WEIGHT
        if measured_s < within_s:
            self.ratio /= 2


def check_list(prepared_list: PreparedList, regions: Sequence[Region], staging: StagingMemory) -> CheckedList:
    """Check the rows of a prepared list, and return what reading with it needs. Raises ``OutOfBounds``."""
    source, target = check_rows(prepared_list.source_rows), check_rows(prepared_list.target_rows)
    binding = prepared_list.binding
    if binding is None:
        raise OutOfBounds("a prepared list without a binding")
    staged = None
    descriptors, nbytes = max(1, binding.unit_descriptors), max(1, binding.read_bytes)
    units = (source.count // descriptors, target.count // descriptors)
    if prepared_list.scatter is None:
        check_inside(target, regions, prepared_list.target_memory)
    else:
        buffer_bytes = staging.use.buffer_bytes
        checked = check_scatter(prepared_list, source, target, buffer_bytes=buffer_bytes, regions=regions)
        target = staging.rows(target)
        staged = Staged(checked, staging.scatterer(checked))
        units = (checked.source_units, math.prod(checked.units))
    if binding.number is not None:
        # Once for the list: what holds of the first unit and of the last one holds of all between them.
        ends = binding.number((0, units[0] - 1), (0, units[1] - 1))
        check_ends(Bound(*ends, one_chunk(ends[0].size), 2 * binding.unit_bytes), units, source, target)
    return CheckedList(
        prepared_list,
        source,
        target,
        staged,
        *units,
        pair_bytes=binding.unit_bytes,
        pair_s=descriptors * DESCRIPTOR_S + binding.unit_bytes * BYTE_S,
        portion_pairs=max(1, min(PORTION_BYTES_MAX // nbytes, PORTION_DESCRIPTORS_MAX // descriptors)),
        # Nothing of a cancelled read is copied out of its buffer, so two reads never share a buffer.
        chunk_pairs=0 if staged else min(CHUNK_BYTES_MAX // nbytes, CHUNK_DESCRIPTORS_MAX // descriptors),
    )


def paced_pairs(prepared_list: CheckedList, pace: Pace) -> int:
    """Return the most pairs of one read that are bound together at this pace: those of a chunk, or more."""
    binding = prepared_list.prepared_list.binding
    assert binding is not None
    descriptors, nbytes = max(1, binding.unit_descriptors), max(1, binding.read_bytes)
    of_chunk = min(pace.chunk_bytes // nbytes, max(pace.chunk_descriptors, PORTION_DESCRIPTORS_MAX) // descriptors)
    return max(prepared_list.portion_pairs, of_chunk)


def bind_portion(
    prepared_list: CheckedList,
    pairs: UnitPairs,
    shares: tuple[Share, ...],
    chunk_bytes: int = CHUNK_BYTES_MAX,
    chunk_descriptors: int = CHUNK_DESCRIPTORS_MAX,
) -> Portion:
    """Bind checked pairs of a prepared list, for the reads of ``shares``.

    Chunks have at most ``chunk_bytes``, and ``chunk_descriptors`` after neighbors merge. Raises ``OutOfBounds`` if the
    result of the binding does not fit the list.
    """
    binding = prepared_list.prepared_list.binding
    assert binding is not None
    bound = binding.bind(pairs, chunk_bytes=chunk_bytes, chunk_descriptors=chunk_descriptors)
    if prepared_list.staged is None:
        check_bound(bound, len(pairs.source), prepared_list.source, prepared_list.target)
    else:
        check_staged_bound(bound, len(pairs.source), prepared_list.staged.checked)
    peer, list_id = prepared_list.prepared_list.peer, prepared_list.prepared_list.list_id
    return Portion(peer, list_id, bound.source_index, bound.target_index, bound.cuts, bound.nbytes, shares)


def bind_whole(checked: CheckedList, pairs: UnitPairs, share: Share) -> Portion:
    """Bind checked pairs of one read that are one chunk of a list without staging. Raises as ``bind_portion``."""
    prepared_list = checked.prepared_list
    binding = prepared_list.binding
    assert binding is not None
    if binding.number is None or not isinstance(pairs.source, tuple):
        return bind_portion(checked, pairs, (share,))
    source, target = binding.number(pairs.source, pairs.target)  # which ``check_list`` has checked for every unit
    nbytes = share.pairs * binding.unit_bytes
    return Portion(prepared_list.peer, prepared_list.list_id, source, target, one_chunk(source.size), nbytes, (share,))


def fetching(chunk: Chunk, scatter: CheckedScatter) -> Chunk:
    """Return the chunk of descriptors that fetches a chunk of pairs of units into its buffer.

    Its portion has only these pairs: descriptor ``k`` belongs to pair ``first + k % (stop - first)``.
    """
    portion, count = chunk.portion, chunk.stop - chunk.first
    (share,) = portion.shares
    run = np.arange(scatter.fetch_runs, dtype=np.int64)[:, None]
    source = run * scatter.source_units + portion.source_index[chunk.first : chunk.stop]
    target = (chunk.buffer * scatter.fetch_runs + run) * scatter.places + np.arange(count)
    fetched = Portion(
        peer=portion.peer,
        list_id=portion.list_id,
        source_index=source.astype(np.int32).ravel(),
        target_index=target.astype(np.int32).ravel(),
        cuts=np.array([0, source.size], np.int64),
        nbytes=0,  # the pairs of units were checked
        shares=(share._replace(pairs=count),),
    )
    return Chunk(fetched, 0, source.size)
