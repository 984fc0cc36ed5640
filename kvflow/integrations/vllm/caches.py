"""vLLM's description of its cache, and its tensors -> a cache that kvflow can move with any strides.

vLLM's specs are told apart by the names of their classes, so that this module needs no vLLM.

Attention on CPUs has a cache of the usual shape, ``[blocks, heads, tokens, 2 * head size]``. But in one head of a
block, all keys come before all values. The kernel ``vec`` has the tokens innermost, which strides can describe. Others
mix tokens and content in tiles: two engines with the same kernel and block size transfer such bytes unchanged, and
other pairs must refuse each other. Source: ``csrc/cpu/cpu_attn_vec.hpp`` of vLLM.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from kvflow import (
    MLA,
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    Group,
    Mamba,
    Opaque,
    Shard,
    SlidingWindow,
    State,
    models,
)
from kvflow.errors import SpecInvalid

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvflow import KVCache

Tensor = Any  # a tensor of torch, which only ``kvflow.memory`` imports


QUANTIZATIONS = {"NONE": None, "FP8_PER_TENSOR": None, "FP8_PER_TOKEN_HEAD": "fp8_per_token_head"}
"""vLLM's ``KVQuantMode`` -> kvflow's quantization. Scales per tensor are not in the cache."""

E5M2_IGNORED = ("TRITON_ATTN", "ROCM_")
"""Attention backends, by the start of their names, that keep the platform's fp8 when told ``fp8_e5m2``.
Source: vLLM 0.32, ``triton_attn.py`` and ``rocm_attn.py`` of its backends: they view the cache as ``fp8_dtype()``.
"""

INDEXER = "DeepseekV32IndexerCache"
"""Class of vLLM, and base of ROCm's, without a ``kv_cache_dtype``: its cache is always the platform's fp8. A kernel
block has all values first and then all scales, though its shape says otherwise; on ROCm the values lie in tiles, unless
a kernel block is one token. Source: vLLM 0.32, ``indexer_k_quant_and_cache``, and ``rocm_aiter_mla_sparse.py``."""

LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")
WHOLE = ("FullAttentionSpec", "SlidingWindowSpec", *LATENT)
"""Classes of vLLM whose pages move whole where their contents cannot be described."""

STRIDED_KERNEL = "vec"
UNKNOWN_KERNEL = "unknown"

CELLS_MAX = 1 << 20
"""Largest number of key elements in one block, all layers together, that is described by strides: strides describe
single elements, the finest unit that a plan compares. Most peers have the same kernel, and transfer whole blocks."""


class EngineShape(Struct, frozen=True, kw_only=True):
    """Facts of an engine that its specs do not have. Mappings are from the name of a layer."""

    tp_size: int = 1  # ranks that divide the heads: vLLM's specs count those of one rank
    num_kv_heads: Mapping[str, int] = {}  # in the whole model, where it is known
    states: Mapping[str, Mamba] = {}  # of the whole model, where ``kvflow.models`` knows them
    kernel_tokens: Mapping[str, int] = {}  # in one block of the attention kernel, as the layer's tensor has them
    conv_channels_first: bool = True  # convolution states lie channels first (vLLM's layout ``DS``)
    element_types: Mapping[str, str] = {}  # what the bytes are, where vLLM's tensor has ``uint8``
    arrangements: Mapping[str, str] = {}  # how the bytes are arranged, for caches that no description of ours fits


def read_groups(groups: Iterable[Any]) -> tuple[Group, ...]:
    """Return the groups of vLLM's ``KVCacheGroupSpec``; SpecInvalid if one has layers of an unknown kind."""
    return tuple(_read_group(group) for group in groups)


def layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and vLLM's spec of each layer of a group; a group may have one for all, or one for each."""
    own = _own_specs(group)
    for name in group.layer_names:
        yield name, own.get(name, group.kv_cache_spec)


def _own_specs(group: Any) -> Mapping[str, Any]:
    """Return the specs of a group's layers by name, also of other pipeline stages'; one without a name if all share."""
    own: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
    return own


def read_spec(name: str, spec: Any, shape: EngineShape) -> CacheSpec:
    """Return kvflow's spec of one layer. Raises SpecInvalid if its cache cannot be described."""
    return _read_opaque(name, spec, shape) if opaque(spec) else _known(name, spec)[2](name, spec, shape)


