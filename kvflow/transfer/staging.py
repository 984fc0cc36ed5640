"""Read dense pieces of a source into a staging buffer, and scatter them from there: two plans by the same planner.

The staging buffer is described as one more cache. Its blocks, the *slots*, have exactly one unit each, and hold what
the source holds of the components that both sides have. *Fetch* is the plan from the source to the slots, *scatter* the
one from the slots to the target. A slot is one unit, so the pairs of units of the direct plan serve both.

Inside a buffer all slots of one fetched run lie together. What follows on the source then follows in the buffer as
well, and merges.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvflow.errors import PlanUnsound
from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.region import Region
from kvflow.layout.stripes import ALL_TOKENS
from kvflow.transfer.boxes import Boxes, TooManyCopies
from kvflow.transfer.certificate import certify
from kvflow.transfer.match import ComponentPair, GroupPair
from kvflow.transfer.runs import Int64s, RunTable, Units, alike, fragments, merged

STAGING_BUFFERS = 8
"""Into how many buffers the staging memory is divided: two for each of four peers, as many as each has chunks in
flight. More would make each too small for a unit of a large model."""

FETCH_RUNS_MAX = 512
"""Descriptors of one unit. A unit is fetched by one post, which must not keep other peers waiting for long."""

HULL_FRAGMENTS_MAX = 1 << 18
"""Fragments of all that the source holds of one unit, before merging: some 30 MiB of numbers. 128 layers of 128-token
blocks have 32,768."""

SLOTS_MAX = 4096
"""Units of one buffer. More tiny ones gain nothing, and the descriptors of all slots are numbered by int32."""


class CannotStage(Exception):
    """This group is read directly whatever it costs; the text says why."""


class StagedRuns(Struct, frozen=True, eq=False):
    """What one pair of units copies on its way through a slot.

    Attributes:
        slots: units that one buffer holds.
        buffer_bytes: length of one buffer.
        fetch: from the source to a slot.
        scatter: from a slot to the target.
        boxes: the same as few strided copies.
        units: how slots are cut: each is one unit.
        fetching: the pair of groups that ``fetch`` is planned for, source to slots.
        landing: the pair of groups that ``scatter`` is planned for, slots to target.
    """

    slots: int
    buffer_bytes: int
    fetch: RunTable
    scatter: RunTable
    boxes: Boxes
    units: Units
    fetching: GroupPair
    landing: GroupPair

    @property
    def slot_bytes(self) -> int:
        """Bytes that are read for one unit."""
        return self.fetch.unit_bytes


def buffer_bytes_of(staging_bytes: int) -> int:
    """Return the length of one of the buffers that so much memory is divided into: whole pages."""
    return staging_bytes // STAGING_BUFFERS // 4096 * 4096


def stage(pair: GroupPair, source: Units, target: Units, *, staging_bytes: int) -> StagedRuns:
    """Plan both halves of a staged read, and prove the first; the second is proven with the whole plan.

    Args:
        pair: what both sides hold.
        source: how source blocks are cut.
        target: how target blocks are.
        staging_bytes: of all buffers.

    Raises:
        CannotStage: a unit does not fit, or its pieces cannot lie densely in a slot.
        PlanUnsound: the proof has failed.
    """
    buffer_bytes = buffer_bytes_of(staging_bytes)
    hull = [_all_held(each.layer, each.source, each.source) for each in pair.pairs]
    slots = _slots(alike(hull), source.tokens, buffer_bytes)
    pieces = [(parts, fragments(parts, source, source)) for parts in alike(hull)]
    stretches = merged([table for _, table in pieces])
    if len(stretches) > FETCH_RUNS_MAX:
        raise CannotStage(f"the source's unit has {len(stretches):,} pieces, more than {FETCH_RUNS_MAX}")
    units = Units(source.tokens, 1, 1, source.stripe)
    buffer = _Buffer(stretches, slots, units.tokens)
    staged = {
        (layer, part.role): part
        for parts, table in pieces
        for layer, part in buffer.components(parts, table.source[:2].reshape(2, len(parts), -1))
    }
    group = _slots_group(pair, staged, units)
    fetched = [_all_held(each.layer, each.source, staged[each.layer, each.source.role]) for each in pair.pairs]
    landed = [replace(each, source=staged[each.layer, each.source.role]) for each in pair.pairs]
    fetching = replace(pair, target=group, pairs=tuple(fetched))
    landing = replace(pair, source=group, pairs=tuple(landed))
    fetch = merged([fragments(parts, source, units) for parts in alike(fetching.pairs)])
    scatter = merged([fragments(parts, units, target) for parts in alike(landing.pairs)])
    try:
        boxes = Boxes(scatter)
    except TooManyCopies as error:
        raise CannotStage(str(error)) from error
    staged_runs = StagedRuns(slots, buffer_bytes, fetch, scatter, boxes, units, fetching, landing)
    prove(staged_runs, source)
    return staged_runs


def prove(staged: StagedRuns, source: Units) -> None:
    """Prove that a unit is fetched into a slot byte for byte, that slots lie apart, and that boxes are what scatters.

    That the right bytes are scattered is proven with the whole plan.

    Args:
        staged: the runs.
        source: how source blocks are cut.

    Raises:
        PlanUnsound: the proof has failed.
        SpecInvalid: the slots leave the buffer.
    """
    group, fetch = staged.fetching.target, staged.fetch
    cache = Manifest(staged.slots, (Region(0, staged.buffer_bytes),), (group,))
    # A slot may be smaller than a stripe is wide; blocks of caches may not.
    replace(cache, groups=(replace(group, stripe=ALL_TOKENS),)).check()
    if not certify(cache, [(staged.fetching, fetch, source, staged.units)]).complete:
        raise PlanUnsound("a byte of a staging slot is not read")
    # The certificate knows of one slot at a time.
    order = np.argsort(fetch.target[1])
    offset, nbytes = fetch.target[1, order], fetch.nbytes[order]
    if np.any(fetch.target[2] != fetch.nbytes) or np.any(offset[1:] - offset[:-1] < staged.slots * nbytes[:-1]):
        raise PlanUnsound("two staging slots share a byte")
    staged.boxes.prove(staged.scatter)


def _slots(shapes: Sequence[Sequence[ComponentPair]], tokens: int, buffer_bytes: int) -> int:
    """Return how many units a buffer holds. What the source holds may be hostile, and is not walked before this.

    Args:
        shapes: all that the source holds, by shape.
        tokens: of one unit.
        buffer_bytes: length of the buffer.

    Raises:
        CannotStage: not one, or its fragments are too many.
    """
    nbytes = fragments = 0
    for parts in shapes:
        extents, (walked, _) = parts[0].extents(tokens), parts[0].walk
        # Integers of Python, which do not overflow.
        nbytes += math.prod(extents) * parts[0].source.item_bytes * len(parts)
        fragments += math.prod(extents[:walked]) * len(parts)
    if nbytes > buffer_bytes:
        raise CannotStage(f"a unit of {nbytes:,} bytes does not fit a staging buffer of {buffer_bytes:,}")
    if fragments > HULL_FRAGMENTS_MAX:
        raise CannotStage(f"the source's unit has {fragments:,} fragments, more than {HULL_FRAGMENTS_MAX:,}")
    return min(SLOTS_MAX, buffer_bytes // nbytes)


class _Buffer:
    """Where the dense pieces of a source's unit lie in a buffer: one after the other, all slots of each together.

    Args:
        stretches: the pieces, by region and offset.
        slots: units that the buffer holds.
        tokens: of one unit.

    Raises:
        CannotStage: two pieces share bytes, so that they cannot lie apart.
    """

    def __init__(self, stretches: RunTable, slots: int, tokens: int) -> None:
        self._region, self._offset = stretches.source[:2]
        self._nbytes = stretches.nbytes
        # They are sorted, and whatever lies behind one another without a gap is one of them.
        shared = self._offset[1:] < self._offset[:-1] + self._nbytes[:-1]
        if np.any(shared & (self._region[1:] == self._region[:-1])):
            raise CannotStage("components share bytes on the source")
        self._base = (np.cumsum(stretches.nbytes) - stretches.nbytes) * slots
        self._tokens = tokens
        # Region and offset as one number, small enough for int64: what counts is the order of offsets, not their size.
        self._offsets, rank = np.unique(self._offset, return_inverse=True)
        self._place = self._region * len(self._offsets) + rank

    def components(self, pairs: Sequence[ComponentPair], starts: Int64s) -> Iterator[tuple[str, Component]]:
        """Describe components of one shape as they lie in the slots; yield layer and component.

        Args:
            pairs: all that the source holds of them.
            starts: int64, shape (2, pairs, fragments): region and offset of their fragments of one unit on the source.

        Raises:
            CannotStage: one is no affine map any more.
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
    """Return the strides of fragments that lie at these places, shape (components, axes that were walked).

    Args:
        places: int64, shape (components, fragments).
        extents: of the axes that were walked.

    Raises:
        CannotStage: none lead there.
    """
    steps = [math.prod(extents[axis + 1 :]) if extent > 1 else 0 for axis, extent in enumerate(extents)]
    strides = places[:, steps] - places[:, :1]
    index = np.indices(extents, np.int64).reshape(len(extents), places.shape[1])
    if np.any(places[:, :1] + strides @ index != places):
        raise CannotStage("the source's pieces are unevenly spaced")
    return strides


def _slots_group(pair: GroupPair, staged: dict[tuple[str, str], Component], units: Units) -> ManifestGroup:
    """Describe the slots of a buffer as a group: one block for each, one unit in each block."""
    layers = []
    for layer in pair.source.layers:
        parts = tuple(staged[layer.name, part.role] for part in layer.components if (layer.name, part.role) in staged)
        if parts:
            layers.append(Layer(layer.name, layer.kind, layer.window, parts))
    return ManifestGroup(pair.source.kind, units.tokens or pair.source.block_size, tuple(layers), units.stripe)


def _all_held(layer: str, source: Component, target: Component) -> ComponentPair:
    """Pair all that the source holds of a component with the same elsewhere."""
    return ComponentPair(layer, source, target, source.held.first, source.held.count)
