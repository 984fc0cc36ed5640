"""Decide between direct and staged reads, and plan the staged ones.

A staged read fetches contiguous ranges of the source into a staging buffer, and scatters them from there. The same
planner plans both steps.

The staging buffer is described as a third cache. Its blocks, the *places*, have one unit each, and hold the source's
part of the components that both sides have. *Fetch* is the plan from the source to the places, and *scatter* the plan
from the places to the target. A place is one unit, so both use the pairs of units of the direct plan.

In a buffer, all places of one fetched run are adjacent. Units that are adjacent on the source are then adjacent in the
buffer, and merge.

A buffer is scattered with as few local copies as possible, because each costs as much as some KiB: runs at regular
distances on both sides become one strided copy. The rows of a token-major page, its keys and values, and its layers
become axes of one copy if they are evenly spaced.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from kvflow.errors import PlanUnsound, counted
from kvflow.ids import Int64s
from kvflow.layout.component import Component, Region
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.shards import ALL_TOKENS
from kvflow.planning.certificate import PlannedGroup, certify
from kvflow.planning.match import ComponentPair, GroupPair
from kvflow.planning.runs import RunTable, Units, cut_fragments, group_by_shape, merge_runs

STAGING_BUFFERS = 8
"""Two chunks in flight for each of four peers. More buffers would be too small for a unit of a large model."""

FETCH_RUNS_MAX = 512  # most descriptors of one unit; one post fetches a unit, and must not delay other peers for long
HULL_FRAGMENTS_MAX = 1 << 18  # most fragments of the source's part of one unit, before merging: about 30 MiB of numbers
SLOTS_MAX = 4096  # most units of one buffer; more gain nothing, and descriptor numbers of all places must fit int32

# Seconds of a read of one unit, for memory of hosts. They favor direct reads: between two processes of one host, a
# descriptor takes 3.6 us over shared memory and more over TCP, a byte 0.3 ns, and a copied byte 0.2 ns; on a busy host
# bytes take three times as long, and descriptors twice.
POST_S = 200e-6  # what a read through a buffer adds even for one unit: another post, and a step after it
DESCRIPTOR_S = 2e-6
READ_BYTE_S = 0.6e-9
COPIED_BYTE_S = 0.4e-9
LAUNCH_S = 5e-6  # of one strided copy, without its bytes

AXES_MAX = 6  # axes of one copy around its contiguous bytes: tokens, heads, keys and values, layers, and two spare ones

RUNS_MAX = 1 << 16
"""Most runs of one unit. Finding those at even distances, and proving them, takes about half a microsecond each."""

FOLDED_MAX = 8192
"""Most stretches of runs at even distances: folding takes 7 us each. 128 layers of 32 heads have this many."""

COPIES_MAX = 512
"""Most copies of one unit. Proving one takes 70 us. For every unit, each copy takes some us of the read thread."""

FIXED = 7  # number of columns before those of the axes, see ``Scatter``

COLUMNS = FIXED + 3 * AXES_MAX


class CannotStage(Exception):
    """The group cannot be staged. The message gives the reason."""


class Scatter(Struct, frozen=True, eq=False):
    """The copies from a staging buffer to the target.

    Attributes:
        table: int64, shape (copies, 25). The columns of each copy: bytes of one contiguous piece; offset of place 0 in
            the buffer; bytes between places; address of unit 0 in the target; bytes between the target's blocks, kernel
            blocks and units; and for each of six axes its count, and the bytes between its elements in the buffer and
            in the target. Unused axes count 1.
        places: units that a buffer holds.
        units: the target's numbers of blocks, kernel blocks in a block, and units in a kernel block.
    """

    table: npt.NDArray[np.int64]
    places: int
    units: tuple[int, int, int]


@dataclass(slots=True, frozen=True)
class _Item:
    """Runs that form one copy: the values that they share, the start on both sides, and the axes."""

    shared: tuple[int, ...]
    source: int
    target: int
    axes: tuple[tuple[int, int, int], ...] = ()


class StridedCopies:
    """The strided copies of one staged group, without addresses. Raises ``CannotStage``.

    ``table`` is as ``Scatter.table``, with offsets in the ``region`` of each copy instead of addresses in the target.
    """

    def __init__(self, scatter: RunTable) -> None:
        if len(scatter) > RUNS_MAX:
            raise CannotStage(f"a unit has {len(scatter):,} runs (limit {RUNS_MAX:,})")
        items = _folded_runs(_columns(scatter))
        for _ in range(AXES_MAX - 1):
            items = _folded(items)
        if len(items) > COPIES_MAX:
            raise CannotStage(f"a unit takes {len(items):,} copies (limit {COPIES_MAX:,})")
        self.region: Int64s = np.array([item.shared[2] for item in items], np.int64)
        self.table: Int64s = np.array([_row(item) for item in items], np.int64)

    def __len__(self) -> int:
        return len(self.table)

    def prove(self, scatter: RunTable) -> None:
        """Check that the expanded copies are exactly the runs, in order. Raises ``PlanUnsound``."""
        pieces = [(_opened(row, int(region))) for row, region in zip(self.table, self.region, strict=True)]
        opened = np.concatenate(pieces, axis=1)
        if opened.shape != _columns(scatter).shape or np.any(opened != _columns(scatter)):
            raise PlanUnsound("the strided copies of a staged read are not its runs")


def _folded_runs(columns: Int64s) -> list[_Item]:
    """Return items of at most one axis, with one step of Python per item. Raises: CannotStage."""
    count = columns.shape[1]
    steps = np.diff(columns[6:])
    joins = np.all(columns[:6, 1:] == columns[:6, :-1], axis=0) & np.all(steps >= 0, axis=0)
    goes_on = joins[1:] & joins[:-1] & np.all(steps[:, 1:] == steps[:, :-1], axis=0)
    ends = np.append(np.flatnonzero(~goes_on) + 2, count)  # a stretch of even steps ends before these runs
    stops = np.where(joins, ends[np.searchsorted(ends, np.arange(2, count + 1))], np.arange(1, count)).tolist()
    starts, at = [0], 0
    while at < count - 1 and (at := stops[at]) < count:
        starts.append(at)
    if len(starts) > FOLDED_MAX:
        raise CannotStage(f"a unit has {len(starts):,} irregular runs (limit {FOLDED_MAX:,})")
    counts = np.diff(starts, append=count).tolist()
    firsts = columns[:, starts].T.tolist()
    axes = np.append(steps, [[0], [0]], axis=1)[:, starts].T.tolist()
    return [
        _Item(tuple(first[:6]), first[6], first[7], ((number, *step),) if number > 1 else ())
        for first, number, step in zip(firsts, counts, axes, strict=True)
    ]


def _folded(items: list[_Item]) -> list[_Item]:
    """Join neighbors that share all values and have one distance on both sides. Every item gets a new axis, or none.

    The search is greedy: runs are sorted by target, so the innermost distance repeats before it changes.
    """
    joined: list[_Item] = []
    at = 0
    while at < len(items):
        first, end = items[at], at + 1
        steps = (0, 0)
        while end < len(items) and (first.shared, first.axes) == (items[end].shared, items[end].axes):
            found = (items[end].source - items[end - 1].source, items[end].target - items[end - 1].target)
            if found[0] < 0 or found[1] < 0 or (end > at + 1 and found != steps):
                break
            steps, end = found, end + 1
        axes = ((end - at, *steps), *first.axes) if end > at + 1 else first.axes
        joined.append(_Item(first.shared, first.source, first.target, axes))
        at = end
    return joined


def _columns(scatter: RunTable) -> Int64s:
    """Return the columns of runs: what the runs of a copy share, then offsets in the buffer and in the target."""
    source, target = scatter.source, scatter.target
    return np.stack([scatter.nbytes, source[2], *target[[0, 2, 3, 4]], source[1], target[1]])


def _opened(row: Int64s, region: int) -> Int64s:
    """Return the runs of one copy, as ``_columns`` does."""
    axes = row[FIXED:].reshape(AXES_MAX, 3)
    index = np.indices(axes[:, 0].tolist(), np.int64).reshape(AXES_MAX, -1)
    source, target = row[1] + axes[:, 1] @ index, row[3] + axes[:, 2] @ index
    shared = np.array([row[0], row[2], region, *row[4:FIXED]], np.int64)
    return np.concatenate([np.repeat(shared[:, None], index.shape[1], axis=1), [source, target]])


def _row(item: _Item) -> list[int]:
    nbytes, slot_stride, _, *strides = item.shared
    axes = [*item.axes, *[(1, 0, 0)] * (AXES_MAX - len(item.axes))]
    return [nbytes, item.source, slot_stride, item.target, *strides, *(number for axis in axes for number in axis)]


def room_left(room: Int64s, counts: Int64s, strides: Int64s) -> Int64s:
    """Return the bytes that remain of ``room`` after every axis was walked to its end; -1 if an axis leaves it.

    No term may overflow, so nothing is multiplied before it is known to fit. All are int64: ``room`` of shape
    (copies,), ``counts``, at least 1, and ``strides``, not negative, of shape (copies, axes).
    """
    for axis in range(counts.shape[1]):
        steps, stride = counts[:, axis] - 1, strides[:, axis]
        fits = (steps == 0) | ((room >= 0) & (stride <= room // np.maximum(steps, 1)))
        room = np.where(fits, room - np.where(fits, stride, 0) * steps, -1)
    return room


class StagedRuns(Struct, frozen=True, eq=False):
    """The copies of one pair of units through a place."""

    places: int  # units in one buffer
    buffer_bytes: int
    fetch: RunTable  # from the source to a place
    scatter: RunTable  # from a place to the target
    copies: StridedCopies  # the runs of ``scatter``
    units: Units  # how places are cut: each is one unit
    fetching: GroupPair  # that ``fetch`` is planned for, source to places
    landing: GroupPair  # that ``scatter`` is planned for, places to target

    @property
    def place_bytes(self) -> int:
        """Bytes that are read for one unit."""
        return self.fetch.unit_bytes


def buffer_bytes_of(staging_bytes: int) -> int:
    """Return the length of one buffer of the staging memory, in whole pages."""
    return staging_bytes // STAGING_BUFFERS // 4096 * 4096


def stage(group: PlannedGroup, staging_bytes: int) -> StagedRuns:
    """Plan both steps of a staged read, and prove the fetch. ``plan_transfer`` proves the scatter.

    Raises:
        CannotStage: a unit does not fit, or its pieces cannot lie densely in a place.
        PlanUnsound: the proof has failed.
    """
    pair, source, target = group.pair, group.source, group.target
    buffer_bytes = buffer_bytes_of(staging_bytes)
    hull = [_all_held(each.layer, each.source, each.source) for each in pair.pairs]
    places = _places(group_by_shape(hull), source.tokens, buffer_bytes)
    pieces = [(parts, cut_fragments(parts, source, source)) for parts in group_by_shape(hull)]
    stretches = merge_runs([table for _, table in pieces])
    if len(stretches) > FETCH_RUNS_MAX:
        raise CannotStage(f"the source's unit has {len(stretches):,} pieces, more than {FETCH_RUNS_MAX}")
    units = Units(source.tokens, 1, 1, source.stripe)
    buffer = _Buffer(stretches, places, units.tokens)
    staged = {
        (layer, part.role): part
        for parts, table in pieces
        for layer, part in buffer.components(parts, table.source[:2].reshape(2, len(parts), -1))
    }
    slots = _slots_group(pair, staged, units)
    fetched = [_all_held(each.layer, each.source, staged[each.layer, each.source.role]) for each in pair.pairs]
    landed = [replace(each, source=staged[each.layer, each.source.role]) for each in pair.pairs]
    fetching = replace(pair, target=slots, pairs=tuple(fetched))
    landing = replace(pair, source=slots, pairs=tuple(landed))
    fetch = merge_runs([cut_fragments(parts, source, units) for parts in group_by_shape(fetching.pairs)])
    scatter = merge_runs([cut_fragments(parts, units, target) for parts in group_by_shape(landing.pairs)])
    staged_runs = StagedRuns(places, buffer_bytes, fetch, scatter, StridedCopies(scatter), units, fetching, landing)
    prove(staged_runs, source)
    return staged_runs


def prove(staged: StagedRuns, source: Units) -> None:
    """Prove that places get every byte of a unit, do not overlap, and are scattered by copies that match the runs.

    Raises:
        PlanUnsound: the proof has failed.
        SpecInvalid: the places leave the buffer.
    """
    group, fetch = staged.fetching.target, staged.fetch
    cache = Manifest(staged.places, (Region(0, staged.buffer_bytes),), (group,))
    # A place may have fewer tokens than the width of a stripe; a block of a cache may not.
    replace(cache, groups=(replace(group, stripe=ALL_TOKENS),)).check()
    if not certify(cache, [PlannedGroup(staged.fetching, fetch, source, staged.units)]).complete:
        raise PlanUnsound("a byte of a staging place is not read")
    # The certificate checks one place at a time.
    order = np.argsort(fetch.target[1])
    offset, nbytes = fetch.target[1, order], fetch.nbytes[order]
    if np.any(fetch.target[2] != fetch.nbytes) or np.any(offset[1:] - offset[:-1] < staged.places * nbytes[:-1]):
        raise PlanUnsound("two staging places share a byte")
    staged.copies.prove(staged.scatter)


def _places(shapes: Sequence[Sequence[ComponentPair]], tokens: int, buffer_bytes: int) -> int:
    """Return how many units a buffer holds. Fragments of a hostile source are counted, not walked."""
    nbytes = fragments = 0
    for parts in shapes:
        extents, (walked, _) = parts[0].extents(tokens), parts[0].walk
        # Python integers do not overflow.
        nbytes += math.prod(extents) * parts[0].source.item_bytes * len(parts)
        fragments += math.prod(extents[:walked]) * len(parts)
    if nbytes > buffer_bytes:
        raise CannotStage(f"a unit of {nbytes:,} bytes does not fit a staging buffer of {buffer_bytes:,}")
    if fragments > HULL_FRAGMENTS_MAX:
        raise CannotStage(f"the source's unit has {fragments:,} fragments, more than {HULL_FRAGMENTS_MAX:,}")
    return min(SLOTS_MAX, buffer_bytes // nbytes)


class _Buffer:
    """Where the dense pieces of a source's unit lie in a buffer: one after the other, each for all places."""

    def __init__(self, stretches: RunTable, places: int, tokens: int) -> None:
        self._region, self._offset = stretches.source[:2]
        self._nbytes = stretches.nbytes
        # The stretches are sorted, and adjacent pieces are merged into one.
        shared = self._offset[1:] < self._offset[:-1] + self._nbytes[:-1]
        if np.any(shared & (self._region[1:] == self._region[:-1])):
            raise CannotStage("components share bytes on the source")
        self._base = (np.cumsum(stretches.nbytes) - stretches.nbytes) * places
        self._tokens = tokens
        # Combine region and rank of the offset into one int64: only the order of offsets matters, not their size.
        self._offsets, rank = np.unique(self._offset, return_inverse=True)
        self._place = self._region * len(self._offsets) + rank

    def components(self, pairs: Sequence[ComponentPair], starts: Int64s) -> Iterator[tuple[str, Component]]:
        """Describe components of one shape in the places. Yield the layer and the component.

        ``starts``: int64, shape (2, pairs, fragments): region and offset of their fragments of one unit on the source.
        Raises ``CannotStage`` if a component is not an affine map in the places.
        """
        walked, _ = pairs[0].walk
        region, offset = starts
        rank = np.searchsorted(self._offsets, offset, side="right") - 1
        at = np.searchsorted(self._place, region * len(self._offsets) + rank, side="right") - 1
        inside, sizes = offset - self._offset[at], self._nbytes[at]
        if np.any(sizes != sizes[:, :1]):
            raise CannotStage(f"{pairs[0].source.role} lies in pieces of unlike sizes on the source")
        extents = pairs[0].extents(self._tokens)
        places = self._base[at] + inside
        strides = _strides(places, extents[:walked])
        for pair, place, size, found in zip(
            pairs, places[:, 0].tolist(), sizes[:, 0].tolist(), strides.tolist(), strict=True
        ):
            part = pair.source
            yield (
                pair.layer,
                replace(
                    part,
                    region=0,
                    offset=place,
                    block_stride=size,
                    kernel_stride=0,
                    extents=extents,
                    strides=(*found, *part.strides[walked:]),
                ),
            )


