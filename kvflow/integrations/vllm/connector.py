"""``KVFlowConnector``: what vLLM calls, routed to the scheduler's side or to the worker's.

Nothing may raise out of what vLLM's scheduler calls, because vLLM would end with it: ``SchedulerSide`` keeps it in.
What is wrong with the configuration does raise, at the start.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvflow import configure_logging
from kvflow.integrations.vllm import versions
from kvflow.integrations.vllm.cpu_attention import cpu_kernels, marker
from kvflow.integrations.vllm.engine import engine_facts, engine_shape, own_host, runs_apart
from kvflow.integrations.vllm.hosts import doubts, remark
from kvflow.integrations.vllm.metadata import NO_ORDERS, RankIntroduction, StepOrders
from kvflow.integrations.vllm.scheduler import SchedulerSide
from kvflow.integrations.vllm.settings import (
    PACKED_LAYOUT,
    SECRET_KEYS,
    EngineFacts,
    check_keys,
    read_settings,
    wants_packed,
)
from kvflow.integrations.vllm.stats import KVFlowMetrics, KVFlowStats
from kvflow.integrations.vllm.tensors import adopt_caches
from kvflow.integrations.vllm.worker import RankRuntime, Results

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name


class KVFlowConnector(*versions.connector_bases()):  # type: ignore[misc]  # vLLM is not there to check against
    """One side of the connector: vLLM makes one in its scheduler's process, and one in the process of each rank."""

    _cache_hit_source = versions.hit_source()

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        has = versions.features()
        facts = engine_facts(vllm_config, ranked=role is KVConnectorRole.WORKER, told_of_sleep=has.sleep)
        self._settings = read_settings(extra, facts, own_host)
        self._groups = kv_cache_config.transfer_groups
        versions.require_failures_told(self._groups, vllm_config.kv_transfer_config.kv_load_failure_policy)
        self._loaded = versions.LoadedBlocks()
        self._scheduler: SchedulerSide | None = None
        self._runtime: RankRuntime | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._settings, vllm_config, kv_cache_config, versions.extra_keys())
            printed = sorted(SECRET_KEYS & set(extra))
            if printed:
                logger.warning("kvflow: vLLM prints its configuration, and %s with it: set the variables", printed)
        elif self._settings.log_file:
            configure_logging(Path(self._settings.log_file))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return that it does not, after a look at the configuration.

        On GPUs vLLM asks this when it reads its arguments. It makes a connector only when the model is loaded, which is
        late to learn of a wrong setting.
        """
        # vLLM does not tell the role here. A producer may have every setting.
        read_settings(extra_config, EngineFacts(engine_id="not known yet", kv_role="kv_producer"), own_host)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Ask for a packed layout, if the configuration says so; kvflow moves any, so it asks for nothing else."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        check_keys(extra)
        return PACKED_LAYOUT if wants_packed(extra) else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Tell that the cache may go and come back, if ``unregister_kv_caches`` and ``restore_kv_caches`` say so."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFlowStats:
        """Return statistics, of what a worker has sent or empty."""
        return KVFlowStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFlowMetrics:
        """Return what Prometheus is told."""
        return KVFlowMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Tell that a load brings the state, however deep the local hit of other layers is."""
        return True

    @property
    def _decides(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take what the workers say of themselves."""
        ranks = [each for each in metadata.values() if isinstance(each, RankIntroduction)]
        if ranks:
            self._decides.meet_ranks([each.address for each in ranks], [each.contact for each in ranks])
        else:  # ``MultiConnector`` hands on what its first child says that says anything
            logger.warning("kvflow: this engine offers nothing: another connector before kvflow speaks for its workers")

    def on_new_request(self, request: "Request") -> None:
        """Read what a request wants of other engines."""
        self._decides.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and that they are loaded between steps."""
        return self._decides.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return the groups that a load fills: all that travel."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Order the load of a request that has room now."""
        self._decides.allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loaded.note(request.request_id, blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the orders of this step."""
        idle = not scheduler_output.total_num_scheduled_tokens
        orders, loaded = self._decides.take_orders(), self._loaded.take()
        return StepOrders(orders, idle=idle, loaded=loaded) if orders or loaded else NO_ORDERS[idle]

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Note what the workers have reported."""
        self._decides.on_reported(connector_output.finished_recving, connector_output.finished_sending)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended, where there is one group."""
        return self._decides.on_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended, or give back what it did not use."""
        return self._decides.on_finished(request, block_ids)

    # The worker's side.

    @property
    def _does(self) -> RankRuntime:
        assert self._runtime is not None
        return self._runtime

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Put this rank's cache on the network."""
        config = self._settings.worker
        layers = [name for group in self._groups for name in group.layer_names]
        shape = engine_shape(self._vllm_config, layers)
        kernels = cpu_kernels(self._vllm_config, layers)
        cache = adopt_caches(kv_caches, self._groups, shape, tp_rank=config.rank, kernels=kernels)
        # Peers compare it: where no description tells them apart, this must.
        config = msgspec.structs.replace(config, model_dtype=config.model_dtype + marker(kernels, kv_caches))
        if self._settings.enable_cross_layers_blocks and self._kv_cache_config.kv_cache_layout != PACKED_LAYOUT:
            logger.warning(
                "kvflow: enable_cross_layers_blocks asks for layout %s, but vLLM has chosen %s: its attention backend "
                "does not allow the former, or VLLM_KV_CACHE_LAYOUT names the latter. Transfers work, with a "
                "descriptor for each layer of a block.",
                PACKED_LAYOUT,
                self._kv_cache_config.kv_cache_layout,
            )
        self._runtime = RankRuntime(config, cache, apart=runs_apart(self._vllm_config))
        endpoint = self._runtime.rank.address.endpoint
        logger.info(
            "kvflow: rank %d of %d of engine %s is at %s%s: %d groups, %d blocks, layout %s",
            config.rank,
            config.num_ranks,
            config.engine_id,
            endpoint,
            remark(endpoint),
            len(cache.groups),
            cache.num_blocks,
            self._kv_cache_config.kv_cache_layout,
        )
        for doubt in doubts(config):
            logger.warning("kvflow: %s", doubt)

    def unregister_kv_caches(self) -> None:
        """Take this rank's cache off the network before its memory goes; does nothing the second time."""
        if self._runtime is not None:
            self._runtime.suspend()

    def restore_kv_caches(self) -> None:
        """Put the cache on the network again, where its memory was before; vLLM then asks where the rank is."""
        if self._runtime is not None:
            self._runtime.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler must know of this rank."""
        return RankIntroduction(self._does.rank.address, self._does.contact)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Hand this step's orders to kvflow's thread.

        Not in ``start_load_kv``, which vLLM calls when the model has run: what is ordered here is read meanwhile, and a
        lease whose ticket is out already is held before the prompts of others are computed.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        if connector_metadata.orders or connector_metadata.loaded:
            self._loaded.learn(connector_metadata.loaded)
            self._does.rank.execute(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Return at once: the orders are carried out already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a request runs only when all its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Return at once: others read the cache itself."""

    def wait_for_save(self) -> None:
        """Return at once, likewise."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what has ended since the last step, as vLLM's ``KVConnectorTransferResults``."""
        return versions.transfer_results(*self._collect())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return what has ended since the last step; releases of vLLM that call this ask for failed blocks next."""
        sent, received, failed = self._collect()
        self._loaded.end(received, failed)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of loads that have failed; none where failed requests are reported."""
        return self._loaded.take_failed()

    def _collect(self) -> Results:
        """Return what has ended since the last step; in a step without a model wait a little for the loads."""
        step = self._connector_metadata
        assert isinstance(step, StepOrders)
        return self._does.rank.collect(idle=step.idle)

    def get_kv_connector_stats(self) -> KVFlowStats | None:
        """Return what this side has counted since the last step."""
        side = self._scheduler or (self._runtime and self._runtime.rank)
        tally = side.take_tally() if side else None
        return KVFlowStats(tally) if tally else None

    def shutdown(self) -> None:
        """Leave the network: leases end, pulls are cancelled, and from then on nothing touches the cache."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        if self._scheduler is not None:
            self._scheduler.close()
