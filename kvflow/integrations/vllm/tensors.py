"""What vLLM hands over in ``register_kv_caches`` -> a cache that kvflow can move, whatever strides vLLM made."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvflow import KVCache, Shard, adopt
from kvflow.errors import SpecInvalid
from kvflow.integrations.vllm.cpu_attention import keys_and_values, strided
from kvflow.integrations.vllm.specs import (
    EngineShape,
    layer_specs,
    opaque,
    quantization,
    read_groups,
    read_specs,
)

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
    whole = {name for name, spec in named.items() if opaque(spec)}
    arrangements = {
        name: f"{found}_{quantization(named[name]).lower()}_{geometry(tensors[name])}" if name in whole else found
        for name, found in shape.arrangements.items()
        if name in named
    }
    tensors |= {name: page_of(name, tensors[name], named[name]) for name in whole}
    shape = msgspec.structs.replace(shape, kernel_tokens=kernel_tokens, arrangements=arrangements)
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


def set_scales(kv_caches: Mapping[str, Tensor], modules: Mapping[str, Any]) -> None:
    """Have backends that keep scales in the cache set all of them to one now, before a transfer brings others.

    Triton's backend does it when a layer first runs, which may be after the first load. It views the scales only once.
    Source: ``TritonAttentionImpl._ensure_scale_caches`` of vLLM 0.32.

    Args:
        kv_caches: layer name -> ``[blocks, heads, tokens, content]``.
        modules: vLLM's layers by their names.
    """
    for name, tensor in kv_caches.items():
        backend: Any = getattr(modules.get(name), "impl", None)
        if getattr(backend, "_is_per_token_head_quant", False) and hasattr(backend, "_ensure_scale_caches"):
            backend._ensure_scale_caches(tensor)  # noqa: SLF001 - nothing else of vLLM does it


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


def geometry(tensor: Tensor) -> str:
    """Return what two tensors ``[blocks, heads, tokens, content]`` must have in common for their pages to be alike."""
    _, heads, tokens, content = tensor.shape
    order = "nh" if tensor.stride(1) < tensor.stride(2) else "hn"
    return f"{heads}x{tokens}x{content * tensor.element_size()}{order}"


def page_of(name: str, tensor: Tensor, spec: Any) -> Tensor:
    """Return a layer's tensor as its pages, ``[blocks, bytes]``.

    Raises:
        SpecInvalid: a page does not lie together, so that it cannot move whole.
    """
    size = tensor.element_size()
    tokens = tensor.shape[2]
    nbytes = spec.unpadded_page_size_bytes * tokens // spec.block_size
    axes = sorted((tensor.stride(axis), tensor.shape[axis]) for axis in (1, 2, 3) if tensor.shape[axis] > 1)
    expected = 1
    for stride, extent in axes:
        if stride != expected or tensor.stride(3) != 1:
            raise SpecInvalid(
                f"{name}: its pages cannot be described, and do not lie together either: strides are {tensor.stride()}",
                remedy="Use another VLLM_KV_CACHE_LAYOUT: BLHNC or LBHNC.",
            )
        expected *= extent
    kernel_blocks = spec.block_size // tokens
    if kernel_blocks > 1 and tensor.stride(0) != expected:
        raise SpecInvalid(
            f"{name}: its pages cannot be described, and its kernel blocks of {tokens} tokens do not lie together",
            remedy=f"Use a --block-size of {tokens}.",
        )
    raw = tensor.view(tensor.new_empty(0).byte().dtype)
    return raw.as_strided(
        (tensor.shape[0] // kernel_blocks, nbytes * kernel_blocks), (tensor.stride(0) * size * kernel_blocks, 1)
    )
