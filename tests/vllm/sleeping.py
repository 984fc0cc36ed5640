"""Sleep and wake of an engine on a CPU, in the order in which vLLM 0.33 does it with a GPU.

vLLM's CPU worker ignores both, and 0.32 tells no connector of them. So its class is given what 0.33's GPU worker does:
the connector is told before the memory goes and when it is back, and then the scheduler's side is told where the ranks
are. The memory does not go, but what lies in it does.
"""

from typing import Any

LOST = 0x5A
"""What lies in the cache afterwards: large and finite as a number."""


def teach_sleep() -> None:
    """Have the CPU worker do what it is told; harmless the second time."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(worker: Any, level: int = 1) -> None:
        get_kv_transfer_group().unregister_kv_caches()
        for cache in worker.model_runner.kv_caches:
            cache.untyped_storage().fill_(LOST)

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            get_kv_transfer_group().restore_kv_caches()

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up  # type: ignore[method-assign]


def introduce_ranks(core: Any) -> None:
    """Tell the scheduler's side of the connector where the ranks are, as at the start of the engine."""
    ranks: dict[Any, Any] = {}
    for told in core.model_executor.get_kv_connector_handshake_metadata():
        ranks.update(told or {})
    core.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(ranks)