def _strides(places: Int64s, extents: Sequence[int]) -> Int64s:
    """Return the strides, shape (components, walked axes), of fragments at ``places``. Raises: CannotStage."""
    steps = [math.prod(extents[axis + 1 :]) if extent > 1 else 0 for axis, extent in enumerate(extents)]
    strides = places[:, steps] - places[:, :1]
    index = np.indices(extents, np.int64).reshape(len(extents), places.shape[1])
    if np.any(places[:, :1] + strides @ index != places):
        raise CannotStage("the source's pieces are unevenly spaced")
    return strides


def _slots_group(pair: GroupPair, staged: dict[tuple[str, str], Component], units: Units) -> ManifestGroup:
    """Describe the places of a buffer as a group: each place is a block with one unit."""
    layers = []
    for layer in pair.source.layers:
        parts = tuple(staged[layer.name, part.role] for part in layer.components if (layer.name, part.role) in staged)
        if parts:
            layers.append(Layer(layer.name, layer.kind, layer.window, parts))
    return ManifestGroup(pair.source.kind, units.tokens or pair.source.block_size, tuple(layers), units.stripe)


def _all_held(layer: str, source: Component, target: Component) -> ComponentPair:
    """Pair everything that the source holds of a component with the same part in another cache."""
    return ComponentPair(layer, source, target, source.held.first, source.held.count)


