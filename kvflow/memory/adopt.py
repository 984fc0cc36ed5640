"""Describe a cache in memory that an engine allocated. Its tensors may have any strides.

The address ranges that the tensors span are found, and joined to regions. A worker registers exactly these.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from msgspec import Struct

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.describe import fitted_specs, manifest_group
from kvflow.layout.groups import Group, check_groups, plan_groups
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import PlacedLayer, has_tokens, page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec, validate_specs
from kvflow.memory.cache import KVCache, Tensors, region_of
from kvflow.memory.overlap import LiveBytes, check_overlaps
from kvflow.memory.recognize import (
    LayerSlice,
    ReadTensor,
    TensorLayout,
    attention_components,
    check_axes,
    read_attention,
    read_states,
)


def adopt(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    specs: Mapping[str, CacheSpec],
    groups: Sequence[Group] | None = None,
    *,
    shard: Shard | None = None,
    axes: Mapping[str, str] | None = None,
    rebuilt: Collection[str] = (),
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
        rebuilt: as in ``allocate``.

    Returns:
        A cache of exactly the bytes that the tensors span; ``bytes_per_block`` is their sum over the number of blocks.

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
        rebuilt=tuple(rebuilt),
    )
    manifest.check()
    views: dict[str, Tensors] = {name: found if name in lists else found[0] for name, found in given.items()}
    return KVCache(groups, manifest, storages, views, sum(storage.nbytes for storage in storages) // num_blocks)


TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class GivenLayer(Struct, frozen=True):
    """The tensors of one layer, and its place among the layers that share a tensor."""

    name: str
    tensors: tuple[TensorLayout, ...]
    place: LayerSlice


_TENSORS = "Pass the tensors of the engine's cache, which hold its memory."


def check_tensors(tensors: Mapping[str, object], layers: Collection[str]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each layer of ``layers`` as a list. Raises ArgumentInvalid and SpecInvalid as ``adopt``."""
    if not isinstance(tensors, Mapping):
        remedy = "Pass a dict from layer name to tensor, or to a list of tensors."
        raise ArgumentInvalid("tensors", "a mapping from layer name to tensor", tensors, remedy=remedy)
    missing, extra = set(layers) - set(tensors), set(tensors) - set(layers)
    if missing or extra:
        raise SpecInvalid(
            f"tensors and specs do not name the same layers: {sorted(missing)[:5]} have no tensor, "
            f"{sorted(map(str, extra))[:5]} have no spec",
            remedy="Give one entry in each for every layer.",
        )
    given = {}
    for name, value in tensors.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise SpecInvalid(f"{name}: found an empty list; expected a tensor, or one per state", remedy=_TENSORS)
        found = [_checked(_path(name, index, values), each) for index, each in enumerate(values)]
        if len({tensor.device for tensor in found}) > 1:
            devices = [str(tensor.device) for tensor in found]
            raise SpecInvalid(f"{name}: devices are {devices}; expected one", remedy="Keep a layer on one device.")
        given[name] = found
    return given


def describe_tensors(
    given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]
) -> tuple[dict[str, GivenLayer], list[torch.Tensor]]:
    """Return where each layer's tensors lie in regions, and the memory of the regions. Raises SpecInvalid."""
    _check_memory_kinds(given, groups)
    named = [(name, index, tensor) for name, found in given.items() for index, tensor in enumerate(found)]
    spans = [span_of(_path(name, index, given[name]), tensor) for name, index, tensor in named]
    storages, region_of_span = join_spans(spans)
    layouts: dict[str, list[TensorLayout]] = {name: [] for name in given}
    for (name, index, tensor), span, region in zip(named, spans, region_of_span, strict=True):
        size = tensor.element_size()
        layouts[name].append(
            TensorLayout(
                path=_path(name, index, given[name]),
                dtype=_dtype(tensor),
                shape=tuple(tensor.shape),
                strides=tuple(stride * size for stride in tensor.stride()),
                region=region,
                offset=span.low - storages[region].data_ptr(),
                alignment_offset=int(storages[region].storage_offset()),
            )
        )
    places = _places(given, groups)
    return {name: GivenLayer(name, tuple(found), places[name]) for name, found in layouts.items()}, storages


def _checked(path: str, tensor: object) -> torch.Tensor:
    """Return the tensor if it has elements in memory, and a dtype that a cache can have."""
    if not isinstance(tensor, torch.Tensor):
        raise SpecInvalid(f"{path}: found {type(tensor).__name__}; expected a torch tensor", remedy=_TENSORS)
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else str(tensor.layout)
        raise SpecInvalid(f"{path}: found a {kind} tensor; expected a strided one in memory", remedy=_TENSORS)
    if _dtype(tensor) not in ITEM_BYTES:
        remedy = "Give the cache in a supported dtype, or as bytes (tensor.view(torch.uint8))."
        raise SpecInvalid(f"{path}: dtype is {_dtype(tensor)}; expected one of {', '.join(ITEM_BYTES)}", remedy=remedy)
    if not tensor.numel() or not tensor.dim():
        shape = list(tensor.shape)
        raise SpecInvalid(f"{path}: shape is {shape}; expected axes of at least one element each", remedy=_TENSORS)
    return tensor


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _path(name: str, index: int, found: Sequence[object]) -> str:
    return name if len(found) == 1 else f"{name}[{index}]"


