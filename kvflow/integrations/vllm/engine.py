"""What vLLM's configuration says of the engine and of this rank, read in one place."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.settings import EngineFacts, model_name
from kvflow.integrations.vllm.specs import EngineShape, byte_format, dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig


FP8_CACHES = ("DeepseekV32IndexerCache",)
"""Layers of vLLM that tell no ``kv_cache_dtype``: their cache is the platform's fp8, whatever the others' is."""


def engine_facts(vllm_config: "VllmConfig", *, ranked: bool, told_of_sleep: bool) -> EngineFacts:
    """Return who the engine is.

    Args:
        vllm_config: the engine's.
        ranked: whether this process has a rank; a scheduler has none, and its settings are those of rank 0.
        told_of_sleep: whether this release of vLLM tells a connector when the engine sleeps and wakes.
    """
    parallel = vllm_config.parallel_config
    require_parallelism(parallel)
    if not told_of_sleep:
        require_awake(vllm_config.model_config)
    rank = _tp_rank() if ranked else 0
    model = vllm_config.model_config
    return EngineFacts(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        kv_role=vllm_config.kv_transfer_config.kv_role,
        rank=rank,
        num_ranks=parallel.tensor_parallel_size,
        port_offset=parallel.data_parallel_index * parallel.tensor_parallel_size + rank,
        copied_by_ray="ray" in (parallel.data_parallel_backend, ranked and parallel.distributed_executor_backend),
        model=model_name(str(model.model)),
        model_revision=str(model.revision or ""),
        model_dtype=dtype_name(model.dtype),
    )


def own_host() -> str:
    """Return the address of this host as vLLM finds it: that of the interface which leads out; 0.0.0.0 if none does."""
    from vllm.utils.network_utils import get_ip  # noqa: PLC0415 - it loads torch

    with warnings.catch_warnings(action="ignore"):  # 0.0.0.0 is refused
        return str(get_ip())


def require_parallelism(parallel: Any) -> None:
    """Refuse ways to divide a model that the connector does not describe.

    Raises:
        ConfigInvalid: names the setting.
    """
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigInvalid(
                f"{name} is {size}, but KVFlowConnector supports 1 only", remedy="Divide the model by tensors alone."
            )


def require_awake(model: Any) -> None:
    """Refuse sleep mode, for releases that tell no connector of it: peers would go on to read where the cache was.

    Raises:
        ConfigInvalid: it is enabled.
    """
    if getattr(model, "enable_sleep_mode", False):
        raise ConfigInvalid(
            "enable_sleep_mode is on, but this release of vLLM does not tell its connectors when the engine sleeps",
            remedy="Leave out --enable-sleep-mode, or install vLLM 0.33.",
        )


def runs_apart(vllm_config: "VllmConfig") -> bool:
    """Tell whether the workers may be in other processes than the scheduler."""
    return bool(vllm_config.parallel_config.distributed_executor_backend != "uni")


def engine_shape(vllm_config: "VllmConfig", layers: Iterable[str]) -> EngineShape:
    """Return what the specs of these layers of the engine must be read with."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: PLC0415 - loads models

    return EngineShape(
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        num_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        conv_channels_first=is_conv_state_dim_first(),
        element_types=element_types(vllm_config, layers),
    )


def element_types(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, str]:
    """Return what the bytes of each layer's cache are, if vLLM keeps them as bytes: layer name -> torch's name.

    Each layer is asked: ``--kv-cache-dtype-skip-layers``, the checkpoint or a draft model may say otherwise for some.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - it looks for devices

    modules = vllm_config.compilation_config.static_forward_context
    platform_fp8 = dtype_name(current_platform.fp8_dtype())
    found = {}
    for name in layers:
        module = modules.get(name)
        cache_dtype = "fp8" if type(module).__name__ in FP8_CACHES else str(getattr(module, "kv_cache_dtype", ""))
        backend = getattr(module, "attn_backend", None)
        backend_name = backend.get_name() if backend is not None else ""
        found[name] = byte_format(cache_dtype, platform_fp8=platform_fp8, backend=backend_name)
    return found


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415 - after its start only

    return int(get_tensor_model_parallel_rank())
