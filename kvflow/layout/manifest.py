"""The canonical KV metadata that a worker publishes, and what makes it trustworthy.

A manifest that comes from a peer is hostile until ``check`` has passed: types and bounds are checked when it
is decoded, everything that relates fields to each other here. Python's integers do not overflow, so that
an address such as 2**63 - 1 plus a huge stride is simply seen to lie outside.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.layout.specs import LAYER_NAME_MAX
from kvflow.layout.stripes import ALL_TOKENS, Stripe

MANIFEST_SCHEMA = 3
"""Version of the manifest's own format; travels in the publication's envelope."""

MANIFEST_BYTES_MAX = 256 << 10
"""Of one that is published. 128 layers of 8 components take some 60 KiB; decoding holds the interpreter throughout."""

REGIONS_MAX = 2048
LAYERS_MAX = 4096
GROUPS_MAX = 64
"""The models that are known have ten."""

COMPONENTS_MAX = 4096
"""Of all layers together. The models that are known have up to 200; 128 layers with scales would have a thousand."""


class Layer(Struct, frozen=True, array_like=True):
    """One layer's components in one group.

    Attributes:
        name: as the model names it; what peers match layers by.
        kind: of its cache, as the spec's.
        window: tokens that it looks back at, or its chunk; 0 if it sees everything.
        components: at least one; all have tokens, or all are states. See ``COMPONENTS_MAX``.
    """

    name: Annotated[str, Meta(min_length=1, max_length=LAYER_NAME_MAX)]
    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    window: Annotated[int, Meta(ge=0, le=1 << 40)]
    components: Annotated[tuple[Component, ...], Meta(min_length=1, max_length=COMPONENTS_MAX)]

    def must_agree(self) -> Iterator[tuple[str, object]]:
        """Give every field that peers must agree on, whatever their layouts, shards and block sizes.

        Each depends on those before it: compare in order, and stop at the first difference.
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
    """Layers that share a block table, with where their bytes are.

    Attributes:
        kind: of its layers, or ``mixed``.
        block_size: tokens in one block, of those that are here.
        layers: in the order of their positions.
        stripe: which tokens of a request are here.
    """

    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=LAYERS_MAX)]
    stripe: Stripe = ALL_TOKENS

    @property
    def block_tokens(self) -> int:
        """Tokens of a request that one block id stands for, those on other ranks included."""
        return self.block_size * self.stripe.size

    @property
    def tokens_per_id(self) -> int:
        """``block_tokens``, or 0 if the group keeps states, of which a request has one."""
        return 0 if self.kind == "mamba" else self.block_tokens

    @property
    def opaque(self) -> bool:
        """Whether its pages are of a kind that is not known, which no one can cut."""
        return self.layers[0].kind == "opaque"

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block; 0 if the group keeps states."""
        return self.layers[0].components[0].num_tokens

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks of one block."""
        return self.block_size // self.kernel_tokens if self.kernel_tokens else 1


class Identity(Struct, frozen=True, omit_defaults=True):
    """Whose cache it is; empty fields say nothing.

    Attributes:
        model: name of the model.
        revision: of its weights.
        dtype: that it computes in.
        engine_id: of the engine.
        rank: of the worker in it.
        num_ranks: ranks of the engine.
        incarnation: of the worker.
    """

    model: Annotated[str, Meta(max_length=256)] = ""
    revision: Annotated[str, Meta(max_length=256)] = ""
    dtype: Annotated[str, Meta(max_length=32)] = ""
    engine_id: Annotated[str, Meta(max_length=256)] = ""
    rank: Annotated[int, Meta(ge=0, le=65535)] = 0
    num_ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    incarnation: Annotated[str, Meta(max_length=64)] = ""

    def must_agree(self) -> Iterator[tuple[str, str]]:
        """Give the fields that may not differ where both sides say something."""
        yield "model", self.model
        yield "revision", self.revision
        yield "model_dtype", self.dtype


