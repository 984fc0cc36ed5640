"""The canonical KV metadata that a worker publishes, and what makes it trustworthy.

A manifest that comes from a peer is hostile until ``check`` has passed: types and bounds are checked when it
is decoded, everything that relates fields to each other here. Python's integers do not overflow, so that
an address such as 2**63 - 1 plus a huge stride is simply seen to lie outside.
"""

import hashlib
from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import Component
from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.layout.specs import LAYER_NAME_MAX

MANIFEST_SCHEMA = 1
"""Version of the manifest's own format; travels in the publication's envelope."""

REGIONS_MAX = 4096
LAYERS_MAX = 4096
COMPONENTS_MAX = 64
GROUPS_MAX = 256


class Layer(Struct, frozen=True):
    """One layer's components in one group."""

    name: Annotated[str, Meta(min_length=1, max_length=LAYER_NAME_MAX)]
    components: Annotated[tuple[Component, ...], Meta(min_length=1, max_length=COMPONENTS_MAX)]


class ManifestGroup(Struct, frozen=True):
    """Layers that share a block table, with where their bytes are.

    Attributes:
        kind: ``full`` or ``sliding``.
        block_size: tokens in one block.
        window: tokens that a sliding window sees; 0 for full attention.
        layers: in the order of their positions.
    """

    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    window: Annotated[int, Meta(ge=0, le=1 << 24)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=LAYERS_MAX)]


class Manifest(Struct, frozen=True):
    """The canonical KV metadata of one rank.

    Attributes:
        num_blocks: blocks in the pool; block ids are in ``[0, num_blocks)``.
        regions: unique registered address ranges.
        groups: in the order in which block ids are given.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1, max_length=REGIONS_MAX)]
    groups: Annotated[tuple[ManifestGroup, ...], Meta(min_length=1, max_length=GROUPS_MAX)]

    def check(self) -> None:
        """Check that every component lies inside its region and every layer is named once.

        What passes can be added up in int64: the planner and the binding rely on it.

        Raises:
            SpecInvalid: names the layer, role and numbers.
        """
        for index, region in enumerate(self.regions):
            if region.address + region.nbytes > ADDRESS_MAX:
                raise SpecInvalid(f"region {index} reaches beyond the address space: {region}")
        names = [layer.name for group in self.groups for layer in group.layers]
        if len(set(names)) != len(names):
            raise SpecInvalid(f"layer {_first_duplicate(names)!r} is named twice")
        for group in self.groups:
            for layer in group.layers:
                roles = [component.role for component in layer.components]
                if len(set(roles)) != len(roles):
                    raise SpecInvalid(f"{layer.name}: role {_first_duplicate(roles)!r} is named twice")
                for component in layer.components:
                    self._check_component(f"{layer.name}.{component.role}", group, component)

    def _check_component(self, path: str, group: ManifestGroup, component: Component) -> None:
        if component.region >= len(self.regions):
            raise SpecInvalid(f"{path}: region {component.region} does not exist")
        if component.num_tokens != group.block_size:
            raise SpecInvalid(f"{path}: {component.num_tokens} tokens in blocks of {group.block_size}")
        if component.first_head + component.num_heads > component.total_heads:
            raise SpecInvalid(f"{path}: holds {component.held}, which is out of range")
        if component.num_tokens * component.token_stride > ADDRESS_MAX:
            raise SpecInvalid(f"{path}: a block spans {component.num_tokens} tokens of {component.token_stride} bytes")
        extent, nbytes = component.extent(self.num_blocks), self.regions[component.region].nbytes
        if extent > nbytes:
            raise SpecInvalid(f"{path}: reaches byte {extent} of a region of {nbytes}")

    def geometry_digest(self) -> bytes:
        """Digest everything the planner reads: equal digests have equal plans, whatever the addresses."""
        memory = [region.memory for region in self.regions]
        return _digest((self.num_blocks, memory, self.groups))

    def compatibility_digest(self) -> bytes:
        """Digest only what must agree between peers, whatever their layouts, shards and block sizes."""
        rows = sorted(
            (
                layer.name,
                group.kind,
                group.window,
                part.role,
                part.dtype,
                part.content_bytes,
                part.total_heads,
            )
            for group in self.groups
            for layer in group.layers
            for part in layer.components
        )
        return _digest(rows)


_encoder = msgspec.msgpack.Encoder()


def _digest(value: object) -> bytes:
    return hashlib.sha256(_encoder.encode(value)).digest()


def _first_duplicate(names: list[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def alias_classes(manifest: Manifest) -> tuple[int, ...]:
    """Return a class number per group: groups of one class share bytes, so a block id serves one at a time.

    Two groups share bytes when the address ranges that their pages of block 0 span intersect.
    """
    spans = [_span(group) for group in manifest.groups]
    classes = list(range(len(spans)))
    for later, span in enumerate(spans):
        for earlier in range(later):
            if any(low < other_high and other_low < high and region == other_region
                   for region, low, high in span
                   for other_region, other_low, other_high in spans[earlier]):  # fmt: skip
                merged, kept = classes[later], classes[earlier]
                classes = [kept if value == merged else value for value in classes]
    return tuple(classes)


def _span(group: ManifestGroup) -> set[tuple[int, int, int]]:
    return {
        (component.region, component.offset, component.extent(1))
        for layer in group.layers
        for component in layer.components
    }
