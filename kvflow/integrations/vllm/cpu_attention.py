"""vLLM's attention on CPUs, whose blocks do not hold what their shape says.

It gives its cache the shape ``[blocks, heads, tokens, 2 * head size]`` as others do, but in the bytes of one head of a
block all keys come first and then all values; and keys lie as their kernel wants them. The kernel ``vec`` has the
tokens innermost, which strides can say. Others mix tokens and content in tiles, which no strides can say: between two
engines with the same kernel and the same block size their bytes move as they are, and other pairs must refuse each
other.
Source: ``csrc/cpu/cpu_attn_vec.hpp`` of vLLM.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Tensor = Any
"""A tensor of torch, which only ``kvflow.memory`` imports."""

STRIDED_KERNEL = "vec"

CELLS_MAX = 1 << 20
"""Elements of the keys of one block, all layers together, up to which they are described one by one. That is the finest
that a plan must look at, and most engines have peers of their own kind, whose blocks move whole either way."""

UNKNOWN_KERNEL = "unknown"


def cpu_kernels(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, str]:
    """Return the kernel of each layer whose attention is that of CPUs: name -> ``vec``, ``amx``, ..."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - it looks for devices

    if not current_platform.is_cpu():
        return {}
    modules = vllm_config.compilation_config.static_forward_context
    backends = {name: getattr(modules.get(name), "attn_backend", None) for name in layers}
    return {
        name: getattr(modules[name], "isa", UNKNOWN_KERNEL)
        for name, backend in backends.items()
        if backend is not None and backend.get_name() == "CPU_ATTN"
    }


def strided(kernels: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether strides can say where the keys of all these layers lie, and are few enough."""
    known = all(kernel == STRIDED_KERNEL and tensors[name].is_floating_point() for name, kernel in kernels.items())
    return known and sum(tensors[name][0].numel() for name in kernels) <= 2 * CELLS_MAX


def keys_and_values(tensor: Tensor) -> list[Tensor]:
    """Return the keys and the values of one layer of the kernel ``vec``, each ``[blocks, heads, tokens, content]``.

    Args:
        tensor: ``[blocks, heads, tokens, 2 * content]`` as vLLM gives it.
    """
    blocks, heads, tokens, content = tensor.shape
    page = tensor.view(blocks, heads, tokens * content)
    half = tokens * content // 2
    keys = page[..., :half].unflatten(2, (content // 2, tokens)).transpose(2, 3)
    return [keys, page[..., half:].unflatten(2, (tokens, content // 2))]


def marker(kernels: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return what engines must have in common to read each other's blocks as they are; empty if strides say it all."""
    if not kernels or strided(kernels, tensors):
        return ""
    found = sorted({f"{kernel}/{tensors[name].shape[2]}" for name, kernel in kernels.items()})
    return "+" + "+".join(found)
