"""What vLLM hands over in ``register_kv_caches`` -> a cache that kvflow can move, whatever strides vLLM made."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvflow import KVCache, Shard, adopt
from kvflow.errors import SpecInvalid
from kvflow.integrations.vllm.cpu_attention import keys_and_values, strided
from kvflow.integrations.vllm.specs import EngineShape, layer_specs, read_groups, read_specs

Tensor = Any
"""A tensor of torch, which only ``kvflow.memory`` imports."""


def adopt_caches(
    kv_caches: Mapping[str, Tensor],
    groups: Iterable[Any],
    shape: EngineShape,
    *,
    tp_rank: int,
    kernels: Mapping[str, str] = {},
) -> KVCache:
    """Describe vLLM's cache as one of kvflow's.

    Args:
        kv_caches: layer name -> ``[blocks, heads, tokens, content]``, or for states ``[blocks, 1, 1, bytes]``; layers
            that are not in a group, because they use another one's cache, are left out.
        groups: vLLM's groups that travel.
        shape: of the engine; the kernels' blocks are read from the tensors.
        tp_rank: of this worker.
        kernels: layers whose attention is that of CPUs, and its kernel; see ``cpu_attention``.

    Raises:
        SpecInvalid: names the layer, what is wrong with its cache, and what was expected.
    """
    groups = tuple(groups)
    named = {name: spec for group in groups for name, spec in layer_specs(group)}
    missing = sorted(set(named) - set(kv_caches))
    if missing:
        raise SpecInvalid(f"vLLM gave no tensor for {missing[:5]}", remedy="Report it: this is a defect of kvflow.")
    tensors = {name: kv_caches[name] for name in named}
    kernel_tokens = {name: tensor.shape[2] for name, tensor in tensors.items() if not hasattr(named[name], "shapes")}
    shape = msgspec.structs.replace(shape, kernel_tokens=kernel_tokens)
    apart = kernels if strided(kernels, tensors) else {}
    return adopt(
        {
            name: keys_and_values(tensor) if name in apart else states_of(tensor, named[name])
            for name, tensor in tensors.items()
        },
        read_specs(groups, shape),
        read_groups(groups),
        shard=Shard(tp_rank=tp_rank, tp_size=shape.tp_size),
        axes=dict.fromkeys(apart, "BHNC"),
    )


def states_of(tensor: Tensor, spec: Any) -> Tensor:
    """Return the states of a recurrent layer as views of its page of bytes; other layers' tensors as they are."""
    if not hasattr(spec, "shapes"):
        return tensor
    page = tensor.flatten(1) if tensor.dim() > 2 else tensor
    views, offset = [], 0
    for extents, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        nbytes = dtype.itemsize
        for extent in extents:
            nbytes *= extent
        views.append(page[:, offset : offset + nbytes].view(dtype).unflatten(1, tuple(extents)))
        offset += nbytes
    return views
