"""What vLLM's configuration says of the engine and of this rank, read in one place."""

import ctypes
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import inf, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvflow import Mamba, models
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.blocks import TransferGroup
from kvflow.integrations.vllm.caches import EngineShape, arranged_by_kernel_block, byte_format, dtype_name, opaque
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.settings import EngineFacts, model_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

LAYERED = "LBHNC"  # layout of vLLM with one tensor per layer, in which the tokens of one head of a block lie together
PACKED = "BLHNC"  # layout of vLLM in which one block of all layers is one row

PACKED_BY_HEAD = "BHLNC"
"""The same, with the layers of one head side by side: other numbers of ranks read one piece per head. vLLM takes it
only where all layers have heads and pages of one shape, so not for hybrid models."""

BLACKWELL = 10  # compute capability from which FlashInfer and B12X support ``LBHNC`` and ``BLHNC`` only (vLLM 0.32)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with the settings of torch's allocator for GPUs, which has had several names."""

EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)

AMX, CPU_FLAGS = "amx_tile", Path("/proc/cpuinfo")

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18
"""Of Linux on x86-64, the only processor with AMX: a system call, what it asks for, and the number of AMX's tiles."""

DRAFT_PREFIXES = frozenset({"mtp", "draft_model"})  # parts of the names of layers that a draft model counts from 0


class LoadWait(NamedTuple):
    """How long a step that has nothing to compute waits for open loads."""

    each_s: float  # until all have ended; again, as long as some end in that time
    all_s: float


LOAD_WAIT = LoadWait(0.004, 0.016)
"""If no other engine and no other step waits for this one.

vLLM runs such steps one millisecond apart and holds the GIL, which kvflow's threads need, for most of that time. A
thread that waits here releases it. It waits for all loads, because one that ends just after the step has to wait for
the whole next step, which computes for the other requests.
"""

BRIEF_WAIT = LoadWait(0.0005, 0.0005)
"""With asynchronous scheduling: the thread that waits also takes the output of the step before this one."""

NO_WAIT = LoadWait(0.0, 0.0)
"""With data parallelism: an engine with nothing to compute takes part in each step of the others, which wait for it."""


def engine_facts(vllm_config: "VllmConfig", *, ranked: bool, told_of_sleep: bool) -> EngineFacts:
    """Return who the engine is. A process that is not ``ranked``, a scheduler's, has the settings of rank 0.

    ``told_of_sleep``: this release of vLLM tells a connector when the engine sleeps and wakes.
    """
    parallel = vllm_config.parallel_config
    require_parallelism(parallel)
    if not told_of_sleep:
        require_awake(vllm_config.model_config)
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = _tp_rank() if ranked else 0
    if ranked and num_stages > 1:
        rank += _pp_rank() * tp_size
    num_ranks = tp_size * num_stages
    model = vllm_config.model_config
    return EngineFacts(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        kv_role=vllm_config.kv_transfer_config.kv_role,
        rank=rank,
        num_ranks=num_ranks,
        port_offset=parallel.data_parallel_index * num_ranks + rank,
        copied_by_ray="ray" in (parallel.data_parallel_backend, ranked and parallel.distributed_executor_backend),
        model=model_name(str(model.model)),
        model_revision=str(model.revision or ""),
        model_dtype=dtype_name(model.dtype),
        sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        load_failure_policy=vllm_config.kv_transfer_config.kv_load_failure_policy,
    )


def own_host() -> str:
    """Return the address of this host as vLLM finds it: that of the interface which leads out; 0.0.0.0 if none does."""
    from vllm.utils.network_utils import get_ip  # noqa: PLC0415 - it loads torch

    with warnings.catch_warnings(action="ignore"):  # 0.0.0.0 is refused
        return str(get_ip())