def _check_memory_kinds(given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]) -> None:
    """Check that each group is in one kind of memory, because one transfer reads one kind."""
    for group in groups:
        for first, name in pairwise(group.layers):
            kind, found = (given[each][0].device.type for each in (first, name))
            if found != kind:
                raise SpecInvalid(
                    f"{name}: device is {found}; expected {kind}, where {first} of the same group is",
                    remedy="Keep the layers of one group in one kind of memory.",
                )


def _places(given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]) -> dict[str, LayerSlice]:
    """Return the place of each layer on the layer axis of a shared tensor, among all layers or those of its group."""
    keys = {name: _key(found[0]) for name, found in given.items() if len(found) == 1}
    totals = Counter(keys.values())
    per_group = [Counter(keys[name] for name in group.layers if name in keys) for group in groups]
    longest = {key: max(counts[key] for counts in per_group) for key in totals}
    places = dict.fromkeys(given, LayerSlice())
    seen: Counter[TensorKey] = Counter()
    for group in groups:
        seen_here: Counter[TensorKey] = Counter()
        for name in group.layers:
            if name in keys:
                key = keys[name]
                choices = dict.fromkeys([(totals[key], seen[key]), (longest[key], seen_here[key])])
                places[name] = LayerSlice(tuple(choices), longest[key] > 1)
                seen[key] += 1
                seen_here[key] += 1
    return places


def _key(tensor: torch.Tensor) -> TensorKey:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class _Found(Struct, frozen=True):
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


def _read(spec: CacheSpec, shard: Shard, given: GivenLayer, form: str | None, *, listed: bool, group: int) -> _Found:
    page_bytes(spec, shard, layer=given.name)  # refuses padding that is too small
    if not has_tokens(spec):
        num_blocks, components = read_states(spec, shard, given.tensors, listed=listed)
        return _Found(num_blocks, components, tuple(_live_state(given.name, group, part) for part in components))
    if form is not None:
        check_axes(given.name, spec, form, apart=len(given.tensors) > 1)
    found = read_attention(spec, shard, given.tensors, given.place, form)
    components = attention_components(spec, shard, found)
    return _Found(found[0].num_blocks, components, tuple(_live_tensor(group, each) for each in found))


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
    """Return the number of blocks that all layers have."""
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


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a storage from the first to after the last of one tensor, as addresses."""

    low: int
    high: int
    storage: torch.UntypedStorage
    device: torch.device


def span_of(path: str, tensor: torch.Tensor) -> Span:
    """Return the bytes that a tensor spans; SpecInvalid if its storage is shorter."""
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + reach) * tensor.element_size()
    if end > storage.nbytes():
        raise SpecInvalid(
            f"{path}: storage has {storage.nbytes()} bytes; the tensor needs {end} of them",
            remedy="Give tensors whose memory is still there.",
        )
    low = tensor.data_ptr()
    return Span(low, low + reach * tensor.element_size(), storage, tensor.device)


def join_spans(spans: Sequence[Span]) -> tuple[list[torch.Tensor], list[int]]:
    """Join spans that overlap, or that touch within one storage.

    Return one flat uint8 tensor per region, sorted by address, which keeps the memory alive; and each span's region.

    Raises:
        SpecInvalid: storages overlap, and none of them contains a whole region.
    """
    regions: list[list[int]] = []
    high, previous = 0, None
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].low, spans[at].high)):
        span = spans[index]
        same_device = previous is not None and span.device == previous.device
        touches = previous is not None and span.storage.data_ptr() == previous.storage.data_ptr() and span.low == high
        if same_device and (span.low < high or touches):
            regions[-1].append(index)
            high = max(high, span.high)
        else:
            regions.append([index])
            high = span.high
        previous = span
    region_of = [0] * len(spans)
    for region, members in enumerate(regions):
        for index in members:
            region_of[index] = region
    return [_flat([spans[index] for index in members]) for members in regions], region_of


def _flat(members: Sequence[Span]) -> torch.Tensor:
    low, high = min(span.low for span in members), max(span.high for span in members)
    for span in members:
        start = low - span.storage.data_ptr()
        if start >= 0 and high <= span.storage.data_ptr() + span.storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=span.device)
            return empty.set_(span.storage, start, (high - low,), (1,))
    raise SpecInvalid(
        f"bytes {low:#x} to {high:#x} belong to several storages that overlap, and to none as a whole",
        remedy="Make the tensors views of one storage.",
    )
