"""``KVFlowConnector``: takes vLLM's calls and hands them to the scheduler's side or the worker's side.

Methods that vLLM's scheduler calls must not raise, because an exception would end vLLM: ``SchedulerSide`` catches all.
A wrong configuration raises at the start.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvflow import RankAddress, configure_logging
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import versions
from kvflow.integrations.vllm.admission import Contact
from kvflow.integrations.vllm.caches import adopt_caches, cpu_kernels, layer_specs, marker, set_scales
from kvflow.integrations.vllm.engine import (
    allow_tiles,
    draft_layers,
    drain_time,
    engine_facts,
    engine_shape,
    load_wait,
    own_host,
    require_fixed_pages,
    require_own_device,
    required_layout,
    runs_apart,
    writes_late,
)
from kvflow.integrations.vllm.logs import logger, share_handlers
from kvflow.integrations.vllm.messages import Command, pack, unpack
from kvflow.integrations.vllm.runtime import RankRuntime
from kvflow.integrations.vllm.scheduler import SchedulerSide
from kvflow.integrations.vllm.settings import (
    SECRET_KEYS,
    EngineFacts,
    doubts,
    read_own,
    read_settings,
    remark,
)
from kvflow.integrations.vllm.stats import KVFlowMetrics, KVFlowStats
from kvflow.integrations.vllm.worker import Results

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepCommands(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Commands of one step, from the scheduler's side to every rank. vLLM pickles it."""

    commands: Sequence[Command] = ()
    step: int = 0
    idle: bool = False  # the step has nothing to compute
    loaded: Mapping[str, list[int]] = field(default_factory=dict)  # of ``versions.LoadedBlocks``
    revoked: Sequence[str] = ()  # kept leases that end before this step writes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle."""
        return self.__dict__ | {"commands": pack(self.commands)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state."""
        self.__dict__.update(state, commands=unpack(state["commands"]))


@dataclass
class RankIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """Introduces one rank to the scheduler's side, at the start and after a sleep."""

    address: RankAddress
    contact: Contact


@dataclass
class RefusedLeases(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Kept leases that ranks have refused, for the scheduler's side."""

    names: list[str]

    def aggregate(self, other: "RefusedLeases") -> "RefusedLeases":  # type: ignore[override, unused-ignore]
        """Return those of several ranks."""
        return RefusedLeases([*self.names, *other.names])


class KVFlowConnector(*versions.connector_bases()):  # type: ignore[misc]  # vLLM is not there to check against
    """One side of the connector. vLLM makes one object for its scheduler, and one for each rank."""

    _cache_hit_source = versions.hit_source()

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        has = versions.features()
        allow_tiles()  # vLLM makes a connector in each process before the first step
        require_own_device(vllm_config)
        require_fixed_pages(vllm_config)
        facts = engine_facts(vllm_config, ranked=role is KVConnectorRole.WORKER, told_of_sleep=has.sleep)
        self._settings = read_settings(extra, facts, own_host)
        self._groups = kv_cache_config.transfer_groups
        if sharing := [name for name in ("keep", "sources") if getattr(self._settings, name)]:
            versions.require_sharing(sharing)
        versions.require_failures_told(self._groups, vllm_config.kv_transfer_config.kv_load_failure_policy)
        self._loaded = versions.LoadedBlocks()
        self._step = 0
        self._after_launch: Sequence[Command] = ()
        self._writes_late = writes_late(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._runtime: RankRuntime | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._settings, vllm_config, kv_cache_config, versions.extra_keys())
            versions.reset_connectors_first(vllm_config.scheduler_config.get_scheduler_cls(), KVFlowConnector)
            versions.introduce_siblings(KVFlowConnector)
            printed = sorted(SECRET_KEYS & set(extra))
            if printed:
                logger.warning(
                    "kvflow: vLLM prints its configuration, including %s. Set secrets in the environment instead",
                    printed,
                )
        elif self._settings.log_file:
            level = logging.getLevelNamesMapping()[self._settings.log_level.upper()]
            configure_logging(Path(self._settings.log_file), level=level)
        share_handlers()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, after a check of the configuration.

        On GPUs vLLM calls this when it reads its arguments. It makes the connector only after it has loaded the model,
        when a wrong setting would be found late.
        """
        # vLLM does not pass kv_role here. A producer may have every setting.
        read_settings(extra_config, EngineFacts(engine_id="not known yet", kv_role="kv_producer"), own_host)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return the layout with the fewest descriptors that vLLM's backends support; kvflow transfers any layout."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return required_layout(vllm_config, packed=read_own(extra).enable_cross_layers_blocks)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: ``unregister_kv_caches`` and ``restore_kv_caches`` withdraw the cache and serve it again."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFlowStats:
        """Return statistics with the counters of a worker, or empty ones."""
        return KVFlowStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFlowMetrics:
        """Return the metrics for Prometheus."""
        return KVFlowMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Return True: a load brings the state, so the prefix cache may have more of other layers."""
        return True

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take the introductions of the ranks."""
        ranks = [each for each in metadata.values() if isinstance(each, RankIntroduction)]
        if ranks:
            self._scheduler_side.meet_ranks([each.address for each in ranks], [each.contact for each in ranks])
        else:  # ``MultiConnector`` passes on the metadata of its first child that has any
            logger.warning(
                "kvflow: this engine offers nothing, because another connector comes before kvflow in connectors of "
                "MultiConnector. Put KVFlowConnector first."
            )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the introductions of the ranks of all pipeline stages."""
        self.set_xfer_handshake_metadata(dict(enumerate(each for _, each in sorted(metadata.items()))))

    def reset_before(self, scheduler: Any, *, forced: bool) -> None:
        """End all kept leases, and if ``forced`` offers and loads, before vLLM's scheduler resets its own cache."""
        if forced:  # it needs their blocks
            self._scheduler_side.reset(scheduler)
        else:
            self._scheduler_side.end_kept()

    def meet_siblings(self, takers: Sequence[str]) -> None:
        """Refuse ``keep`` beside other children of ``MultiConnector`` that take vLLM's block pool."""
        if takers and self._settings.keep:
            named = " and ".join(takers)
            raise ConfigInvalid(
                f"keep is set beside {named}, but vLLM's block pool tells only one connector that it reuses a block: "
                "peers might read other bytes",
                remedy=f"Remove keep, or remove {named} from connectors of MultiConnector.",
            )

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Take vLLM's block pool, which tells when it reuses a block."""
        self._scheduler_side.bind_pool(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Return whether there will be commands, for which vLLM takes a step though it has no request."""
        return self._scheduler_side.keeping.is_signing

    def reset_cache(self) -> bool:
        """Return whether every rank has ended its offers and loads."""
        return self._scheduler_side.reset()

    def on_new_request(self, request: "Request") -> None:
        """Take a new request and read its ``kv_transfer_params``."""
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether they are loaded between steps."""
        return self._scheduler_side.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return the groups that a load fills: all that are transferred."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Order the load of a request that has its blocks now."""
        self._scheduler_side.allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loaded.note(request.request_id, blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the commands of this step."""
        idle = not scheduler_output.total_num_scheduled_tokens
        self._step += 1
        self._scheduler_side.on_scheduled(scheduler_output, self._step)
        side = self._scheduler_side
        return StepCommands(side.take_commands(), self._step, idle, self._loaded.take(), side.keeping.take_revoked())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take the requests that the ranks have reported, and the kept leases that one of them has refused."""
        if isinstance(refused := connector_output.kv_connector_worker_meta, RefusedLeases):
            self._scheduler_side.on_refused(refused.names)
        self._scheduler_side.on_reported(connector_output.finished_recving, connector_output.finished_sending)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended, in an engine with one group."""
        return self._scheduler_side.on_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended, or release the ticket that it did not use."""
        return self._scheduler_side.on_finished(request, block_ids)

    # The worker's side.

    @property
    def _worker_side(self) -> RankRuntime:
        assert self._runtime is not None
        return self._runtime

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open this rank's worker over its cache, and log its address."""
        config = self._settings.worker
        layers = dict(chain.from_iterable(map(layer_specs, self._groups)))
        shape = engine_shape(self._vllm_config, layers)
        kernels = cpu_kernels(self._vllm_config, layers)
        tp_rank = config.rank % shape.tp_size
        drafts = draft_layers(self._vllm_config, self._kv_cache_config)
        rebuilt = drafts if self._settings.rebuild_layers == "auto" else []
        cache = adopt_caches(kv_caches, self._groups, shape, tp_rank=tp_rank, kernels=kernels, rebuilt=rebuilt)
        set_scales(kv_caches, self._vllm_config.compilation_config.static_forward_context)
        # Peers compare model_dtype. The marker separates caches that their specs cannot tell apart.
        config = config.replaced(model_dtype=config.tuning.model_dtype + marker(kernels, kv_caches))
        layout = self._kv_cache_config.kv_cache_layout
        if self._settings.enable_cross_layers_blocks and not str(layout).startswith("B"):
            logger.warning(
                "kvflow: enable_cross_layers_blocks asks for layout %s, but vLLM has chosen %s: the attention backend "
                "does not support the first, or VLLM_KV_CACHE_LAYOUT sets the second. Transfers work, with one "
                "descriptor for each layer of a block.",
                required_layout(self._vllm_config, packed=True),
                layout,
            )
        self._runtime = RankRuntime(
            config,
            cache,
            apart=runs_apart(self._vllm_config),
            mark=cache.write_marker(),
            load_wait=load_wait(self._vllm_config),
            drain_s=drain_time(self._vllm_config, config.tuning.drain_s),
        )
        endpoint = self._runtime.rank.address.endpoint
        logger.info(
            "kvflow: rank %d of %d of engine %s is at %s%s: layout=%s blocks=%d groups=%d",
            config.rank,
            config.num_ranks,
            config.engine_id,
            endpoint,
            remark(endpoint),
            layout,
            cache.num_blocks,
            len(cache.groups),
        )
        for doubt in doubts(config):
            text = "kvflow: " + doubt  # no argument, which would be cut
            logger.warning(text)

    def unregister_kv_caches(self) -> None:
        """Withdraw this rank's cache before vLLM frees its memory. A second call does nothing."""
        if self._runtime is not None:
            self._runtime.suspend()

    def restore_kv_caches(self) -> None:
        """Serve the cache again, at its old address in memory; vLLM then asks for the introduction again."""
        if self._runtime is not None:
            self._runtime.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the introduction of this rank."""
        runtime = self._worker_side
        return RankIntroduction(runtime.rank.address, runtime.contact)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End the leases of the blocks that this step may reuse, before it writes into any."""
        assert isinstance(kv_connector_metadata, StepCommands)
        if kv_connector_metadata.commands:
            self._worker_side.rank.prepare(kv_connector_metadata.commands)
        if kv_connector_metadata.revoked:
            self._worker_side.rank.revoke(kv_connector_metadata.revoked)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Hand the commands of this step to kvflow's thread.

        On a CPU this happens here and not in ``start_load_kv``, which vLLM calls after the model has run. So blocks are
        read while the model runs; leases are held before other prompts are computed, or meanwhile. On a GPU, whose
        kernels this thread launches next, only leases are held here: what else there is to do would compete with it
        for the GIL.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepCommands)
        if connector_metadata.commands or connector_metadata.loaded:
            self._loaded.learn(connector_metadata.loaded)
            now, self._after_launch = self._worker_side.divide(connector_metadata.commands)
            self._worker_side.rank.execute(now)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step, on a GPU; on a CPU ``bind_connector_metadata`` has started them.

        If steps may still write blocks that vLLM gives away, a load waits until the steps before this one have written:
        one of them may have had its blocks.
        """
        step = self._connector_metadata
        assert isinstance(step, StepCommands)
        commands, self._after_launch = self._after_launch, ()
        if self._writes_late:
            self._worker_side.rank.execute_written(commands, step=step.step - 1)
        elif commands:
            self._worker_side.rank.execute(commands)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only when all its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: other engines read the cache directly."""

    def wait_for_save(self) -> None:
        """Note that all that this step writes is written, or was given to the device. Other engines read the cache."""
        step = self._connector_metadata
        assert isinstance(step, StepCommands)
        self._worker_side.rank.end_step(step.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests that have ended since the last step, as vLLM's ``KVConnectorTransferResults``."""
        return versions.transfer_results(*self._collect())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that have ended since the last step; vLLM asks for the blocks of failed loads next."""
        sent, received, failed = self._collect()
        self._loaded.end(received, failed)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed loads; none in releases of vLLM that take failed requests."""
        return self._loaded.take_failed()

    def _collect(self) -> Results:
        """Return the requests that have ended since the last step; with nothing to compute, wait for loads briefly."""
        step = self._connector_metadata
        assert isinstance(step, StepCommands)
        if step.idle:  # not every release of vLLM calls ``wait_for_save`` in such a step
            self._worker_side.rank.end_step(step.step)
        return self._worker_side.rank.collect(idle=step.idle)

    def build_connector_worker_meta(self) -> RefusedLeases | None:
        """Return the kept leases that this rank has refused since the last step."""
        refused = self._worker_side.rank.take_refused()
        return RefusedLeases(refused) if refused else None

    def get_kv_connector_stats(self) -> KVFlowStats | None:
        """Return the counters of this side since the last step."""
        side = self._scheduler or (self._runtime and self._runtime.rank)
        counters = side.take_counters() if side else None
        return KVFlowStats(counters) if counters else None

    def shutdown(self) -> None:
        """Close this side: leases end, pulls are cancelled, and nothing touches the cache afterwards."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        if self._scheduler is not None:
            self._scheduler.close()