def require_parallelism(parallel: Any) -> None:
    """Refuse ways to divide a model that the connector does not describe: ConfigInvalid names the setting."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigInvalid(
                f"{name} is {size}, but KVFlowConnector supports 1 only",
                remedy="Divide the model by tensors and by layers alone.",
            )


def require_awake(model: Any) -> None:
    """Refuse sleep mode in releases that tell no connector of it: peers would go on to read where the cache was."""
    if getattr(model, "enable_sleep_mode", False):
        raise ConfigInvalid(
            "enable_sleep_mode is on, but this release of vLLM does not tell its connectors when the engine sleeps",
            remedy="Leave out --enable-sleep-mode, or install vLLM 0.33.",
        )


def require_own_device(vllm_config: "VllmConfig") -> None:
    """Refuse a ``kv_buffer_device`` other than that of the cache: peers read it where it is."""
    wanted, has = vllm_config.kv_transfer_config.kv_buffer_device, _platform().device_type
    if wanted != has:
        raise ConfigInvalid(
            f"kv_buffer_device is {wanted}, but the cache is on {has}, and KVFlowConnector stages it nowhere else",
            remedy="Leave kv_buffer_device out. If network cards cannot reach the memory of the GPU, use the TCP plane "
            "(transport auto or tcp), which moves it through host memory in portions.",
        )


def require_fixed_pages(vllm_config: "VllmConfig") -> None:
    """Refuse an allocator that may move the cache to other pages of a GPU: what peers have registered would be stale.

    vLLM refuses it, too, under the older of torch's names. Its own allocator for sleep mode keeps pages where they are.
    """
    model = vllm_config.model_config
    asleep = getattr(model, "enable_sleep_mode", False)
    if _platform().is_cpu() or getattr(model, "enable_cumem_allocator", asleep):
        return
    for name in ALLOCATOR_VARIABLES:
        if EXPANDABLE.search(os.environ.get(name, "")):
            raise ConfigInvalid(
                f"{name} is {os.environ[name]!r}, but torch may move expandable segments to other pages, and peers "
                "would read what is not there",
                remedy=f"Remove expandable_segments from {name}.",
            )


def allow_tiles() -> None:
    """Ask Linux to let this process use AMX. vLLM's attention on CPUs does not ask, and would end with SIGILL.

    Large matrices make torch ask, but the first step of a decode engine is small.
    """
    if not _platform().is_cpu() or AMX not in CPU_FLAGS.read_text(errors="replace").split():
        return
    if (error := _request_feature(TILE_DATA)) == 0:
        logger.debug("kvflow: this process may use AMX")
    else:
        logger.warning(
            "kvflow: Linux does not let this process use AMX (%s), and vLLM's attention may use it without asking. "
            "If the engine ends with an illegal instruction (SIGILL), start it where AMX is allowed, or with "
            "--dtype float32",
            os.strerror(error),
        )


def _request_feature(number: int) -> int:
    """Ask Linux for a feature of x86-64 with much state, for all threads of this process; return 0, or the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, number) else 0


def runs_apart(vllm_config: "VllmConfig") -> bool:
    """Return whether the workers may be in other processes than the scheduler."""
    return bool(vllm_config.parallel_config.distributed_executor_backend != "uni")


def load_wait(vllm_config: "VllmConfig") -> LoadWait:
    """Return how long a step that has nothing to compute waits for loads."""
    if vllm_config.parallel_config.data_parallel_size > 1:
        return NO_WAIT
    return BRIEF_WAIT if vllm_config.scheduler_config.async_scheduling else LOAD_WAIT


def drain_time(vllm_config: "VllmConfig", drain_s: float) -> float:
    """Return how long a rank that shuts down may be read: vLLM soon ends processes that take longer than it waits."""
    within = getattr(vllm_config, "shutdown_timeout", 0)
    if runs_apart(vllm_config):
        from vllm import envs  # noqa: PLC0415 - likewise

        within = min(within, envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS - 1)
    return max(0.0, min(drain_s, within))


def writes_late(vllm_config: "VllmConfig") -> bool:
    """Return whether a step of a GPU may still write blocks that vLLM gives to another request.

    Draft models and states are written after the tokens of a step have arrived. Where steps overlap, vLLM waits for
    those of a request that has ended, but on a ``kv_producer``, of which it thinks that it loads nothing.
    """
    if vllm_config.speculative_config is not None or vllm_config.model_config.is_hybrid:
        return True
    return vllm_config.max_concurrent_batches > 1 and not vllm_config.kv_transfer_config.is_kv_consumer


def clears_first(vllm_config: "VllmConfig", cache_config: "KVCacheConfig") -> bool:
    """Return whether a step clears new blocks, or copies into them, before it ends the leases of those it reuses.

    vLLM's second model runner does. It copies states only, and clears the blocks of models with states.
    """
    return bool(vllm_config.use_v2_model_runner and cache_config.needs_kv_cache_zeroing)


def can_keep(vllm_config: "VllmConfig", cache_config: "KVCacheConfig", groups: Sequence[TransferGroup]) -> bool:
    """Return whether an engine can keep blocks. Say in the log why not, or what it cannot keep."""
    caching, reason = vllm_config.cache_config, ""
    if not caching.enable_prefix_caching:
        reason = "prefix caching is off, so vLLM reuses the blocks of an ended request first"
    elif any(each.is_state for each in groups):
        reason = "vLLM clears and copies blocks of states before it tells that it reuses them"
    elif getattr(cache_config, "hisparse_host_num_blocks", None) is not None:
        reason = "HiSparse is on, and vLLM tells it alone when it reuses a block"
    elif getattr(cache_config, "needs_kv_cache_zeroing", False):
        reason = "vLLM clears new blocks of caches of several precisions before it tells that it reuses them"
    elif any(each.group.window for each in groups) and getattr(caching, "prefix_cache_retention_interval", None) == 0:
        logger.warning(
            "kvflow: this engine keeps prompts, but no answers: vLLM leaves the sliding windows of answers out of its "
            "prefix cache. To keep answers, too, start it with --prefix-cache-retention-interval %d",
            lcm(*[each.group.block_size for each in groups]),
        )
    if reason:
        logger.warning("kvflow: this engine keeps no blocks for others, though keep is set: %s", reason)
    return not reason


