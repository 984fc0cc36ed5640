"""Which components of two manifests hold the same thing, and where they must agree.

Layers are matched by name and components by role, whatever group they are in. What a plan can convert
(layout, block size, shard) is not compared; what it cannot is refused with the field and both values.
"""

from collections.abc import Iterator

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.placement import Component
from kvflow.layout.specs import ITEM_BYTES

NAMES_SHOWN = 4


class ComponentPair(Struct, frozen=True):
    """One component that both sides hold at least in part.

    Attributes:
        layer: name.
        source: the producer's component.
        target: the consumer's component.
        first_head: global number of the first head that both hold.
        num_heads: how many heads both hold.
    """

    layer: str
    source: Component
    target: Component
    first_head: int
    num_heads: int


class GroupPair(Struct, frozen=True):
    """Layers that lie in one group on the source and in one group on the target."""

    source_group: int
    target_group: int
    source_block_size: int
    target_block_size: int
    pairs: tuple[ComponentPair, ...]


def match_groups(source: Manifest, target: Manifest) -> tuple[GroupPair, ...]:
    """Match every layer that both manifests have.

    Raises:
        LayoutMismatch: no layer is common, or a common one differs where it must agree.
    """
    there = {layer.name: (index, group, layer) for index, group, layer in _layers(source)}
    found: dict[tuple[int, int], list[ComponentPair]] = {}
    common = False
    for target_group, group, layer in _layers(target):
        if layer.name not in there:
            continue
        common = True
        source_group, group_there, layer_there = there[layer.name]
        _require_equal(f"{layer.name}.kind", group_there.kind, group.kind)
        _require_equal(f"{layer.name}.window", group_there.window, group.window)
        found.setdefault((source_group, target_group), []).extend(_match_components(layer_there, layer))
    if not common:
        raise LayoutMismatch("layers", _names(source), _names(target))
    return tuple(
        GroupPair(
            source_group,
            target_group,
            source.groups[source_group].block_size,
            target.groups[target_group].block_size,
            tuple(pairs),
        )
        for (source_group, target_group), pairs in found.items()
        if pairs
    )


def _layers(manifest: Manifest) -> Iterator[tuple[int, ManifestGroup, Layer]]:
    for index, group in enumerate(manifest.groups):
        for layer in group.layers:
            yield index, group, layer


def _match_components(source: Layer, target: Layer) -> list[ComponentPair]:
    there = {component.role: component for component in source.components}
    _require_equal(f"{target.name}.components", sorted(there), sorted(part.role for part in target.components))
    pairs = []
    for ours in target.components:
        theirs = there[ours.role]
        path = f"{target.name}.{ours.role}"
        _require_equal(f"{path}.dtype", theirs.dtype, ours.dtype)
        _require_equal(f"{path}.head_size", _head_size(theirs), _head_size(ours))
        _require_equal(f"{path}.num_kv_heads", theirs.total_heads, ours.total_heads)
        first = max(theirs.first_head, ours.first_head)
        count = min(theirs.first_head + theirs.num_heads, ours.first_head + ours.num_heads) - first
        if count > 0:
            pairs.append(ComponentPair(target.name, theirs, ours, first, count))
    return pairs


def _head_size(component: Component) -> float:
    """Elements of one head of one token: what a person configured, rather than bytes."""
    return component.content_bytes / ITEM_BYTES.get(component.dtype, 1)


def _require_equal(field: str, source: object, target: object) -> None:
    if source != target:
        raise LayoutMismatch(field, source, target)


def _names(manifest: Manifest) -> list[str]:
    names = [layer.name for _, _, layer in _layers(manifest)]
    return names if len(names) <= NAMES_SHOWN else [*names[:NAMES_SHOWN], f"... {len(names)} in all"]
