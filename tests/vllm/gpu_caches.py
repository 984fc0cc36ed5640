# ruff: noqa: T201 - a script prints its answers
"""Move the caches that vLLM's GPU workers would have between each other, on the CPU, and compare every byte.

One line of JSON per combination: model, backends, layouts, how many ranks, and how many bytes were compared what is
wrong, or why kvflow refuses it.

vLLM makes everything but the bytes: its model class is built from a published config on the device ``meta``, with the
attention backend of a GPU; its own functions adjust the block size, say what each layer keeps, form groups, choose
kernel blocks, and allocate and bind the tensors of each rank. A request is written by each layer's own
``do_kv_cache_update``, and states by the layer's own views. Only the kernels, which need a GPU, are stood in for: they
put a token where the tensor that they are given says. kvflow adopts the tensors, plans, and binds; the descriptors are
copied one by one. Then the whole memory of each target must be what its own backend would have written, and nothing
else.

Caches are kept in the model's dtype and in each quantized format that the backends support. A format is only bytes
here: nothing is quantized, and what a kernel would write for a token and head is noise of the same length, scales
included where they are in the cache.

Not vLLM's own here: ``flashinfer``, which does not install without CUDA, is an empty module, and the kernel of the
indexer follows ``csrc/libtorch_stable/cache_kernels.cu`` and ``rocm_aiter_mla_sparse.py``. DeepSeek-V4's layers, whose
kernels are Triton's, are written as ``deepseek_v4/common/ops`` of vLLM describes them.
"""

import argparse
import itertools
import json
import sys
import tempfile
import types
import zlib
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

from kvflow.errors import KvflowError
from kvflow.integrations.vllm.caches import adopt_caches, layer_specs
from kvflow.integrations.vllm.engine import engine_shape
from kvflow.integrations.vllm.scheduler import transfer_groups
from kvflow.planning.assignment import assign_sources
from kvflow.planning.plan import plan_transfer
from tests.properties.moves import carry_out
from tests.vllm import specs_oracle
from tests.vllm.gpu_models import BACKENDS, MODELS, config_of

for absent in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
    module = MagicMock()
    module.__spec__ = ModuleSpec(absent, None)
    sys.modules[absent] = module

from vllm import _custom_ops  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import get_tp_group  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: E402
from vllm.model_executor.models import gpt_oss  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backends import (  # noqa: E402
    flash_attn,
    flash_attn_diffkv,
    flashinfer,
    triton_attn,
    triton_attn_diffkv,
)
from vllm.v1.attention.backends.mla import flashmla  # noqa: E402
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.worker.gpu import attn_utils  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup  # noqa: E402

TP_SIZES = (1, 2, 4, 8)
POOL_SPARE = 3
"""Blocks beside those of the request; one of them is vLLM's null block."""