def state_block(ids: list[int], spec: Any) -> int | None:
    """Return the block with the running state of a request: the last one before those for speculation."""
    if not ids:
        return None
    scratch: int = min(spec.num_speculative_blocks, len(ids) - 1)  # they may come later
    return ids[-1 - scratch]


def opaque(spec: Any) -> bool:
    """Return whether the pages of one of vLLM's specs can only move whole: between equal ones, and never cut."""
    return type(spec).__name__ in WHOLE and bool(_undescribed(spec))


def arranged_by_kernel_block(module: Any) -> bool:
    """Return whether a layer of vLLM keeps one vector per token, but not one after the other in a kernel block."""
    return any(each.__name__ == INDEXER for each in type(module).__mro__)


def retained_tokens(group: Any) -> int:
    """Return how many tokens before its window vLLM keeps in a group: its draft layers look at them."""
    return max(getattr(spec, "extra_retained_tokens", 0) for spec in _own_specs(group).values())


def byte_format(cache_dtype: str, *, platform_fp8: str, backend: str = "") -> str:
    """Return torch's name of what vLLM keeps in a cache of ``uint8``; empty if it is not known.

    ``cache_dtype`` is vLLM's name, resolved for one layer, and ``platform_fp8`` torch's of its ``fp8_dtype()``.
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
    """Return the name of one of torch's dtypes."""
    return str(dtype).removeprefix("torch.")


def _read_group(group: Any) -> Group:
    kinds = {_kind(name or str(group.layer_names[:1]), spec) for name, spec in _own_specs(group).items()}
    kind, window = kinds.pop() if len(kinds) == 1 else ("mixed", 0)
    return Group(layers=tuple(group.layer_names), kind=kind, block_size=group.kv_cache_spec.block_size, window=window)


def _kind(name: str, spec: Any) -> tuple[str, int]:
    kind, window, _ = ("opaque", "sliding_window", None) if opaque(spec) else _known(name, spec)
    return kind, getattr(spec, window, None) or 0


def _read_full(name: str, spec: Any, shape: EngineShape) -> FullAttention:
    return FullAttention(**_attention(name, spec, shape))


def _read_sliding(name: str, spec: Any, shape: EngineShape) -> SlidingWindow:
    return SlidingWindow(window=spec.sliding_window, **_attention(name, spec, shape))


def _read_chunked(name: str, spec: Any, shape: EngineShape) -> ChunkedLocal:
    return ChunkedLocal(chunk=spec.attention_chunk_size, **_attention(name, spec, shape))


def _read_latent(name: str, spec: Any, shape: EngineShape) -> MLA:
    """Describe one vector per token: all that it is made of lies together and moves as a whole."""
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
    arrangement = shape.arrangements.get(name, "")
    if not arrangement:
        raise SpecInvalid(
            f"{name}: {_undescribed(spec)}", remedy="Use another attention backend or kv_cache_dtype on both sides."
        )
    return Opaque(
        block_size=spec.block_size,
        nbytes=spec.unpadded_page_size_bytes,
        arrangement=arrangement,
        ranks=1 if getattr(spec, "max_tp_shards", None) == 1 else shape.tp_size,
        window=getattr(spec, "sliding_window", None) or 0,
        page_bytes=spec.page_size_padded,
    )


def _read_state(name: str, spec: Any, shape: EngineShape) -> Mamba:
    """Describe the states of a recurrent layer in the whole model, in the order of its page."""
    held = [tuple(each) for each in spec.shapes]
    if _lies_channels_last(spec, shape):
        held[0] = held[0][::-1]
    states = models.whole_states(
        [State(f"state_{at}", each, dtype_name(spec.dtypes[at]), None) for at, each in enumerate(held)],
        shape.states.get(name),
        ranks=0 if spec.tp_replicated else shape.tp_size,
        one_part=str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower() == "mamba1",
    )
    return Mamba(block_size=spec.block_size, page_bytes=spec.page_size_padded, states=states)


def _lies_channels_last(spec: Any, shape: EngineShape) -> bool:
    return len(spec.shapes) == 2 and len(spec.shapes[0]) == 2 and not shape.conv_channels_first


def _attention(name: str, spec: Any, shape: EngineShape) -> dict[str, Any]:
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
    """Return why what is kept of one token, of one head if there are several, is not known; empty if it is."""
    if spec.tokens_per_state != 1:
        return f"{spec.tokens_per_state} tokens share a cell of its cache"
    if type(spec).__name__ in LATENT:
        version = getattr(spec, "model_version", None)  # a block has the values of all tokens first, then all scales
        return f"a cache of {version} cannot be described" if version else ""
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


