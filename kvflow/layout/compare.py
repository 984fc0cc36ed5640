"""Compare two manifests field by field: equal, convertible by a plan, or incompatible."""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.reprs import counted

Verdict = Literal["same", "convertible", "incompatible"]
_SEVERITY: tuple[Verdict, ...] = ("same", "convertible", "incompatible")

LAYERS_SHOWN = 3


class ComparedField(Struct, frozen=True):
    """One field of two manifests.

    Attributes:
        name: ``block_size``, ``k.dtype``, ...
        source: the producer's value.
        target: the consumer's value.
        verdict: whether the values are equal, convertible by a plan, or incompatible.
        why: short reason; empty if they are equal.
        layers: the layers whose values differ; empty for a field of the whole manifest.
    """

    name: str
    source: object
    target: object
    verdict: Verdict
    why: str = ""
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = ""
        if self.layers:
            more = "" if len(self.layers) <= LAYERS_SHOWN else f" and {len(self.layers) - LAYERS_SHOWN} more"
            where = f" ({', '.join(self.layers[:LAYERS_SHOWN])}{more})"
        values = f"{self.source!r}" if self.source == self.target else f"{self.source!r} -> {self.target!r}"
        return f"{self.verdict:>12}  {self.name}{where}: {values}{': ' if self.why else ''}{self.why}"


class Comparison(Struct, frozen=True):
    """Every field of two manifests. ``str`` returns a line for each.

    Attributes:
        fields: fields of the whole manifests first, then of the layers that both have.
    """

    fields: tuple[ComparedField, ...]

    def __repr__(self) -> str:
        """Return the verdict; ``str`` has the fields."""
        return f"<Comparison: {self.verdict}, {counted(len(self.fields), 'field')}>"

    @property
    def verdict(self) -> Verdict:
        """The most severe verdict of all fields."""
        return max((field.verdict for field in self.fields), key=_SEVERITY.index)

    def __str__(self) -> str:
        return "\n".join(map(str, self.fields))


def compare_manifests(source: Manifest, target: Manifest) -> Comparison:
    """Compare two caches field by field.

    Args:
        source: the producer's manifest.
        target: the consumer's manifest.

    Returns:
        The comparison. Layers that differ in the same way share one entry, which names them.
    """
    there, here = dict(_layers(source)), dict(_layers(target))
    common = [name for name in here if name in there]
    found: dict[tuple[str, str, str, Verdict, str], tuple[ComparedField, list[str]]] = {}
    for name in common:
        for field in _compare_layer(there[name], here[name]):
            key = (field.name, repr(field.source), repr(field.target), field.verdict, field.why)
            found.setdefault(key, (field, []))[1].append(name)
    by_layer = [
        ComparedField(field.name, field.source, field.target, field.verdict, field.why, tuple(names))
        for field, names in found.values()
    ]
    return Comparison((*_compare_whole(source, target), _compare_names(there, here), *by_layer))


Place = tuple[int, ManifestGroup, Layer]


def _layers(manifest: Manifest) -> Iterator[tuple[str, Place]]:
    for index, group in enumerate(manifest.groups):
        for layer in group.layers:
            yield layer.name, (index, group, layer)


def _compare_whole(source: Manifest, target: Manifest) -> Iterator[ComparedField]:
    for (name, theirs), (_, ours) in zip(source.identity.must_agree(), target.identity.must_agree(), strict=True):
        if theirs and ours and theirs != ours:
            yield ComparedField(name, theirs, ours, "incompatible", "the bytes of another model mean something else")
        else:
            yield ComparedField(name, theirs, ours, "same", "" if theirs == ours else "one side does not say")
    yield _convertible("num_blocks", source.num_blocks, target.num_blocks, "block ids are each side's own")
    yield _convertible("regions", len(source.regions), len(target.regions), "a run names its region")
    by_name = "layers match by name, whatever group they are in"
    yield _convertible("groups", len(source.groups), len(target.groups), by_name)


def _compare_names(there: dict[str, Place], here: dict[str, Place]) -> ComparedField:
    theirs, ours = len(there), len(here)
    if there.keys() == here.keys():
        return ComparedField("layers", theirs, ours, "same")
    if there.keys().isdisjoint(here):
        return ComparedField("layers", theirs, ours, "incompatible", "no layer has the same name on both sides")
    both = len(there.keys() & here.keys())
    return ComparedField("layers", theirs, ours, "convertible", f"{both} have the same name, and only they move")


def _compare_layer(theirs_at: Place, ours_at: Place) -> Iterator[ComparedField]:
    source_index, source_group, source = theirs_at
    index, group, target = ours_at
    for (name, theirs), (_, ours) in zip(source.must_agree(), target.must_agree(), strict=False):
        if theirs != ours:
            yield ComparedField(name, theirs, ours, "incompatible", "no copy turns one into the other")
            return  # what follows depends on it
        yield ComparedField(name, theirs, ours, "same")
    yield _convertible("group", source_index, index, "each side has its own order of groups")
    cut = "blocks are cut into units that both sides share"
    if group.opaque and source_group.block_size != group.block_size:
        uncut = "where the tokens of an opaque page lie is not known, so that its blocks are not cut"
        yield ComparedField("block_size", source_group.block_size, group.block_size, "incompatible", uncut)
    else:
        yield _convertible("block_size", source_group.block_size, group.block_size, cut)
    by_rank = "a rank reads its tokens from the ranks that hold them"
    yield _convertible("tokens", str(source_group.stripe), str(group.stripe), by_rank)
    yield _convertible("kernel_block_size", source_group.kernel_tokens, group.kernel_tokens, cut)
    there = {part.role: part for part in source.components}
    for ours_part in target.components:
        part = there[ours_part.role]
        yield _convertible(f"{part.role}.held", part.held, ours_part.held, "a rank reads it from its holders")
        yield _convertible(
            f"{part.role}.strides", _strides(part), _strides(ours_part), "a run has its own on each side"
        )


def _strides(component: Component) -> tuple[int, ...]:
    return (component.block_stride, component.kernel_stride, *component.strides)


def _convertible(name: str, source: object, target: object, why: str) -> ComparedField:
    if source == target:
        return ComparedField(name, source, target, "same")
    return ComparedField(name, source, target, "convertible", why)