def put(content, cache, slots):
    """Put the bytes of each token where a cache ``[blocks, tokens, heads, content]`` has its slot."""
    size = cache.shape[1]
    cache = cache.view(content.dtype)  # torch assigns no float8 by index
    cache[slots // size, slots % size] = content


def put_keys_and_values(key, value, key_cache, value_cache, slots, *_):
    """Stand in for ``reshape_and_cache_flash``."""
    put(key, key_cache, slots)
    put(value, value_cache, slots)


def put_with_scales(key, value, key_cache, value_cache, key_scales, value_scales, slots, **_):  # noqa: PLR0917
    """Stand in for ``triton_reshape_and_cache_flash_per_token_head_quant``: a scale is behind the bytes it is of."""
    for content, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        size = cache.shape[1]
        width = content.shape[-1] - 4
        put(content[..., :width], cache[..., :width], slots)
        scales[slots // size, slots % size] = content[..., width:].view(torch.float32).squeeze(-1)


def put_packed(key, value, slots, caches, scales, *_, kv_layout):
    """Stand in for ``nvfp4_quantize_append_paged_kv_cache_with_slot_mapping``, which has views of pages from vLLM."""
    for content, cache, scale in zip((key, value), caches, scales, strict=True):
        for part, view in zip(content.split([cache.shape[-1], scale.shape[-1]], -1), (cache, scale), strict=True):
            put(part, view.transpose(1, 2) if kv_layout == "HND" else view, slots)


def put_both(key, value, cache, slots, *_):
    """Stand in for ``triton_reshape_and_cache_flash_diffkv``, whose cache has keys before values."""
    put(torch.cat([key, value], -1), cache, slots)


def put_latent(latent, rope, cache, slots, **_):
    """Stand in for ``concat_and_cache_mla``, whose cache is ``[blocks, tokens, content]``."""
    put(torch.cat([latent, rope], -1), cache, slots)


def put_indices(content, cache, slots, scale=4):
    """Stand in for ``indexer_k_quant_and_cache``: a kernel block has all values first, and then all scales."""
    size, width = cache.shape[1:]
    pages = cache.flatten(1)
    values = pages[:, : size * (width - scale)].unflatten(1, (size, width - scale))
    scales = pages[:, size * (width - scale) :].unflatten(1, (size, scale))
    values[slots // size, slots % size] = content[:, :-scale]
    scales[slots // size, slots % size] = content[:, -scale:]


def put_compressed(content, cache, slots, spec):
    """Stand in for the kernels of DeepSeek-V4: what a layer keeps of some tokens, once the last of them is there."""
    slots = slots[spec.tokens_per_state - 1 :: spec.tokens_per_state] // spec.tokens_per_state
    content = content((len(slots), cache.shape[-1]), cache.dtype)
    if spec.dtype != torch.uint8:  # the state of a compressor
        put(content, cache, slots)
    else:
        put_indices(content, cache, slots, scale=4 if spec.state_content_bytes is None else 8)


flash_attn.flash_attn_supports_sinks = lambda: True
flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
flashinfer._nvfp4_kv_on_fa2 = lambda: True
flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = put_packed
flashmla.is_flashmla_dense_supported = lambda: (True, None)
gpt_oss.TransformerBlock.mlp_cls = specs_oracle.NoExperts  # they keep nothing, and vLLM has no kernel for them on CPUs
flash_attn.reshape_and_cache_flash = put_keys_and_values
triton_attn.triton_reshape_and_cache_flash = put_keys_and_values
triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = put_with_scales
flash_attn_diffkv.triton_reshape_and_cache_flash_diffkv = put_both
triton_attn_diffkv.triton_reshape_and_cache_flash_diffkv = put_both
torch.ops._C_cache_ops.reshape_and_cache_flash = put_keys_and_values
_custom_ops.concat_and_cache_mla = put_latent
AttentionGroup.create_metadata_builders = lambda group, **_: setattr(group, "metadata_builders", [])
attn_utils.get_attn_cg_support = lambda *_: None


class Engine:
    """One engine: its configuration, what each layer keeps, and the memory of all its ranks.

    Attributes:
        scratch: layers whose groups vLLM marks as not transferred.
    """

    def __init__(self, oracle, model, tp_size, variant):
        self.model, self.tp_size, self.variant, self.scratch = model, tp_size, variant, frozenset()
        oracle.backend = variant.backend
        selector._cached_get_attn_backend.cache_clear()
        self.module, self.config = oracle.build(config_of(model), tp_size=tp_size, cache_dtype=variant.cache_dtype)
        cache_config = self.config.cache_config
        cache_config.user_specified_block_size = bool(variant.block_size)
        cache_config.block_size = variant.block_size or 16
        with set_current_vllm_config(self.config):
            Platform.update_block_size_for_backend.__func__(type(current_platform), self.config)
            specs = attn_utils.get_kv_cache_spec(self.config)
            self.modules = {name: self.config.compilation_config.static_forward_context[name] for name in specs}
            backends = {module.get_attn_backend() for module in self.modules.values()}
            allowed = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
            chosen = [layout for layout in allowed if layout == variant.layout] or allowed
            self.layout = resolve_kv_cache_layout(self.config, [chosen + allowed], specs.values()).name
            self.num_tokens = 2 * max(
                spec.block_size for name, spec in specs.items() if not isinstance(self.modules[name], MambaBase)
            )
        self.specs = specs


class Side:
    """What an engine has at one end of a transfer: all its ranks, full of noise, and blocks for a request in each."""

    def __init__(self, engine, num_tokens, heads, seed):
        rng = np.random.default_rng(seed)
        get_tp_group().world_size = engine.tp_size  # layers ask for it when their views are made
        needed = sum(2 + -(-num_tokens // spec.block_size) for spec in engine.specs.values())
        with set_current_vllm_config(engine.config):
            engine.config.model_config.max_model_len = num_tokens
            engine.config.cache_config.num_gpu_blocks_override = needed + POOL_SPARE
            (placed,) = get_kv_cache_configs(engine.config, [dict(engine.specs)], [1 << 40])
            for group in placed.kv_cache_groups:
                group.enable_kv_transfer = engine.scratch.isdisjoint(group.layer_names)
            self.ranks = [
                Rank(engine, deepcopy(placed), rank, num_tokens, heads, rng) for rank in range(engine.tp_size)
            ]
        tokens = {
            part.num_tokens
            for group in self.ranks[0].cache.manifest().groups
            for layer in group.layers
            for part in layer.components
        }
        self.told = {
            "backend": engine.variant.name,
            "format": engine.variant.cache_dtype,
            "layout": engine.layout,
            "heads": max(view.shape[1] for view in self.ranks[0].views.values() if isinstance(view, torch.Tensor)),
            "blocks": sorted({group.block_size for group in self.ranks[0].cache.groups}),
            "kernel_blocks": sorted(tokens - {0}),
        }

    def write(self):
        """Write the request into every rank."""
        for rank in self.ranks:
            rank.write()

    def expect(self):
        """Note what memory is before the request is there, and after."""
        for rank in self.ranks:
            rank.noise = rank.memory.copy()
            rank.write()
            rank.expected = rank.memory.copy()
            rank.free = rank.past_the_end()


class WrongByte(Exception):
    """A transfer has moved something else than what the backend would have written."""


class Rank:
    """One rank: its memory, its layers' own views of it, and kvflow's description."""

    def __init__(self, engine, placed, tp_rank, num_tokens, heads, rng):  # noqa: PLR0917
        self.engine, self.tp_rank, self.num_tokens, self._heads = engine, tp_rank, num_tokens, heads
        config = engine.config
        groups, _, sizes = attn_utils.init_attn_backend(placed, config, torch.device("cpu"))
        context = config.compilation_config.static_forward_context
        tensors = attn_utils.init_kv_cache(
            context,
            placed,
            torch.device("cpu"),
            sizes,
            config,
            attn_groups=[each for group in groups for each in group],
        )
        self.views = {name: module.kv_cache for name, module in engine.modules.items()}
        first = next(iter(tensors.values()))
        self._raw = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        self.memory, self.address = self._raw.numpy(), self._raw.data_ptr()
        self.memory[:] = rng.integers(256, size=self.memory.shape, dtype=np.uint8)
        travelling = placed.transfer_groups
        layers = dict(itertools.chain.from_iterable(map(layer_specs, travelling)))
        self.cache = adopt_caches(tensors, travelling, engine_shape(config, layers), tp_rank=tp_rank)
        self.transferred = transfer_groups(placed)
        free = list(rng.permutation(np.arange(1, placed.num_blocks)))
        self.block_ids = [
            [int(free.pop()) for _ in range(1 if group.kind == "mamba" else -(-num_tokens // group.block_size))]
            for group in self.cache.groups
        ]
        self.listed = [free] * len(placed.kv_cache_groups)  # as vLLM lists them, scratch included
        for each, ids in zip(self.transferred, self.block_ids, strict=True):
            self.listed[each.index] = ids
        self.stage = types.SimpleNamespace(groups=self.cache.groups)

    def write(self):
        """Write the request as the backend writes it; each layer has its content from its name alone."""
        self._write_tokens(0, content_of)

    def past_the_end(self):
        """Return which bytes belong to tokens behind the request, in its last blocks; they mean nothing."""
        before = self.memory.copy()
        self.memory[:] = 0
        self._write_tokens(self.num_tokens, lambda _, *shape_and_dtype: ones(*shape_and_dtype))
        found = self.memory != 0
        self.memory[:] = before
        return found

    def _write_tokens(self, first, content):
        for group, blocks in zip(self.cache.groups, self.block_ids, strict=True):
            at = torch.tensor(blocks).repeat_interleave(group.block_size) * group.block_size
            slots = (at.unflatten(0, (len(blocks), -1)) + torch.arange(group.block_size)).flatten()
            chosen = slots[first:] if first else slots[: self.num_tokens]
            for name in group.layers:
                if isinstance(self.engine.modules[name], MambaBase):
                    if not first:
                        self._write_states(name, blocks[0], content)
                elif len(chosen):
                    self._write_layer(name, chosen, content)

    def _write_states(self, name, block, content):
        """Write this rank's part of what the whole model keeps: of each part of the convolution, and of the heads."""
        (conv, ssm), size = self.views[name], self.engine.tp_size
        channels_first = is_conv_state_dim_first()
        held = conv[block] if channels_first else conv[block].T
        at = 0
        for index, (channels, divided) in enumerate(convolved(self.engine, name)):
            whole = content(f"{name}.{index}", (channels, held.shape[1]), conv.dtype)
            part = whole.chunk(size)[self.tp_rank] if divided else whole
            held[at : at + len(part)] = part
            at += len(part)
        assert at == len(held)
        heads = content(f"{name}.ssm", (len(ssm[block]) * size, *ssm.shape[2:]), ssm.dtype)
        ssm[block] = heads.chunk(size)[self.tp_rank]

    def _write_layer(self, name, slots, content):
        module, view, spec = self.engine.modules[name], self.views[name], self.engine.specs[name]
        if "deepseek_v4" in str(self.engine.config.model_config.hf_config.model_type):
            put_compressed(lambda *told: content(name, *told), view, slots, spec)
            return
        if type(module).__name__.endswith("IndexerCache"):
            put_indices(content(name, (len(slots), spec.head_size), torch.uint8), view, slots)
            return
        if hasattr(module, "kv_lora_rank"):
            latent = content(name, (len(slots), view.shape[-1]), spec.dtype)
            module.impl.do_kv_cache_update(
                latent[:, : module.kv_lora_rank], latent[:, None, module.kv_lora_rank :], view, slots, "auto", None
            )
            return
        held, heads = spec.num_kv_heads, self._heads[name]
        first = (
            self.tp_rank * held if held * self.engine.tp_size <= heads else self.tp_rank * heads // self.engine.tp_size
        )
        sizes, dtype = (spec.head_size, spec.head_size_v), spec.dtype
        if spec.state_content_bytes is not None:  # packed: what is kept of a key or a value is only bytes
            sizes, dtype = [spec.state_content_bytes * spec.num_heads // held // 2] * 2, torch.uint8
        both = [
            content(f"{name}.{role}", (len(slots), heads, size), dtype)[:, first : first + held]
            for role, size in zip("kv", sizes, strict=True)
        ]
        if spec.kv_quant_mode.is_per_token_head:
            self._view_scales(module.impl, view)
        module.impl.do_kv_cache_update(module, *both, view, slots)

    def _view_scales(self, impl, view):
        """Have the backend view this rank's scales. It sets all of them to one then, as at the start of an engine."""
        before = self.memory.copy()
        impl._k_scale_cache = None
        impl._ensure_scale_caches(view)
        self.memory[:] = before


def convolved(engine, name):
    """Return the channels of each part of a layer's convolution in the whole model, and whether ranks divide it."""
    module, config = engine.modules[name], engine.config.model_config.hf_config
    if hasattr(module, "key_dim"):
        return [(module.key_dim, True), (module.key_dim, True), (module.value_dim, True)]
    groups = getattr(config, "mamba_n_groups", 0) or config.n_groups
    shared = groups * module.ssm_state_size, groups > 1  # a single one is on every rank
    return [(module.intermediate_size, True), shared, shared]


def ones(shape, dtype):
    """Return a tensor without a byte that is zero."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)


def content_of(name, shape, dtype):
    """Return the same noise for the same name, as any dtype: bits, of which some are no number."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    shape = tuple(int(extent) for extent in shape)
    whole = rng.integers(256, size=(*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(whole).view(dtype)


def moved(sources, targets, num_tokens):
    """Pull the request into every rank of an engine, and compare its whole memory; return bytes that were moved."""
    case = types.SimpleNamespace(model=types.SimpleNamespace(tokens_of=lambda _: num_tokens))
    total = 0
    theirs = [source.cache.manifest() for source in sources.ranks]
    for target in targets.ranks:
        target.memory[:] = target.noise
        ours = target.cache.manifest()
        shares = {share.source: share.head_ranges for share in assign_sources(ours, theirs, rotation=target.tp_rank)}
        plans = [
            (sources.ranks[index], plan_transfer(theirs[index], ours, head_ranges=pieces))
            for index, pieces in sorted(shares.items())
        ]
        writes = carry_out(case, plans, target)
        wrong = np.flatnonzero((target.memory != target.expected) & ~target.free)
        if len(wrong):
            raise WrongByte(f"{len(wrong)} bytes of rank {target.tp_rank} are wrong, the first at {wrong[0]}")
        # A byte of noise may be right by chance: each that the backend writes must have been written, once.
        unwritten = np.flatnonzero((target.expected != target.noise) & (writes != 1))
        if len(unwritten):
            raise WrongByte(f"{len(unwritten)} bytes of rank {target.tp_rank} were not moved once")
        total += int(writes.sum())
    return total


def row_of(model, source, target, num_tokens):
    """Return what comes of a transfer between two engines."""
    sizes = [len(source.ranks), len(target.ranks)]
    row = {"model": model, "tp": sizes, "source": source.told, "target": target.told}
    try:
        row["bytes"] = moved(source, target, num_tokens)
    except KvflowError as error:
        row["refused"] = f"{type(error).__name__}: {error}"
    except WrongByte as error:
        row["wrong"] = str(error)
    return row


def heads_of(engine):
    """Return the KV heads of each layer of a model, of which its engine of one rank has all."""
    assert engine.tp_size == 1
    return {name: getattr(spec, "num_kv_heads", 0) for name, spec in engine.specs.items()}


def compared(oracle, model, cache_dtype, tp_sizes):
    """Yield one answer for each pair of engines of a model: of each way to keep its cache, with itself and the next."""
    variants = BACKENDS[MODELS[model].kind][cache_dtype]
    engines = {(variant, size): Engine(oracle, model, size, variant) for variant in variants for size in tp_sizes}
    heads = heads_of(engines[variants[0], tp_sizes[0]])
    num_tokens = max(engine.num_tokens for engine in engines.values())
    sources = {key: Side(engine, num_tokens, heads, seed=1) for key, engine in engines.items()}
    for side in sources.values():
        side.write()
    for index, variant in enumerate(variants):
        following = dict.fromkeys((variant, variants[(index + 1) % len(variants)]))
        for other, tp_to in itertools.product(following, tp_sizes):
            target = Side(engines[other, tp_to], num_tokens, heads, seed=2)
            target.expect()
            for tp_from in tp_sizes:
                yield row_of(model, sources[variant, tp_from], target, num_tokens)


def mixed(oracle, model, cache_dtypes):
    """Yield one answer for each pair of formats of a model, kept by the first of their backends."""
    variants = [BACKENDS[MODELS[model].kind][cache_dtype][0] for cache_dtype in cache_dtypes]
    engines = [Engine(oracle, model, 1, variant) for variant in variants]
    num_tokens = max(engine.num_tokens for engine in engines)
    sides = [Side(engine, num_tokens, heads_of(engine), seed=1) for engine in engines]
    for side in sides:
        side.expect()
    for source, target in itertools.permutations(sides, 2):
        yield row_of(model, source, target, num_tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--tp", nargs="+", type=int, default=TP_SIZES)
    parser.add_argument("--formats", nargs="+", help="cache dtypes, also of each other; all of the model if left out")
    arguments = parser.parse_args()
    formats = arguments.formats or list(BACKENDS[MODELS[arguments.model].kind])
    with tempfile.TemporaryDirectory() as folder:
        oracle = specs_oracle.Oracle(Path(folder))
        rows = [compared(oracle, arguments.model, each, arguments.tp) for each in formats]
        for row in itertools.chain(*rows, mixed(oracle, arguments.model, formats)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