class Choice(Struct, frozen=True, eq=False):
    """How one pair of groups is read, and the reason."""

    staged: StagedRuns | None = None
    reason: str = ""  # the costs of both ways, and why one was chosen; empty if nothing may be staged


DIRECT = Choice()


def choose(group: PlannedGroup, sides: tuple[Manifest, Manifest], staging_bytes: int) -> Choice:
    """Compare the costs of a direct and a staged read of one unit; prefer the direct one if they are equal.

    Both estimates ignore that neighbors merge, because block ids are not known yet. If direct runs merge, the stretches
    on the source are not longer than the runs, so staging gains nothing. Raises ``PlanUnsound`` if a staged plan failed
    its proof.
    """
    runs, nbytes = group.runs, group.runs.unit_bytes
    direct_s = len(runs) * DESCRIPTOR_S + nbytes * READ_BYTE_S
    copied_s = POST_S + nbytes * COPIED_BYTE_S
    words = f"direct takes {counted(len(runs), 'descriptor')} and about {direct_s * 1e6:,.0f} us"
    # No staged read takes less; most groups need no plan of one.
    if direct_s <= copied_s + DESCRIPTOR_S + nbytes * READ_BYTE_S + LAUNCH_S:
        return Choice(None, f"{words}; direct, because staging is not cheaper")
    for side, manifest, numbers in zip(("source", "target"), sides, (runs.source[0], runs.target[0]), strict=True):
        found = {manifest.regions[region].memory for region in set(numbers.tolist())}
        if found != {"DRAM"}:
            return Choice(None, f"{words}; not staged, because the {side} is {min(found - {'DRAM'})}")
    try:
        staged = stage(group, staging_bytes)
    except CannotStage as error:
        return Choice(None, f"{words}; not staged, because {error}")
    fetch, copies = len(staged.fetch), len(staged.copies)
    fetch_s = fetch * DESCRIPTOR_S + staged.place_bytes * READ_BYTE_S
    staged_s = copied_s + fetch_s + copies * LAUNCH_S
    words += f", staged {counted(fetch, 'descriptor')}, {counted(copies, 'copy', 'copies')} and about "
    words += f"{staged_s * 1e6:,.0f} us"
    if staged_s < direct_s:
        return Choice(staged, f"{words}; staged, because it is {direct_s / staged_s:,.1f} times cheaper")
    return Choice(None, f"{words}; direct, because staging is not cheaper")
