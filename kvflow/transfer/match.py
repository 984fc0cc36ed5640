"""Which components of two manifests hold the same thing, and where they must agree.

Layers are matched by name and components by role, whatever group they are in. What a plan can convert
(layout, block size, shard) is not compared; what it cannot is refused with the field and both values.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup

NAMES_SHOWN = 4


PieceName = tuple[str, str]
"""Layer and role."""

Piece = tuple[int, int]
"""First index and count along the sharded axis, in the numbers of the whole model."""

Pieces = Mapping[PieceName, Piece]
"""What is taken of one source: never more than it holds."""


class ComponentPair(Struct, frozen=True):
    """One component that both sides hold at least in part.

    Attributes:
        layer: name.
        source: the producer's component.
        target: the consumer's component.
        first: number, in the whole model, of the first index along the sharded axis that both hold.
        count: how many both hold.
    """

    layer: str
    source: Component
    target: Component
    first: int
    count: int

    def extents(self, tokens: int) -> tuple[int, ...]:
        """Return the extents of what both hold, with so many tokens."""
        named = {self.target.token_axis: tokens, self.target.shard_axis: self.count}
        return tuple(named.get(axis, extent) for axis, extent in enumerate(self.target.extents))

    def start(self, part: Component) -> int:
        """Return where one of the two has the first byte that both hold."""
        skipped = self.first - part.first
        return part.offset + (skipped * part.strides[part.shard_axis] if part.shard_axis >= 0 else 0)

    @property
    def walk(self) -> tuple[int, int]:
        """How many leading axes must be walked, and how many bytes lie together below them on both sides.

        Tokens are always walked: blocks of another size cut there.
        """
        nbytes = self.target.item_bytes
        extents = self.extents(0)
        for axis in reversed(range(len(extents))):
            touching = extents[axis] == 1 or self.source.strides[axis] == self.target.strides[axis] == nbytes
            if axis == self.target.token_axis or not touching:
                return axis + 1, nbytes
            nbytes *= extents[axis]
        return 0, nbytes


class GroupPair(Struct, frozen=True):
    """Layers that lie in one group on the source and in one group on the target.

    Attributes:
        source_group: index.
        target_group: index.
        source: the producer's group.
        target: our group.
        pairs: what both hold of it.
    """

    source_group: int
    target_group: int
    source: ManifestGroup
    target: ManifestGroup
    pairs: tuple[ComponentPair, ...]

    @property
    def aligned(self) -> bool:
        """Whether both sides hold the same tokens of a request, at the same local positions."""
        return self.source.stripe.aligned(self.target.stripe)

    @property
    def token_share(self) -> Fraction:
        """Which part of the target's tokens the source holds; 1 where ranks do not divide them."""
        return self.source.stripe.share_of(self.target.stripe)


def match_groups(source: Manifest, target: Manifest, pieces: Pieces | None = None) -> tuple[GroupPair, ...]:
    """Match every layer that both manifests have.

    Args:
        source: the producer's manifest.
        target: the consumer's manifest.
        pieces: what is to be taken of this source; None: all that both sides hold.

    Returns:
        Pairs of groups of which both sides hold a part of the heads, or of what else ranks divide, and some tokens.

    Raises:
        LayoutMismatch: no layer is common, or a common one differs where it must agree.
    """
    require_same_model(source, target)
    require_common_layer([source], target)
    there = {layer.name: (index, layer) for index, _, layer in _layers(source)}
    found: dict[tuple[int, int], list[ComponentPair]] = {}
    for target_group, _, layer in _layers(target):
        if layer.name not in there:
            continue
        source_group, layer_there = there[layer.name]
        for (path, value_there), (_, value) in zip(layer_there.must_agree(), layer.must_agree(), strict=False):
            if value_there != value:
                raise LayoutMismatch(f"{layer.name}.{path}", value_there, value)
        found.setdefault((source_group, target_group), []).extend(_match_components(layer_there, layer, pieces))
    matched = (
        GroupPair(
            source_group,
            target_group,
            source.groups[source_group],
            target.groups[target_group],
            tuple(pairs),
        )
        for (source_group, target_group), pairs in found.items()
        if pairs
    )
    return tuple(pair for pair in matched if pair.token_share)


def require_same_model(source: Manifest, target: Manifest) -> None:
    """Check that two workers that say what they serve serve the same.

    Raises:
        LayoutMismatch: names the model, its revision or its dtype, and both values.
    """
    for (field, theirs), (_, ours) in zip(source.identity.must_agree(), target.identity.must_agree(), strict=True):
        if theirs and ours and theirs != ours:
            raise LayoutMismatch(field, theirs, ours, remedy="Serve the same model on both sides.")


def have_common_layer(source: Manifest, target: Manifest) -> bool:
    """Tell whether any layer is in both; pipeline stages of one model may have none."""
    there = {layer.name for _, _, layer in _layers(source)}
    return any(layer.name in there for _, _, layer in _layers(target))


def require_common_layer(sources: Sequence[Manifest], target: Manifest) -> None:
    """Check that any of the sources has any layer of the target.

    Raises:
        LayoutMismatch: none has; names the layers of the first.
    """
    if sources and not any(have_common_layer(source, target) for source in sources):
        raise LayoutMismatch("layers", _names(sources[0]), _names(target))


def _layers(manifest: Manifest) -> Iterator[tuple[int, ManifestGroup, Layer]]:
    for index, group in enumerate(manifest.groups):
        for layer in group.layers:
            yield index, group, layer


def _match_components(source: Layer, target: Layer, pieces: Pieces | None) -> list[ComponentPair]:
    """Pair the components of two layers that agree."""
    there = {component.role: component for component in source.components}
    pairs = []
    for ours in target.components:
        theirs = there[ours.role]
        first = max(theirs.first, ours.first)
        count = min(theirs.first + theirs.held.count, ours.first + ours.held.count) - first
        if pieces is not None:
            first, count = pieces.get((target.name, ours.role), (first, 0))
        if count > 0:
            pairs.append(ComponentPair(target.name, theirs, ours, first, count))
    return pairs


def _names(manifest: Manifest) -> list[str]:
    names = [layer.name for _, _, layer in _layers(manifest)]
    return names if len(names) <= NAMES_SHOWN else [*names[:NAMES_SHOWN], f"... {len(names)} in all"]
