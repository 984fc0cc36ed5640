"""Match the components of two manifests, and check the fields that must agree.

Layers match by name and components by role, in any groups. Fields that a plan can convert (layout, block size, shard)
are not compared. A difference in any other field raises an error with the field and both values.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.events import LayersOmitted
from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup

NAMES_SHOWN = 4

ALSO_NEEDED = {
    "opaque": " Opaque pages also need the same attention backend, block size and number of ranks.",
    "mamba": " States of vLLM also need the same number of ranks.",
}
"""Kind of a layer -> what its caches must also have in common."""

SAME = {
    "model": "Serve the same model on both sides.",
    "revision": "Serve the same revision of the model on both sides (model_revision).",
    "model_dtype": "Compute in the same data type on both sides (model_dtype).",
}
"""Field in which models may differ -> remedy."""

COSTS = {
    "target": "each request begins without them: results are the same, but a draft model has fewer drafts accepted",
    "source": "that engine computes them for nothing",
}
"""Side that alone has layers -> what this costs."""

SAME_DRAFT = "Give both sides the same draft model, or neither."

ComponentName = tuple[str, str]  # layer and role
HeadRange = tuple[int, int]  # first index and count along the sharded axis, counted in the whole model
HeadRanges = Mapping[ComponentName, HeadRange]  # the ranges to read from one source, which holds all of them


class ComponentPair(Struct, frozen=True):
    """One component of which both sides hold a part; ``first`` and ``count`` are what both hold of the sharded axis."""

    layer: str
    source: Component
    target: Component
    first: int
    count: int

    def extents(self, tokens: int) -> tuple[int, ...]:
        """Return the lengths of the axes of the common part, for ``tokens`` tokens."""
        named = {self.target.token_axis: tokens, self.target.shard_axis: self.count}
        return tuple(named.get(axis, extent) for axis, extent in enumerate(self.target.extents))

    def start(self, part: Component) -> int:
        """Return the offset of the first common byte in one of the two components."""
        skipped = self.first - part.first
        return part.offset + (skipped * part.strides[part.shard_axis] if part.shard_axis >= 0 else 0)

    @property
    def walk(self) -> tuple[int, int]:
        """How many leading axes must be walked, and how many bytes below them are contiguous on both sides.

        Tokens are always walked, because blocks of another size are cut there.
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
    """The layers that one group of the source and one group of the target have in common."""

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
        """The part of the target's tokens that the source holds; 1 if ranks do not divide tokens."""
        return self.source.stripe.share_of(self.target.stripe)


def match_groups(source: Manifest, target: Manifest, head_ranges: HeadRanges | None = None) -> tuple[GroupPair, ...]:
    """Match every layer that both manifests have, or what ``head_ranges`` names of them.

    Returns:
        Pairs of groups of which both sides hold some tokens and some heads (or parts of another sharded axis).

    Raises:
        LayoutMismatch: the sides have no common layer, or a common layer differs in a field that must be equal.
    """
    require_same_model(source, target)
    require_common_layer([source], target)
    found: dict[tuple[int, int], list[ComponentPair]] = {}
    for target_group, layer in target.layers.values():
        if layer.name not in source.layers:
            continue
        source_group, layer_there = source.layers[layer.name]
        _require_equal(layer_there, layer)
        found.setdefault((source_group, target_group), []).extend(_match_components(layer_there, layer, head_ranges))
    matched = (
        GroupPair(source_group, target_group, source.groups[source_group], target.groups[target_group], tuple(pairs))
        for (source_group, target_group), pairs in found.items()
        if pairs
    )
    return tuple(pair for pair in matched if pair.token_share)


def require_same_model(source: Manifest, target: Manifest) -> None:
    """Check that two workers serve the same model, if both name it; LayoutMismatch names the field and both values."""
    for (field, theirs), (_, ours) in zip(source.identity.must_agree(), target.identity.must_agree(), strict=True):
        if theirs and ours and theirs != ours:
            raise LayoutMismatch(field, theirs, ours, remedy=SAME[field])