def _pages(name: str, spec: Any, shape: EngineShape) -> dict[str, Any]:
    kernel = shape.kernel_tokens.get(name, spec.block_size)
    return {
        "block_size": spec.block_size,
        "kernel_block_size": 0 if kernel == spec.block_size else kernel,
        "page_bytes": spec.page_size_padded,
    }


def _heads(name: str, spec: Any, shape: EngineShape) -> int:
    """Return how many KV heads a layer has in the whole model; if unknown, as if each rank held others."""
    held: int = spec.num_kv_heads
    total: int = getattr(spec, "max_tp_shards", None) or shape.num_kv_heads.get(name, 0)
    return total if total and max(1, total // shape.tp_size) == held else held * shape.tp_size


SpecReader = Callable[[str, Any, EngineShape], CacheSpec]

READERS: dict[str, tuple[str, str, SpecReader]] = {
    "FullAttentionSpec": ("full", "", _read_full),
    "SlidingWindowSpec": ("sliding", "sliding_window", _read_sliding),
    "ChunkedLocalAttentionSpec": ("chunked", "attention_chunk_size", _read_chunked),
    "MLAAttentionSpec": ("mla", "sliding_window", _read_latent),
    "SlidingWindowMLASpec": ("mla", "sliding_window", _read_latent),
    "MambaSpec": ("mamba", "", _read_state),
}
"""Class of vLLM -> kind, field of the window, and what reads it. A class that a model derives needs an entry, too."""


def _known(name: str, spec: Any) -> tuple[str, str, SpecReader]:
    kind = type(spec).__name__
    if kind not in READERS:
        raise SpecInvalid(
            f"{name}: a cache of {kind} cannot be described",
            remedy=f"Serve a model whose caches are of {', '.join(READERS)}.",
        )
    return READERS[kind]


# Tensors.


def adopt_caches(
    kv_caches: Mapping[str, Tensor],
    groups: Iterable[Any],
    shape: EngineShape,
    *,
    tp_rank: int,
    kernels: Mapping[str, str] = {},
    rebuilt: Collection[str] = (),
) -> "KVCache":
    """Describe vLLM's cache as one of kvflow's.

    Args:
        kv_caches: layer name -> ``[blocks, heads, tokens, content]``, or for states ``[blocks, 1, 1, bytes]``; layers
            that are not in a group, because they use another one's cache, are left out.
        groups: vLLM's groups that are transferred.
        shape: of the engine, but for the kernels' blocks, which the tensors have.
        tp_rank: of this worker.
        kernels: what ``cpu_kernels`` returns.
        rebuilt: layers that are left unread if no peer has them.

    Raises:
        SpecInvalid: names the layer, what is wrong with its cache, and what was expected.
    """
    from kvflow import adopt  # noqa: PLC0415 - it loads torch, which the scheduler's side does not need

    groups = tuple(groups)
    named = {name: spec for group in groups for name, spec in layer_specs(group)}
    missing = sorted(set(named) - set(kv_caches))
    if missing:
        raise SpecInvalid(f"vLLM gave no tensor for {missing[:5]}", remedy="Report it: this is a defect of kvflow.")
    tensors = {name: kv_caches[name] for name in named}
    kernel_tokens = {name: tensor.shape[2] for name, tensor in tensors.items() if not hasattr(named[name], "shapes")}
    whole = {name for name, spec in named.items() if opaque(spec)}
    arrangements = {
        name: f"{found}_{_contents(named[name])}_{geometry(tensors[name])}" if name in whole else found
        for name, found in shape.arrangements.items()
        if name in named
    }
    tensors |= {name: page_of(name, tensors[name], named[name]) for name in whole}
    shape = structs.replace(shape, kernel_tokens=kernel_tokens, arrangements=arrangements)
    apart = kernels if strided(kernels, tensors) else {}
    specs = {name: read_spec(name, spec, shape) for name, spec in named.items()}
    return adopt(
        {
            name: keys_and_values(tensor) if name in apart else states_of(tensor, named[name], specs[name], shape)
            for name, tensor in tensors.items()
        },
        specs,
        read_groups(groups),
        shard=Shard(tp_rank=tp_rank, tp_size=shape.tp_size),
        axes=dict.fromkeys(apart, "BHNC"),
        rebuilt=rebuilt,
    )


def set_scales(kv_caches: Mapping[str, Tensor], modules: Mapping[str, Any]) -> None:
    """Have backends that keep scales in the cache set all of them to one now, before a transfer brings others.

    Triton's backend does it when a layer first runs, which may be after the first load. It views the scales only once.
    Source: ``TritonAttentionImpl._ensure_scale_caches`` of vLLM 0.32.
    """
    for name, tensor in kv_caches.items():
        backend: Any = getattr(modules.get(name), "impl", None)
        if getattr(backend, "_is_per_token_head_quant", False) and hasattr(backend, "_ensure_scale_caches"):
            backend._ensure_scale_caches(tensor)  # noqa: SLF001 - nothing else of vLLM does it


def states_of(tensor: Tensor, spec: Any, described: CacheSpec, shape: EngineShape) -> Tensor:
    """Return the states of a recurrent layer as views of its page of bytes; other layers' tensors as they are."""
    if not isinstance(described, Mamba):
        return tensor
    page = tensor.flatten(1) if tensor.dim() > 2 else tensor
    views, offset = [], 0
    for extents, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        nbytes = dtype.itemsize * prod(extents)
        views.append(page[:, offset : offset + nbytes].view(dtype).unflatten(1, tuple(extents)))
        offset += nbytes
    if _lies_channels_last(spec, shape):
        views[0] = views[0].transpose(1, 2)
    states = described.states
    if len(states[0].shape) == views[0].dim():  # with an axis of ranks
        return [view.unsqueeze(1) for view in views]
    parts = states[: len(states) - len(views) + 1]
    shares = [each.shape[0] // (1 if each.shard_axis is None else shape.tp_size) for each in parts]
    return [*views[0].split(shares, dim=1), *views[1:]]


def _contents(spec: Any) -> str:
    """Return the name of what vLLM keeps in pages that cannot be described."""
    kept: str = dtype_name(spec.dtype)
    return kept if type(spec).__name__ in LATENT and kept != "uint8" else quantization(spec).lower()


def geometry(tensor: Tensor) -> str:
    """Return what two tensors ``[blocks, heads, tokens, content]`` must have in common for their pages to be alike."""
    _, heads, tokens, content = tensor.shape
    order = "nh" if tensor.stride(1) < tensor.stride(2) else "hn"
    return f"{heads}x{tokens}x{content * tensor.element_size()}{order}"


def page_of(name: str, tensor: Tensor, spec: Any) -> Tensor:
    """Return a layer's tensor as its pages, ``[blocks, bytes]``; SpecInvalid if a page does not lie together."""
    size = tensor.element_size()
    nbytes = size * prod(tensor.shape[1:])
    axes = sorted((tensor.stride(axis), tensor.shape[axis]) for axis in (1, 2, 3) if tensor.shape[axis] > 1)
    expected = 1
    for stride, extent in axes:
        if stride != expected or tensor.stride(3) != 1:
            raise SpecInvalid(
                f"{name}: its pages cannot be described, and do not lie together either: strides are {tensor.stride()}",
                remedy="Use another VLLM_KV_CACHE_LAYOUT: BLHNC or LBHNC.",
            )
        expected *= extent
    kernel_blocks = spec.unpadded_page_size_bytes // nbytes or 1
    if kernel_blocks > 1 and tensor.stride(0) != expected:
        tokens = spec.block_size // kernel_blocks
        raise SpecInvalid(
            f"{name}: its pages cannot be described, and its kernel blocks of {tokens} tokens do not lie together",
            remedy=f"Use a --block-size of {tokens}.",
        )
    raw = tensor.view(tensor.new_empty(0).byte().dtype)
    return raw.as_strided(
        (tensor.shape[0] // kernel_blocks, nbytes * kernel_blocks), (tensor.stride(0) * size * kernel_blocks, 1)
    )


# The attention of CPUs.


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
    """Return whether strides can describe the keys of all these layers, and the keys are at most ``CELLS_MAX``."""
    known = all(kernel == STRIDED_KERNEL and tensors[name].is_floating_point() for name, kernel in kernels.items())
    return known and sum(tensors[name][0].numel() for name in kernels) <= 2 * CELLS_MAX


def keys_and_values(tensor: Tensor) -> list[Tensor]:
    """Return keys and values of a layer of the kernel ``vec``: ``[blocks, heads, tokens, 2 * content]`` cut in two."""
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
