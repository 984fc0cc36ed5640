"""What an engine hands over: a tensor or a list of them per layer, checked, and described without torch."""

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
    """What was given for one layer.

    Attributes:
        name: of the layer.
        tensors: at least one.
        place: of the layer among those that were given the same tensor.
    """

    name: str
    tensors: tuple[TensorLayout, ...]
    place: LayerSlice


def check_tensors(tensors: Mapping[str, object], layers: Collection[str]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each layer as a list.

    Args:
        tensors: layer name -> tensor, or list or tuple of tensors.
        layers: names that must all be there, and no others.

    Raises:
        ArgumentInvalid: tensors is no mapping.
        SpecInvalid: a layer is missing or too many, has something else than tensors in memory, or has them on
            several devices.
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentInvalid("tensors", "a mapping from layer name to tensor", tensors)
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
            raise SpecInvalid(f"{name}: found an empty list; expected a tensor, or one per state")
        found = [_checked(_path(name, index, values), each) for index, each in enumerate(values)]
        if len({tensor.device for tensor in found}) > 1:
            devices = [str(tensor.device) for tensor in found]
            raise SpecInvalid(f"{name}: devices are {devices}; expected one", remedy="Keep a layer on one device.")
        given[name] = found
    return given


def describe_tensors(
    given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]
) -> tuple[dict[str, GivenLayer], list[torch.Tensor]]:
    """Return each layer's tensors with their places in regions, and the memory of the regions.

    Raises:
        SpecInvalid: a storage ends before its tensor does, layers of one group are in memory of several kinds, or
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
    """Return the tensor if it has elements in memory, of a dtype that a cache can have."""
    if not isinstance(tensor, torch.Tensor):
        raise SpecInvalid(f"{path}: found {type(tensor).__name__}; expected a torch tensor")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else str(tensor.layout)
        raise SpecInvalid(f"{path}: found a {kind} tensor; expected a strided one in memory")
    if _dtype(tensor) not in ITEM_BYTES:
        raise SpecInvalid(f"{path}: dtype is {_dtype(tensor)}; expected one of {', '.join(ITEM_BYTES)}")
    if not tensor.numel() or not tensor.dim():
        raise SpecInvalid(f"{path}: shape is {list(tensor.shape)}; expected axes of at least one element each")
    return tensor


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _path(name: str, index: int, found: Sequence[object]) -> str:
    return name if len(found) == 1 else f"{name}[{index}]"


def _check_memory_kinds(given: Mapping[str, Sequence[torch.Tensor]], groups: Sequence[Group]) -> None:
    """Check that no group is partly in host memory: one transfer reads one kind of memory."""
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
    """Return the place of each layer among those that were given the same tensor.

    An axis of layers counts either all of them or, where groups share its memory, those of one group.
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
