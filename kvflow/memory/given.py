"""Check the tensors that an engine passes, one or a list per layer, and describe them without torch."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from msgspec import Struct

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout.groups import Group
from kvflow.layout.specs import ITEM_BYTES
from kvflow.memory.axes import LayerSlice, TensorLayout
from kvflow.memory.regions import join_spans, span_of

TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class GivenLayer(Struct, frozen=True):
    """The tensors that were given for one layer.

    Attributes:
        name: name of the layer.
        tensors: at least one.
        place: place of the layer among the layers that share a tensor.
    """

    name: str
    tensors: tuple[TensorLayout, ...]
    place: LayerSlice


_TENSORS = "Pass the tensors of the engine's cache, which hold its memory."


def check_tensors(tensors: Mapping[str, object], layers: Collection[str]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each layer as a list.

    Args:
        tensors: layer name -> tensor, or list or tuple of tensors.
        layers: the names that ``tensors`` must have, and no others.

    Raises:
        ArgumentInvalid: ``tensors`` is not a mapping.
        SpecInvalid: a layer is missing or unknown, has something other than tensors in memory, or has tensors on
            several devices.
    """
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
    """Return where each layer's tensors lie in regions, and the memory of the regions.

    Raises:
        SpecInvalid: a storage is shorter than its tensor, layers of one group are in several kinds of memory, or
            storages overlap.
    """
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
        first, *others = group.layers
        kind = given[first][0].device.type
        for name in others:
            found = given[name][0].device.type
            if found != kind:
                raise SpecInvalid(
                    f"{name}: device is {found}; expected {kind}, where {first} of the same group is",
                    remedy="Keep the layers of one group in one kind of memory.",
                )


def _places(given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]) -> dict[str, LayerSlice]:
    """Return the place of each layer among the layers that share its tensor.

    A layer axis counts all of them, or those of one group if groups share its memory.
    """
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
