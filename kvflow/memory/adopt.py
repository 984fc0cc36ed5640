"""Describe a cache in memory that an engine allocated. Its tensors may have any strides."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.describe import fitted_specs, manifest_group
from kvflow.layout.groups import Group, check_groups, plan_groups
from kvflow.layout.manifest import Manifest
from kvflow.layout.pages import has_tokens, page_bytes
from kvflow.layout.placement import PlacedLayer
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, validate_specs
from kvflow.memory.attention import attention_components, read_attention
from kvflow.memory.axes import ReadTensor, check_axes
from kvflow.memory.cache import KVCache, Tensors, region_of
from kvflow.memory.given import GivenLayer, check_tensors, describe_tensors
from kvflow.memory.overlap import LiveBytes, check_overlaps
from kvflow.memory.states import read_states


def adopt(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    specs: Mapping[str, CacheSpec],
    groups: Sequence[Group] | None = None,
    *,
    shard: Shard | None = None,
    axes: Mapping[str, str] | None = None,
) -> KVCache:
    """Describe memory that the engine allocated as a cache. Nothing is copied or written.

    Where a component lies follows from the tensor's address and strides and from the layer's spec, with the block
    size and the padding of its group. Forms of shape, by letters (``B`` blocks, or all kernel blocks; ``R`` kernel
    blocks of one block; ``K`` keys and values; ``H`` heads held here; ``N`` tokens; ``C`` content):

    - attention: ``BHNC`` with K before V in the content; ``KBNHC``, ``BKNHC``, ``KBHNC``, ``BKHNC``, tried in this
      order; a list of keys and values, each ``BNHC`` or ``BHNC``;
    - a latent: ``BNC``, ``BHNC``;
    - states: a list of ``[block, *shape]`` in the order of the spec, or one page of bytes, ``[block, bytes]`` or
      ``[block, 1, 1, bytes]``, which has them one after the other;
    - several layers of one group in one tensor: pass the same tensor for each. It has a layer axis ``L``, in the order
      of the group.

    Args:
        tensors: layer name -> tensor or list of tensors, in the spec's dtype, or int8 or uint8 with the last axis in
            bytes.
        specs: layer name -> spec, of the whole model.
        groups: as ``plan_groups`` forms them when None.
        shard: which heads and tokens this rank holds; all of them when None.
        axes: layer name -> form, for layers where the first form that fits is wrong.

    Returns:
        A cache whose regions are exactly the bytes that the tensors span. ``bytes_per_block`` is their sum divided by
        the number of blocks.

    Raises:
        ArgumentInvalid: tensors or axes are not mappings.
        SpecInvalid: specs or groups cannot be used, or a tensor has the wrong dtype, shape, strides, number of blocks
            or device, or two blocks share bytes. Names the layer, what was found and what was expected.
    """
    validate_specs(specs)
    shard = shard or Shard()
    groups = tuple(plan_groups(specs, shard=shard) if groups is None else groups)
    check_groups(specs, groups, shard)
    fitted = fitted_specs(specs, groups)
    forms = _forms(axes, fitted)
    given = check_tensors(tensors, specs)
    lists = {name for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
    layers, storages = describe_tensors(given, groups)
    read = {
        name: _read(fitted[name], shard, layers[name], forms.get(name), listed=name in lists, group=index)
        for index, group in enumerate(groups)
        for name in group.layers
    }
    num_blocks = _num_blocks({name: layer.num_blocks for name, layer in read.items()})
    check_overlaps(
        [part for layer in read.values() for part in layer.live],
        num_blocks=num_blocks,
        region_bytes=[storage.nbytes for storage in storages],
    )
    placed = {name: PlacedLayer(layer.components, ()) for name, layer in read.items()}
    manifest = Manifest(
        num_blocks,
        tuple(region_of(storage) for storage in storages),
        tuple(manifest_group(group, fitted, placed, shard) for group in groups),
    )
    manifest.check()
    views: dict[str, Tensors] = {name: found if name in lists else found[0] for name, found in given.items()}
    return KVCache(groups, manifest, storages, views, sum(storage.nbytes for storage in storages) // num_blocks)


class _Layer(Struct, frozen=True):
    """What was found for one layer."""

    num_blocks: int
    components: tuple[Component, ...]
    live: tuple[LiveBytes, ...]


def _forms(axes: Mapping[str, str] | None, specs: Mapping[str, CacheSpec]) -> dict[str, str]:
    """Return the forms that the caller names, by layer."""
    if axes is not None and not isinstance(axes, Mapping):
        remedy = "Pass a dict from layer name to axes, such as {'layers.0': 'KBHNC'}."
        raise ArgumentInvalid("axes", "a mapping from layer name to axes", axes, remedy=remedy)
    forms = dict(axes or {})
    for name, form in forms.items():
        if not isinstance(form, str):
            remedy = "Pass one letter per axis of the tensor, such as 'KBHNC'."
            raise ArgumentInvalid(f"axes[{name!r}]", "text", form, remedy=remedy)
        if name not in specs:
            raise SpecInvalid(f"axes names layer {name!r}, which has no spec", remedy="Name layers of specs only.")
        if not has_tokens(specs[name]):
            raise SpecInvalid(
                f"{name}: axes is {form!r}; expected no entry for a layer of kind {specs[name].kind!r}",
                remedy="Give its states in the order and with the axes of the spec.",
            )
    return forms


def _read(spec: CacheSpec, shard: Shard, given: GivenLayer, form: str | None, *, listed: bool, group: int) -> _Layer:
    """Find the components of one layer in its tensors."""
    page_bytes(spec, shard, layer=given.name)  # refuses padding that is too small
    if not has_tokens(spec):
        num_blocks, components = read_states(spec, shard, given.tensors, listed=listed)
        return _Layer(num_blocks, components, tuple(_live_state(given.name, group, part) for part in components))
    if form is not None:
        check_axes(given.name, spec, form, apart=len(given.tensors) > 1)
    found = read_attention(spec, shard, given.tensors, given.place, form)
    components = attention_components(spec, shard, found)
    return _Layer(found[0].num_blocks, components, tuple(_live_tensor(group, each) for each in found))


def _live_tensor(group: int, found: ReadTensor) -> LiveBytes:
    tensor = found.tensor
    return LiveBytes(
        path=tensor.path,
        group=group,
        region=tensor.region,
        offset=found.start,
        block_stride=found.block_stride,
        axes=found.inner_axes,
        item_bytes=tensor.item_bytes,
    )


def _live_state(layer: str, group: int, part: Component) -> LiveBytes:
    return LiveBytes(
        path=f"{layer}.{part.role}",
        group=group,
        region=part.region,
        offset=part.offset,
        block_stride=part.block_stride,
        axes=tuple(zip(part.extents, part.strides, strict=True)),
        item_bytes=part.item_bytes,
    )


def _num_blocks(blocks: Mapping[str, int]) -> int:
    """Return the number of blocks that all layers have.

    Raises:
        SpecInvalid: names a layer whose number of blocks differs from that of most layers.
    """
    counts = Counter(blocks.values())
    num_blocks = max(counts, key=lambda count: (counts[count], count))
    for name, count in blocks.items():
        if count != num_blocks:
            like = next(other for other, theirs in blocks.items() if theirs == num_blocks)
            raise SpecInvalid(
                f"{name}: num_blocks is {count}; expected {num_blocks}, as {like} has",
                remedy="Give every layer a tensor with all blocks of the pool.",
            )
    return num_blocks