def engine_shape(vllm_config: "VllmConfig", layers: Mapping[str, Any]) -> EngineShape:
    """Return what vLLM's specs of these layers of the engine must be read with."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: PLC0415 - loads models

    known = models.by_layer(layers, vllm_config.model_config.hf_config.to_dict())
    return EngineShape(
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        num_kv_heads=head_counts(vllm_config, layers),
        states={name: spec for name, specs in known.items() for spec in specs if isinstance(spec, Mamba)},
        conv_channels_first=is_conv_state_dim_first(),
        element_types=element_types(vllm_config, layers),
        arrangements=arrangements(vllm_config, layers),
    )


def required_layout(vllm_config: "VllmConfig", *, packed: bool) -> str | None:
    """Return the layout to ask vLLM for: one in which the heads that another number of ranks needs lie together.

    vLLM prefers ``LBNHC``, where these are one piece for each token. A layout that an attention backend does not
    support is dropped by vLLM, with a warning. Latents are not divided, so any layout suits them.
    """
    model = vllm_config.model_config
    divided = model is not None and not model.use_mla
    if not packed:
        return LAYERED if divided else None
    return PACKED_BY_HEAD if divided and not model.is_hybrid and not _keeps_heads_inside() else PACKED


def _keeps_heads_inside() -> bool:
    """Return whether vLLM's FlashInfer supports no heads outside layers on this GPU."""
    capability = _platform().get_device_capability()
    return capability is not None and capability.major >= BLACKWELL


def head_counts(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, int]:
    """Return how many KV heads each of those layers has in the whole model: layer name -> heads, where it is known.

    vLLM tells each layer its rank's share only, in which one head may be a replica.
    """
    target, draft = vllm_config.model_config, getattr(vllm_config.speculative_config, "draft_model_config", None)
    text = target.hf_text_config.to_dict(), target.get_total_num_kv_heads()
    theirs = None if draft is None else (draft.hf_text_config.to_dict(), draft.get_total_num_kv_heads())
    return models.kv_heads(layers, target.hf_config.to_dict(), text, theirs)


def draft_layers(vllm_config: "VllmConfig", cache_config: "KVCacheConfig") -> list[str]:
    """Return the transferred layers of a draft model, where stale keys and values cost accepted drafts but no token.

    Say in the log which of its layers vLLM leaves out of transfers.

    vLLM's first model runner marks none. There, draft layers count on from the model's last, or have a prefix.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return []
    num_layers = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", inf)
    modules = vllm_config.compilation_config.static_forward_context
    drafts = [
        name
        for group in cache_config.kv_cache_groups
        for name in group.layer_names
        if name in modules
        and (
            getattr(modules[name], "is_draft_layer", False)
            or models.layer_number(name) >= num_layers
            or not DRAFT_PREFIXES.isdisjoint(name.split("."))
        )
    ]
    transferred = {name for group in cache_config.transfer_groups for name in group.layer_names}
    if kept_back := [name for name in drafts if name not in transferred]:
        logger.warning(
            "kvflow: vLLM leaves layers of its draft model out of transfers: %s. Tokens are the same, but after a "
            "prompt that another engine has prefilled, fewer drafts are accepted",
            ", ".join(kept_back),
        )
    return [name for name in drafts if name in transferred]


def element_types(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, str]:
    """Return what the bytes of each layer's cache are, if vLLM keeps them as bytes: layer name -> torch's name."""
    # ``--kv-cache-dtype-skip-layers``, the checkpoint or a draft model may make some layers different.
    modules = vllm_config.compilation_config.static_forward_context
    platform_fp8 = dtype_name(_platform().fp8_dtype())
    found = {}
    for name in layers:
        module = modules.get(name)
        cache_dtype = "fp8" if arranged_by_kernel_block(module) else str(getattr(module, "kv_cache_dtype", ""))
        backend = getattr(module, "attn_backend", None)
        backend_name = backend.get_name() if backend is not None else ""
        found[name] = byte_format(cache_dtype, platform_fp8=platform_fp8, backend=backend_name)
    return found


def arrangements(vllm_config: "VllmConfig", layers: Mapping[str, Any]) -> dict[str, str]:
    """Name the arrangement of caches that strides do not describe, by platform and backend: layer name -> name."""
    modules = vllm_config.compilation_config.static_forward_context
    platform = str(_platform().device_name)
    found = {}
    for name, spec in layers.items():
        module = modules.get(name)
        if arranged_by_kernel_block(module):
            shuffled = "_shuffled" if getattr(module, "uses_shuffled_layout", False) else ""
            found[name] = f"{platform}_indexer{shuffled}"
        elif module is not None and opaque(spec):
            found[name] = f"{platform}_{module.get_attn_backend().get_name().lower()}"
    return found


def _platform() -> Any:
    from vllm.platforms import current_platform  # noqa: PLC0415 - it looks for devices

    return current_platform


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415 - after its start only

    return int(get_tensor_model_parallel_rank())


def _pp_rank() -> int:
    from vllm.distributed.parallel_state import get_pp_group  # noqa: PLC0415 - likewise

    return int(get_pp_group().rank_in_group)
