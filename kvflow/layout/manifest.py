"""Manifests: the description of its cache that a worker publishes, and the checks of it.

A peer's manifest is hostile until ``check`` has passed. Decoding checks types and bounds; ``check`` checks relations.
Python's integers do not overflow, so an address such as 2**63 - 1 plus a huge stride is found to be outside.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid, counted, quoted
from kvflow.layout.component import ADDRESS_MAX, Component, Region
from kvflow.layout.shards import ALL_TOKENS, Stripe
from kvflow.layout.specs import LAYER_NAME_MAX
from kvflow.validation import find_fault

MANIFEST_SCHEMA = 4

MANIFEST_BYTES_MAX = 256 << 10  # 128 layers of 8 components take about 60 KiB. Decoding blocks other threads

REGIONS_MAX = 2048
LAYERS_MAX = 4096
GROUPS_MAX = 64

COMPONENTS_MAX = 4096
"""Of all layers together. Known models have up to 200; 128 layers with scales would have a thousand."""

LayerName = Annotated[str, Meta(min_length=1, max_length=LAYER_NAME_MAX)]


class Layer(Struct, frozen=True, array_like=True):
    """One layer's components in one group.

    Attributes:
        name: the model's name of the layer. Peers match layers by name.
        kind: kind of its cache, as in the spec.
        window: tokens of the window or the chunk; 0 if it attends to everything.
        components: at least one; all have tokens, or all are states. See ``COMPONENTS_MAX``.
    """

    name: LayerName
    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    window: Annotated[int, Meta(ge=0, le=1 << 40)]
    components: Annotated[tuple[Component, ...], Meta(min_length=1, max_length=COMPONENTS_MAX)]

    def must_agree(self) -> Iterator[tuple[str, object]]:
        """Yield every field that must be equal on both sides, for any layouts, shards and block sizes.

        Each field depends on those before it: compare in order, and stop at the first difference.
        """
        yield "kind", self.kind
        yield "window", self.window
        parts = sorted(self.components, key=lambda part: part.role)
        yield "components", [part.role for part in parts]
        for part in parts:
            yield f"{part.role}.dtype", part.dtype
            yield f"{part.role}.axes", (len(part.extents), part.shard_axis, part.token_axis)
            attention = part.token_axis == 1 and len(part.extents) == 3
            for axis, extent in enumerate(part.extents):
                if axis != part.token_axis:
                    name = ("num_kv_heads", "", "head_size")[axis] if attention else f"shape[{axis}]"
                    yield f"{part.role}.{name}", part.total if axis == part.shard_axis else extent


class ManifestGroup(Struct, frozen=True):
    """Layers that share a block table, and where their bytes are.

    Attributes:
        kind: kind of its layers, or ``mixed``.
        block_size: tokens in one block that this rank holds.
        layers: layers in the order of their positions; none if other pipeline stages have them.
        stripe: which tokens of a request this rank holds.
    """

    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    layers: Annotated[tuple[Layer, ...], Meta(max_length=LAYERS_MAX)]
    stripe: Stripe = ALL_TOKENS

    @property
    def components(self) -> Iterator[tuple[str, Component]]:
        """Every component, with the name of its layer."""
        return ((layer.name, part) for layer in self.layers for part in layer.components)

    @property
    def block_tokens(self) -> int:
        """Tokens of a request that one block id stands for, on all ranks together."""
        return self.block_size * self.stripe.size

    @property
    def tokens_per_id(self) -> int:
        """``block_tokens``, or 0 if the group keeps states."""
        return 0 if self.kind == "mamba" else self.block_tokens

    @property
    def opaque(self) -> bool:
        """Whether its pages are opaque, so that they cannot be cut."""
        return any(layer.kind == "opaque" for layer in self.layers)

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block; 0 if the group keeps states, or has no layers."""
        return self.layers[0].components[0].num_tokens if self.layers else 0

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks of one block."""
        return self.block_size // self.kernel_tokens if self.kernel_tokens else 1


class Provenance(Struct, frozen=True, omit_defaults=True):
    """Whose cache it is. An empty field states nothing.

    Attributes:
        model: name of the model.
        revision: version of its weights.
        dtype: element type that it computes in.
        engine_id: id of the engine.
        rank: rank of the worker in its engine.
        num_ranks: ranks of the engine.
        incarnation: incarnation of the worker.
    """

    model: Annotated[str, Meta(max_length=256)] = ""
    revision: Annotated[str, Meta(max_length=256)] = ""
    dtype: Annotated[str, Meta(max_length=32)] = ""
    engine_id: Annotated[str, Meta(max_length=256)] = ""
    rank: Annotated[int, Meta(ge=0, le=65535)] = 0
    num_ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    incarnation: Annotated[str, Meta(max_length=64)] = ""

    def must_agree(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that must be equal if both sides state them."""
        yield "model", self.model
        yield "revision", self.revision
        yield "model_dtype", self.dtype


