"""vLLM's description of its cache -> kvflow's specs and groups.

vLLM's specs are told apart by the names of their classes, so that this module needs no vLLM.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from kvflow import MLA, ChunkedLocal, FullAttention, Group, Mamba, Opaque, SlidingWindow, State
from kvflow.errors import SpecInvalid

CacheSpec = FullAttention | SlidingWindow | ChunkedLocal | MLA | Mamba | Opaque

QUANTIZATIONS = {"NONE": None, "FP8_PER_TENSOR": None, "FP8_PER_TOKEN_HEAD": "fp8_per_token_head"}
"""vLLM's ``KVQuantMode`` -> kvflow's quantization. Scales per tensor are not in the cache."""

E5M2_IGNORED = ("TRITON_ATTN", "ROCM_")
"""Attention backends, by the start of their names, that keep the platform's fp8 when told ``fp8_e5m2``.
Source: vLLM 0.32, ``triton_attn.py`` and ``rocm_attn.py`` of its backends: they view the cache as ``fp8_dtype()``.
"""

INDEXER = "DeepseekV32IndexerCache"
"""Class of vLLM, and base of ROCm's, that tells no ``kv_cache_dtype``: its cache is the platform's fp8, whatever the
others' is. A kernel block has all values first and then all scales, though its shape says otherwise. On ROCm the values
lie in tiles besides, unless a kernel block is one token.
Source: vLLM 0.32, ``indexer_k_quant_and_cache`` of ``csrc``, and ``rocm_aiter_mla_sparse.py``.
"""

HEADED = ("FullAttentionSpec", "SlidingWindowSpec")
"""Classes of vLLM whose pages move whole where nothing can be said of what is in them."""

PORTABLE_STATES = ("conv", "ssm")
"""What Mamba 1, Mamba 2 and gated delta nets keep, in the order of a page."""


class EngineShape(Struct, frozen=True, kw_only=True):
    """What the specs of an engine must be read with.

    Attributes:
        tp_size: ranks that divide the heads: vLLM's specs count those of one rank.
        num_kv_heads: layer name -> KV heads of the layer in the whole model, where it is known.
        kernel_tokens: layer name -> tokens of one block of the attention kernel, as the layer's tensor has them.
        conv_channels_first: whether convolution states lie channels first (vLLM's layout ``DS``).
        element_types: layer name -> what the bytes of its cache are, where vLLM's tensor has ``uint8``; see
            ``byte_format``.
        arrangements: layer name -> name of how its bytes are arranged, for caches that no description of ours fits.
    """

    tp_size: int = 1
    num_kv_heads: Mapping[str, int] = {}
    kernel_tokens: Mapping[str, int] = {}
    conv_channels_first: bool = True
    element_types: Mapping[str, str] = {}
    arrangements: Mapping[str, str] = {}


def read_groups(groups: Iterable[Any]) -> tuple[Group, ...]:
    """Return the groups of vLLM's ``KVCacheGroupSpec``, in their order.

    Raises:
        SpecInvalid: a group has layers of kinds that share no table, or that are not known.
    """
    return tuple(_read_group(group) for group in groups)


def read_specs(groups: Iterable[Any], shape: EngineShape) -> dict[str, CacheSpec]:
    """Return kvflow's spec of every layer of vLLM's ``KVCacheGroupSpec``.

    Raises:
        SpecInvalid: names the layer whose cache cannot be described.
    """
    return {name: read_spec(name, spec, shape) for group in groups for name, spec in layer_specs(group)}


def layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and vLLM's spec of each layer of a group; a group may have one for all, or one for each."""
    own: Mapping[str, Any] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, group.kv_cache_spec if own is None else own[name]


def read_spec(name: str, spec: Any, shape: EngineShape) -> CacheSpec:
    """Return kvflow's spec of one layer.

    Raises:
        SpecInvalid: its cache cannot be described, or its page is not what the description says.
    """
    return _reader(name, spec)(name, spec, shape)


def state_block(ids: list[int], spec: Any) -> int | None:
    """Return the block with the running state of a request: the last one before those for speculation.

    Args:
        ids: of the request, as vLLM's manager lists them.
        spec: vLLM's spec of the group.
    """
    if not ids:
        return None
    scratch: int = min(spec.num_speculative_blocks, len(ids) - 1)  # they may come later
    return ids[-1 - scratch]


def opaque(spec: Any) -> bool:
    """Tell whether the pages of one of vLLM's specs can only move whole: between equal ones, and never cut."""
    return type(spec).__name__ in HEADED and bool(_undescribed(spec))


def arranged_by_kernel_block(module: Any) -> bool:
    """Tell whether a layer of vLLM keeps one vector per token, but not one after the other in a kernel block."""
    return any(each.__name__ == INDEXER for each in type(module).__mro__)


def retained_tokens(group: Any) -> int:
    """Return how many tokens before its window vLLM keeps in a group: its draft layers look at them.

    Args:
        group: one of vLLM's ``KVCacheGroupSpec``.
    """
    return max(getattr(spec, "extra_retained_tokens", 0) for _, spec in layer_specs(group))


def byte_format(cache_dtype: str, *, platform_fp8: str, backend: str = "") -> str:
    """Return torch's name of what vLLM keeps in a cache of ``uint8``; empty if it is not known.

    Args:
        cache_dtype: vLLM's name, resolved for one layer: ``fp8``, ``fp8_e5m2``, ...
        platform_fp8: torch's name of the platform's ``fp8_dtype()``.
        backend: vLLM's name of the layer's attention backend.
    """
    match cache_dtype:
        case "fp8" | "fp8_e4m3" | "fp8_per_token_head" | "fp8_ds_mla":
            return platform_fp8
        case "fp8_e5m2":
            return platform_fp8 if backend.startswith(E5M2_IGNORED) else "float8_e5m2"
        case "nvfp4_ds_mla":
            return "uint8"  # two elements in a byte, and their scales: one format, told by its size
    return ""


def dtype_name(dtype: Any) -> Any:
    """Return torch's name of a dtype, without its module."""
    return str(dtype).removeprefix("torch.")


def _read_group(group: Any) -> Group:
    named = dict(layer_specs(group))
    kinds = {_kind(name, spec) for name, spec in named.items()}
    kind, window = kinds.pop() if len(kinds) == 1 else ("mixed", 0)
    return Group(layers=tuple(named), kind=kind, block_size=group.kv_cache_spec.block_size, window=window)


def _kind(name: str, spec: Any) -> tuple[str, int]:
    """Return kind and window, which layers of one group have in common."""
    reader = _reader(name, spec)
    if reader is _read_state:
        return "mamba", 0
    if opaque(spec):
        return "opaque", getattr(spec, "sliding_window", None) or 0
    if reader is _read_latent:
        return "mla", getattr(spec, "sliding_window", None) or 0
    if reader is _read_sliding:
        return "sliding", spec.sliding_window
    if reader is _read_chunked:
        return "chunked", spec.attention_chunk_size
    return "full", 0


def _read_full(name: str, spec: Any, shape: EngineShape) -> FullAttention | Opaque:
    return _read_opaque(name, spec, shape) if opaque(spec) else FullAttention(**_attention(name, spec, shape))


def _read_sliding(name: str, spec: Any, shape: EngineShape) -> SlidingWindow | Opaque:
    if opaque(spec):
        return _read_opaque(name, spec, shape)
    return SlidingWindow(window=spec.sliding_window, **_attention(name, spec, shape))


def _read_chunked(name: str, spec: Any, shape: EngineShape) -> ChunkedLocal:
    return ChunkedLocal(chunk=spec.attention_chunk_size, **_attention(name, spec, shape))


def _read_latent(name: str, spec: Any, shape: EngineShape) -> MLA:
    """Describe one vector per token; whatever it is made of, it lies together and moves as a whole."""
    _require_plain(name, spec)
    nbytes = spec.state_content_size_bytes
    dense = nbytes == spec.head_size * spec.dtype.itemsize
    return MLA(
        head_size=spec.head_size if dense else nbytes,
        dtype=_element_type(name, spec, shape) if dense or spec.dtype.itemsize == 1 else "uint8",
        sliding_window=getattr(spec, "sliding_window", None) or 0,
        arrangement=shape.arrangements.get(name, ""),
        **_pages(name, spec, shape),
    )


def _read_opaque(name: str, spec: Any, shape: EngineShape) -> Opaque:
    """Describe pages that only a peer with the same backend, geometry and number of ranks can use."""
    _require_plain(name, spec)
    arrangement = shape.arrangements.get(name, "")
    if not arrangement:
        raise SpecInvalid(
            f"{name}: {_undescribed(spec)}", remedy="Use another attention backend or kv_cache_dtype on both sides."
        )
    return Opaque(
        block_size=spec.block_size,
        nbytes=spec.unpadded_page_size_bytes,
        arrangement=arrangement,
        ranks=shape.tp_size,
        window=getattr(spec, "sliding_window", None) or 0,
        page_bytes=spec.page_size_padded,
    )


def _read_state(name: str, spec: Any, shape: EngineShape) -> Mamba:
    """Describe the states of a recurrent layer as its rank has them.

    What is in a rank's convolution state depends on how many ranks there are: its parts are divided one by one. So
    the number of ranks is in the names, and engines of different sizes refuse each other instead of mixing the parts.
    """
    shapes = [tuple(each) for each in spec.shapes]
    names = PORTABLE_STATES if len(shapes) == 2 else tuple(f"state_{index}" for index in range(len(shapes)))
    suffix = "" if shape.tp_size == 1 or spec.tp_replicated else f"_of_{shape.tp_size}"
    states = []
    for state, extents, dtype in zip(names, shapes, spec.dtypes, strict=True):
        turned = state == "conv" and len(extents) == 2 and not shape.conv_channels_first
        whole = extents[::-1] if turned else extents
        axis = None if spec.tp_replicated else 0
        if axis is not None:
            whole = (whole[0] * shape.tp_size, *whole[1:])
        states.append(State(f"{state}{suffix}", whole, dtype_name(dtype), shard_axis=axis))
    return Mamba(block_size=spec.block_size, page_bytes=spec.page_size_padded, states=tuple(states))


def _attention(name: str, spec: Any, shape: EngineShape) -> dict[str, Any]:
    """Return what all kinds of attention with heads have in common."""
    _require_plain(name, spec)
    problem = _undescribed(spec)
    if problem:
        raise SpecInvalid(f"{name}: {problem}", remedy="Use another attention backend or kv_cache_dtype.")
    return {
        "num_kv_heads": _heads(name, spec, shape),
        "head_size": spec.head_size,
        "head_size_v": 0 if spec.head_size_v == spec.head_size else spec.head_size_v,
        "dtype": _element_type(name, spec, shape),
        "quantization": QUANTIZATIONS[quantization(spec)],
        **_pages(name, spec, shape),
    }


def quantization(spec: Any) -> str:
    """Return the name of vLLM's ``KVQuantMode`` of a spec."""
    return str(getattr(spec.kv_quant_mode, "name", spec.kv_quant_mode))


def _undescribed(spec: Any) -> str:
    """Say why the keys and values of one token and head cannot be told apart; empty if they can."""
    mode = quantization(spec)
    if mode not in QUANTIZATIONS:
        return f"a cache quantized as {mode} cannot be described"
    if spec.num_heads != spec.num_kv_heads:
        return f"{spec.num_heads} slots for {spec.num_kv_heads} heads: expected one each"
    described = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    described += 2 * 4 if QUANTIZATIONS[mode] else 0
    if described != spec.state_content_size_bytes:
        return (
            f"a head of a token has {spec.state_content_size_bytes} bytes: expected {described}, "
            f"of {spec.head_size} and {spec.head_size_v} elements of {dtype_name(spec.dtype)}"
        )
    return ""


def _element_type(name: str, spec: Any, shape: EngineShape) -> Any:
    """Return what a layer's cache holds, as torch names it: vLLM keeps every fp8 as bytes, and so tells them apart."""
    declared = dtype_name(spec.dtype)
    if declared != "uint8":
        return declared
    found = shape.element_types.get(name, "")
    if not found:
        raise SpecInvalid(
            f"{name}: its cache is of bytes, and what they are is not known",
            remedy="Use a kv_cache_dtype of auto, bfloat16, fp8, fp8_e4m3 or fp8_e5m2.",
        )
    return found


def _require_plain(name: str, spec: Any) -> None:
    if spec.tokens_per_state != 1:
        raise SpecInvalid(f"{name}: {spec.tokens_per_state} tokens share a cell of the cache: expected 1")


def _pages(name: str, spec: Any, shape: EngineShape) -> dict[str, Any]:
    kernel = shape.kernel_tokens.get(name, spec.block_size)
    return {
        "block_size": spec.block_size,
        "kernel_block_size": 0 if kernel == spec.block_size else kernel,
        "page_bytes": spec.page_size_padded,
    }


def _heads(name: str, spec: Any, shape: EngineShape) -> int:
    """Return how many KV heads a layer has in the whole model, of which this rank holds ``spec.num_kv_heads``.

    Where that is not known, every rank is taken to hold others: a peer that knows better then refuses by name.
    """
    held: int = spec.num_kv_heads
    total: int = getattr(spec, "max_tp_shards", None) or shape.num_kv_heads.get(name, 0)
    return total if total and max(1, total // shape.tp_size) == held else held * shape.tp_size


Reader = Callable[[str, Any, EngineShape], CacheSpec]

READERS: dict[str, Reader] = {
    "FullAttentionSpec": _read_full,
    "SlidingWindowSpec": _read_sliding,
    "ChunkedLocalAttentionSpec": _read_chunked,
    "MLAAttentionSpec": _read_latent,
    "SlidingWindowMLASpec": _read_latent,
    "MambaSpec": _read_state,
}
"""Class of vLLM -> what reads it. Classes derived from these for a model of their own need an entry of their own."""


def _reader(name: str, spec: Any) -> Reader:
    kind = type(spec).__name__
    if kind not in READERS:
        raise SpecInvalid(
            f"{name}: a cache of {kind} cannot be described",
            remedy=f"Serve a model whose caches are of {', '.join(READERS)}.",
        )
    return READERS[kind]