def count_unread_layers(source: Manifest, target: Manifest) -> int:
    """Return how many layers of the source the target does not have."""
    return len(source.layers.keys() - target.layers.keys())


def unread_layers(sources: Sequence[Manifest], target: Manifest) -> tuple[str, ...]:
    """Return the layers that no source has and that the target can rebuild, which are left unread."""
    there = _all_layers(sources)
    return tuple(name for name in target.rebuilt if name not in there)


def omitted_layers(engine_id: str, sources: Sequence[Manifest], target: Manifest) -> Iterator[LayersOmitted]:
    """Yield what is to be said of layers that only one side has, and can rebuild."""
    if unread := unread_layers(sources, target):
        yield LayersOmitted(engine_id, "target", ", ".join(_few(unread)), COSTS["target"], SAME_DRAFT)
    unused = _all_layers(sources).keys() - target.layers.keys()
    # If we are a pipeline stage, we lack other layers, too, and another stage may have these.
    if unused and unused <= {name for each in sources for name in each.rebuilt}:
        yield LayersOmitted(engine_id, "source", ", ".join(_few(sorted(unused))), COSTS["source"], SAME_DRAFT)


def have_common_layer(source: Manifest, target: Manifest) -> bool:
    """Return whether both have a common layer. Pipeline stages of one model may have none."""
    return not source.layers.keys().isdisjoint(target.layers)


def require_common_layer(sources: Sequence[Manifest], target: Manifest) -> None:
    """Check that at least one source has a layer of the target; LayoutMismatch names the layers of the first."""
    if sources and not any(have_common_layer(source, target) for source in sources):
        remedy = "Serve the same model on both sides, and give each layer the same name."
        raise LayoutMismatch("layers", _few([*sources[0].layers]), _few([*target.layers]), remedy=remedy)


def require_equal_layer(name: str, sources: Sequence[Manifest], target: Manifest) -> None:
    """Check that some source has a layer, as the target describes it; LayoutMismatch names the first difference."""
    _, ours = target.layers[name]
    theirs = [source.layers[name] for source in sources if name in source.layers]
    if not theirs:
        remedy = "Serve the same model on both sides, with the same draft model, and pass the tickets of all stages."
        raise LayoutMismatch("layers", _few([*_all_layers(sources)]), [name], remedy=remedy)
    for _, layer in theirs:
        _require_equal(layer, ours)


def _require_equal(source: Layer, target: Layer) -> None:
    """Check that two layers of one name are equal in every field that no plan converts."""
    for (path, theirs), (_, ours) in zip(source.must_agree(), target.must_agree(), strict=False):
        if theirs != ours:
            remedy = "Serve the same model with the same cache dtype on both sides."
            kinds = sorted({source.kind, target.kind})
            remedy += "".join(ALSO_NEEDED.get(kind, "") for kind in kinds)
            raise LayoutMismatch(f"{target.name}.{path}", theirs, ours, remedy=remedy)


def _match_components(source: Layer, target: Layer, head_ranges: HeadRanges | None) -> list[ComponentPair]:
    there = {component.role: component for component in source.components}
    pairs = []
    for ours in target.components:
        theirs = there[ours.role]
        first = max(theirs.first, ours.first)
        count = min(theirs.first + theirs.held.count, ours.first + ours.held.count) - first
        if head_ranges is not None:
            first, count = head_ranges.get((target.name, ours.role), (first, 0))
        if count > 0:
            pairs.append(ComponentPair(target.name, theirs, ours, first, count))
    return pairs


def _all_layers(manifests: Sequence[Manifest]) -> dict[str, None]:
    """Return the names of all layers, in the order in which they come first."""
    return dict.fromkeys(name for each in manifests for name in each.layers)


def _few(names: Sequence[str]) -> list[str]:
    return list(names) if len(names) <= NAMES_SHOWN else [*names[:NAMES_SHOWN], f"... {len(names)} in all"]