class Manifest(Struct, frozen=True, dict=True):
    """The canonical KV metadata of one rank.

    Attributes:
        num_blocks: blocks in the pool; block ids are in ``[0, num_blocks)``.
        regions: unique registered address ranges.
        groups: in the order in which block ids are given.
        identity: whose cache it is.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1, max_length=REGIONS_MAX)]
    groups: Annotated[tuple[ManifestGroup, ...], Meta(min_length=1, max_length=GROUPS_MAX)]
    identity: Identity = Identity()

    def check(self) -> None:
        """Check that every component lies inside its region, has no byte twice, and every layer is named once.

        What passes can be added up in int64: the planner and the binding rely on it. It is done once: nothing of a
        manifest changes.

        Raises:
            SpecInvalid: names the layer, role and numbers.
        """
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        try:
            # A Struct checks its fields when it is decoded, not when it is constructed.
            _decoder.decode(_encoder.encode(self))
        except (msgspec.ValidationError, OverflowError, TypeError) as error:
            raise SpecInvalid(f"the manifest has a field that is out of bounds: {error}") from error
        for index, region in enumerate(self.regions):
            if region.address + region.nbytes > ADDRESS_MAX:
                raise SpecInvalid(f"region {index} reaches beyond the address space: {region}")
        if sum(len(layer.components) for group in self.groups for layer in group.layers) > COMPONENTS_MAX:
            raise SpecInvalid(f"the layers have more than {COMPONENTS_MAX} components together")
        names = [layer.name for group in self.groups for layer in group.layers]
        if len(set(names)) != len(names):
            raise SpecInvalid(f"layer {_first_duplicate(names)!r} is named twice")
        for index, group in enumerate(self.groups):
            _check_group(index, group)
            for layer in group.layers:
                roles = [component.role for component in layer.components]
                if len(set(roles)) != len(roles):
                    raise SpecInvalid(f"{layer.name}: role {_first_duplicate(roles)!r} is named twice")
                for component in layer.components:
                    self._check_component(f"{layer.name}.{component.role}", group, component)
        _ = self.aliases  # a pull needs them, and must not wait for thousands of components to be sorted
        return True

    def _check_component(self, path: str, group: ManifestGroup, component: Component) -> None:
        if component.region >= len(self.regions):
            raise SpecInvalid(f"{path}: region {component.region} does not exist")
        axes = len(component.extents)
        if len(component.strides) != axes or component.shard_axis >= axes or component.token_axis >= axes:
            raise SpecInvalid(f"{path}: {axes} extents, {len(component.strides)} strides and its axes do not fit")
        if component.shard_axis == component.token_axis >= 0:
            raise SpecInvalid(f"{path}: tokens are not what ranks divide")
        if component.num_tokens != group.kernel_tokens:
            raise SpecInvalid(f"{path}: {component.num_tokens} tokens in kernel blocks of {group.kernel_tokens}")
        if component.num_tokens and group.block_size % component.num_tokens:
            raise SpecInvalid(f"{path}: {component.num_tokens} tokens do not divide blocks of {group.block_size}")
        if component.first + component.held.count > component.total:
            raise SpecInvalid(f"{path}: holds {component.held}, which is out of range")
        if component.nbytes > ADDRESS_MAX or component.num_tokens * _token_stride(component) > ADDRESS_MAX:
            raise SpecInvalid(f"{path}: {component.extents} elements {component.strides} bytes apart are too many")
        if group.kernel_blocks > 1 and not component.kernel_stride:
            raise SpecInvalid(f"{path}: {group.kernel_blocks} kernel blocks of one block, but no stride between them")
        if component.kernel_stride * group.kernel_blocks > ADDRESS_MAX:
            raise SpecInvalid(f"{path}: {group.kernel_blocks} kernel blocks of {component.kernel_stride} bytes")
        end, nbytes = component.end(self.num_blocks, group.kernel_blocks), self.regions[component.region].nbytes
        if end > nbytes:
            raise SpecInvalid(f"{path}: reaches byte {end} of a region of {nbytes}")
        self._check_strides(path, group, component)

    def _check_strides(self, path: str, group: ManifestGroup, component: Component) -> None:
        """Check that each stride steps over all that lies below it, so that no two elements share a byte."""
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
        """Digest everything the planner reads: equal digests have equal plans, whatever the addresses.

        It is computed once, and may be asked for on every pull: nothing of a manifest changes.
        """
        return self._geometry_digest

    @cached_property
    def _geometry_digest(self) -> bytes:
        memory = [region.memory for region in self.regions]
        return _digest((self.num_blocks, memory, self.groups))

    @cached_property
    def aliases(self) -> tuple[int, ...]:
        """A class number per group: groups of one class share bytes, so a block id serves one at a time.

        Two groups share bytes when the address ranges that their pages of block 0 span intersect.
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

    def compatibility_digest(self) -> bytes:
        """Digest only what must agree between peers, whatever their layouts, shards and block sizes."""
        rows = sorted((layer.name, *layer.must_agree()) for group in self.groups for layer in group.layers)
        return _digest((tuple(self.identity.must_agree()), rows))


def _check_group(index: int, group: ManifestGroup) -> None:
    """Check what concerns all layers of a group: their block ids have to mean one thing."""
    kinds = {layer.kind for layer in group.layers}
    if "opaque" in kinds and len(kinds) > 1:
        raise SpecInvalid(f"group {index}: pages of an unknown kind share a block table with {sorted(kinds)}")
    stripe = group.stripe
    if stripe.rank >= stripe.size:
        raise SpecInvalid(f"group {index}: stripe.rank is {stripe.rank}, but stripe.size is {stripe.size}")
    if stripe.size > 1 and not group.kernel_tokens:
        raise SpecInvalid(f"group {index}: tokens divided among {stripe.size} ranks, but it keeps none")
    if stripe.size > 1 and group.block_size % stripe.width:
        raise SpecInvalid(f"group {index}: stripe.width {stripe.width} does not divide blocks of {group.block_size}")


def _token_stride(component: Component) -> int:
    return component.strides[component.token_axis] if component.token_axis >= 0 else 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def _digest(value: object) -> bytes:
    return hashlib.sha256(_encoder.encode(value)).digest()


def _first_duplicate(names: list[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _spans(index: int, group: ManifestGroup) -> set[tuple[int, int, int, int]]:
    """Return where a group's page of block 0 lies: region, begin, end, and the group's index again."""
    return {
        (component.region, component.offset, component.end(1, group.kernel_blocks), index)
        for layer in group.layers
        for component in layer.components
    }