class Manifest(Struct, frozen=True, dict=True, omit_defaults=True):
    """The description of one rank's cache.

    Attributes:
        num_blocks: blocks in the pool; block ids are in ``[0, num_blocks)``.
        regions: unique registered address ranges.
        groups: groups, in the order of block id lists.
        identity: whose cache it is.
        rebuilt: names of the layers that the engine can do without at first, such as those of a draft model. They are
            left unread if no source has them.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1, max_length=REGIONS_MAX)]
    groups: Annotated[tuple[ManifestGroup, ...], Meta(min_length=1, max_length=GROUPS_MAX)]
    identity: Provenance = Provenance()
    rebuilt: Annotated[tuple[LayerName, ...], Meta(max_length=LAYERS_MAX)] = ()

    def __repr__(self) -> str:
        """Return whose cache it is, and its size. ``Manifest.groups`` has the rest."""
        layers = counted(len(self.layers), "layer")
        owner = f" of {quoted(self.identity.engine_id)} rank {self.identity.rank}" if self.identity.engine_id else ""
        return (
            f"<Manifest{owner}: {layers} in {counted(len(self.groups), 'group')}, {counted(self.num_blocks, 'block')}>"
        )

    @cached_property
    def layers(self) -> dict[str, tuple[int, Layer]]:
        """Each layer by its name, with the number of its group."""
        return {layer.name: (index, layer) for index, group in enumerate(self.groups) for layer in group.layers}

    def check(self) -> None:
        """Check that every component lies in a region and has no byte twice, every region has layers, names are unique.

        After it, sums do not overflow int64; the planner and the binding rely on that. The result is cached, because a
        manifest does not change.

        Raises:
            SpecInvalid: names the layer, the role and the numbers.
        """
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        try:
            # A Struct checks its fields when it is decoded, not when it is constructed.
            _decoder.decode(_encoder.encode(self))
        except (msgspec.ValidationError, OverflowError, TypeError) as error:
            fault = find_fault(self) or str(error)
            raise SpecInvalid(f"the manifest has a field that is out of bounds: {fault}") from error
        for index, region in enumerate(self.regions):
            if region.address + region.nbytes > ADDRESS_MAX:
                raise SpecInvalid(f"region {index} reaches beyond the address space: {region}")
        used = [part.region for group in self.groups for _, part in group.components]
        if len(used) > COMPONENTS_MAX:
            raise SpecInvalid(f"the layers have more than {COMPONENTS_MAX} components together")
        self._check_names()
        for index, group in enumerate(self.groups):
            _check_group(index, group)
            for layer in group.layers:
                for component in layer.components:
                    self._check_component(f"{layer.name}.{component.role}", group, component)
        if unused := set(range(len(self.regions))).difference(used):  # memory of a group without layers, say
            raise SpecInvalid(f"region {min(unused)} is memory of no layer")
        _ = self.aliases  # a pull needs them, and must not wait until thousands of components are sorted
        return True

    def _check_names(self) -> None:
        """Check that each layer has a name, and each component of a layer a role, that no other has."""
        layers = [layer for group in self.groups for layer in group.layers]
        names = [layer.name for layer in layers]
        if not names:
            raise SpecInvalid("the manifest names no layer")
        if len(set(names)) != len(names):
            raise SpecInvalid(f"layer {_first_duplicate(names)!r} is named twice")
        if unknown := set(self.rebuilt) - set(names):
            raise SpecInvalid(f"rebuilt names a layer that the cache does not have: {min(unknown)!r}")
        for layer in layers:
            roles = [component.role for component in layer.components]
            if len(set(roles)) != len(roles):
                raise SpecInvalid(f"{layer.name}: role {_first_duplicate(roles)!r} is named twice")

    def _check_component(self, path: str, group: ManifestGroup, component: Component) -> None:
        if component.region >= len(self.regions):
            raise SpecInvalid(f"{path}: region {component.region} does not exist")
        axes = len(component.extents)
        if len(component.strides) != axes or component.shard_axis >= axes or component.token_axis >= axes:
            raise SpecInvalid(f"{path}: {axes} extents, {len(component.strides)} strides and its axes do not fit")
        if component.shard_axis == component.token_axis >= 0:
            raise SpecInvalid(f"{path}: shard_axis must not be the token axis, {component.token_axis}")
        if component.num_tokens != group.kernel_tokens:
            raise SpecInvalid(f"{path}: {component.num_tokens} tokens in kernel blocks of {group.kernel_tokens}")
        if component.num_tokens and group.block_size % component.num_tokens:
            raise SpecInvalid(f"{path}: {component.num_tokens} tokens do not divide blocks of {group.block_size}")
        if component.first + component.held.count > component.total:
            raise SpecInvalid(f"{path}: holds {component.held}, which is out of range")
        self._check_reach(path, group, component)
        self._check_strides(path, group, component)

    def _check_reach(self, path: str, group: ManifestGroup, component: Component) -> None:
        """Check that no offset within a block overflows, and that the last block ends within the region."""
        token_stride = component.strides[component.token_axis] if component.token_axis >= 0 else 0
        if component.nbytes > ADDRESS_MAX or component.num_tokens * token_stride > ADDRESS_MAX:
            raise SpecInvalid(f"{path}: {component.extents} elements {component.strides} bytes apart are too many")
        if group.kernel_blocks > 1 and not component.kernel_stride:
            raise SpecInvalid(f"{path}: {group.kernel_blocks} kernel blocks of one block, but no stride between them")
        if component.kernel_stride * group.kernel_blocks > ADDRESS_MAX:
            raise SpecInvalid(f"{path}: {group.kernel_blocks} kernel blocks of {component.kernel_stride} bytes")
        end, nbytes = component.end(self.num_blocks, group.kernel_blocks), self.regions[component.region].nbytes
        if end > nbytes:
            raise SpecInvalid(f"{path}: reaches byte {end} of a region of {nbytes}")

    def _check_strides(self, path: str, group: ManifestGroup, component: Component) -> None:
        """Check that each stride is at least the extent below it, so that no two elements share a byte."""
        axes = [*zip(component.strides, component.extents, strict=True)]
        axes += [(component.kernel_stride, group.kernel_blocks), (component.block_stride, self.num_blocks)]
        reach = component.item_bytes
        for stride, extent in sorted(axes):
            if extent > 1 and stride < reach:
                raise SpecInvalid(
                    f"{path}: {extent} elements or blocks {stride} bytes apart, but each has {reach} bytes"
                )
            reach += (extent - 1) * stride

    def geometry_digest(self) -> bytes:
        """Return a digest of everything that the planner reads. Equal digests have equal plans, for any addresses.

        The result is cached, because every pull may need it and a manifest does not change.
        """
        return self._geometry_digest

    @cached_property
    def _geometry_digest(self) -> bytes:
        memory = [region.memory for region in self.regions]
        return _digest((self.num_blocks, memory, self.groups))

    @cached_property
    def aliases(self) -> tuple[int, ...]:
        """The alias class of each group. Groups of one class share bytes, so a block id is used by one at a time.

        Two groups share bytes if the address ranges of their pages of block 0 intersect.
        """
        spans = sorted(span for index, group in enumerate(self.groups) for span in _spans(index, group))
        classes = list(range(len(self.groups)))
        here, reached, other = -1, 0, 0  # region, end and group of the spans that overlap one after the other
        for region, begin, end, group in spans:
            if region != here or begin >= reached:
                here, reached, other = region, end, group
            elif classes[group] != classes[other]:
                kept, merged = sorted((classes[group], classes[other]))
                classes = [kept if value == merged else value for value in classes]
            reached = max(reached, end)
        return tuple(classes)


def _check_group(index: int, group: ManifestGroup) -> None:
    """Check that block ids mean the same for all layers of a group."""
    kinds = {layer.kind for layer in group.layers}
    if "opaque" in kinds and len(kinds) > 1:
        raise SpecInvalid(f"group {index}: pages of an unknown kind share a block table with {sorted(kinds)}")
    stripe = group.stripe
    if stripe.rank >= stripe.size:
        raise SpecInvalid(f"group {index}: stripe.rank is {stripe.rank}, but stripe.size is {stripe.size}")
    if stripe.size > 1 and group.layers and not group.kernel_tokens:
        raise SpecInvalid(f"group {index}: tokens divided among {stripe.size} ranks, but it keeps none")
    if stripe.size > 1 and group.block_size % stripe.width:
        raise SpecInvalid(f"group {index}: stripe.width {stripe.width} does not divide blocks of {group.block_size}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def _digest(value: object) -> bytes:
    return hashlib.sha256(_encoder.encode(value)).digest()


def _first_duplicate(names: list[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _spans(index: int, group: ManifestGroup) -> set[tuple[int, int, int, int]]:
    """Return where a group's pages of block 0 lie: region, begin, end, and the group."""
    return {
        (component.region, component.offset, component.end(1, group.kernel_blocks), index)
        for _, component in group.components
    }
