"""The cache of vLLM's attention on CPUs, whose memory order differs from its shape.

Its shape is ``[blocks, heads, tokens, 2 * head size]``, as for other backends. But in the bytes of one head of a block,
all keys come before all values, and the order of the keys depends on the kernel. The kernel ``vec`` has the tokens
innermost, which strides can describe. Other kernels mix tokens and content in tiles, which strides cannot describe. Two
engines with the same kernel and block size transfer such bytes unchanged; other pairs must refuse each other.
Source: ``csrc/cpu/cpu_attn_vec.hpp`` of vLLM.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Tensor = Any
"""A tensor of torch. Only ``kvflow.memory`` imports torch."""

STRIDED_KERNEL = "vec"

CELLS_MAX = 1 << 20
"""Largest number of key elements in one block, all layers together, that is described by strides.

Strides describe single elements, the finest unit that a plan compares. Most engines have peers of the same kind and
transfer whole blocks in either case.
"""

UNKNOWN_KERNEL = "unknown"


def cpu_kernels(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, str]:
    """Return the kernel of each layer that uses vLLM's attention for CPUs: layer name -> ``vec``, ``amx``, ..."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - it detects devices

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
    """Tell whether strides can describe the keys of all these layers, and the keys are at most ``CELLS_MAX``."""
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
    """Return what two engines must have in common to exchange blocks unchanged; empty if strides describe the cache."""
    if not kernels or strided(kernels, tensors):
        return ""
    found = sorted({f"{kernel}/{tensors[name].shape[2]}" for name, kernel in kernels.items()})
    return "+" + "+".join(found)
