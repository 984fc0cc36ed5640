"""Engines that call their connectors as on GPUs: asynchronous scheduling, and vLLM's second model runner.

vLLM runs neither on CPUs. Here its own ``EngineCore``, ``AsyncScheduler`` and ``ActiveKVConnector`` run over a model
and a device that are stand-ins. The device does its work in order, and only as far as something waits for it. Each
layer keeps a number that depends on the token, its position and the layer. Before a step writes, it reads what all
earlier steps and loads should have written, as attention does.

Most names here are vLLM's, which calls them.
"""

from collections import deque
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import core as engine_core
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvflow import KVCache
from kvflow.integrations.vllm import connector
from kvflow.integrations.vllm import engine as connector_engine

BLOCK_SIZE = 16
TARGET, DRAFT = ("layers.0", "layers.1"), ("layers.2",)
"""Layers of the model, and of the draft model, which writes when the tokens of a step are on their way."""
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
SECRET = "the second model runner, tested without one"


def token_at(position):
    """Return the token that the model samples at a position."""
    return 100 + position


def content(token, position, layer):
    """Return what a layer keeps of a token; bfloat16 has all these numbers."""
    return (token * 31 + position * 7 + (*TARGET, *DRAFT).index(layer) * 3) % 199 + 1


class Device:
    """Work that is done in order."""

    def __init__(self):
        self._queue = deque()
        self._given = 0
        self._done = 0

    def give(self, work, *arguments):
        self._queue.append(partial(work, *arguments))
        self._given += 1

    def mark(self):
        """Return what tells whether everything given so far is done, as an event on a stream does."""
        given = self._given
        return lambda: self._done >= given

    @property
    def is_idle(self):
        return not self._queue

    def work(self, until=lambda: False):
        """Do what was given, until something is so or nothing is left."""
        while self._queue and not until():
            self.work_once()

    def work_once(self):
        """Do the next piece of what was given."""
        self._queue.popleft()()
        self._done += 1


class Output(Future):
    """The output of a step, for which the engine waits as for a copy from the device."""

    def __init__(self, device, is_sampled, output):
        super().__init__()
        self._device, self._is_sampled, self._output = device, is_sampled, output

    def done(self):
        return self._is_sampled()

    def result(self, timeout=None):
        self._device.work(self._is_sampled)
        return self._output


class Worker:
    """A rank, which does for each step what ``vllm/v1/worker/gpu/model_runner.py`` does, in the same order."""

    def __init__(self, config):
        self.config = config
        self.device = Device()
        self.caches = {}
        self.wrong = []
        self.order = []
        self._blocks = {}
        self._tokens = {}
        self._step = None

    def get_kv_cache_spec(self):
        return dict.fromkeys((*TARGET, *DRAFT), SPEC)

    def get_supported_kv_cache_layouts(self):
        return ["LBHNC"]

    def set_kv_cache_layout(self, name):
        self.config.cache_config.kv_cache_layout = name

    def determine_available_memory(self):
        return 1 << 30

    def initialize_from_config(self, kv_cache_configs):
        (kv_cache_config,) = kv_cache_configs
        shape = (kv_cache_config.num_blocks, SPEC.num_kv_heads, BLOCK_SIZE, 2 * SPEC.head_size)
        memory = torch.zeros((len(self.get_kv_cache_spec()), *shape), dtype=SPEC.dtype)
        self.caches = dict(zip(self.get_kv_cache_spec(), memory, strict=True))
        DEVICES[memory.data_ptr()] = self.device
        self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            self.kv_connector = ActiveKVConnector(self.config, self.caches)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def get_kv_connector_handshake_metadata(self):
        return {(0, 0): self.connector.get_handshake_metadata()}

    def execute_model(self, scheduled):
        self._learn(scheduled)
        if scheduled.new_block_ids_to_zero:
            self.device.give(self._zero, scheduled.new_block_ids_to_zero)
        if not scheduled.total_num_scheduled_tokens:
            return self.kv_connector.no_forward(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=None, req_ids=names, num_tokens=scheduled.total_num_scheduled_tokens)
        self.kv_connector.pre_forward(scheduled, batch, {})
        rows = [self._row(name, number) for name, number in scheduled.num_scheduled_tokens.items()]
        self.order.append("launch")
        self.device.give(self._attend, rows)
        self.device.give(self._write, rows, TARGET)
        self.kv_connector.finish_forward()
        self._step = scheduled, rows
        return None

    def sample_tokens(self, _grammar):
        scheduled, rows = self._step
        is_sampled = self.device.mark()
        self.device.give(self._write, rows, DRAFT)
        transfers = self.kv_connector.post_forward(scheduled.finished_req_ids)
        names = [name for name, *_ in rows]
        sampled = [[token_at(stop)] if stop >= self._prompt(name) else [] for name, _, stop, *_ in rows]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=transfers,
        )
        return Output(self.device, is_sampled, output)

    def shutdown(self):
        self.connector.shutdown()

    def _learn(self, scheduled):
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._tokens[new.req_id] = list(new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        assert not cached.resumed_req_ids
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._blocks[name] += blocks[0] if blocks else []
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._starts = starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _prompt(self, name):
        return len(self._tokens[name])

    def _row(self, name, number):
        """Return the name, the range of positions, the tokens and the blocks of a request in a step."""
        stop = self._starts[name] + number
        tokens = [*self._tokens[name], *(token_at(position) for position in range(self._prompt(name), stop))]
        return name, self._starts[name], stop, tokens, tuple(self._blocks[name])

    def _zero(self, blocks):
        for cache in self.caches.values():
            cache[blocks] = 0

    def _attend(self, rows):
        for name, start, _, tokens, blocks in rows:
            for layer, cache in self.caches.items():
                for position in range(start):
                    found = cache[blocks[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
                    if not (found == content(tokens[position], position, layer)).all():
                        self.wrong.append((name, layer, position))

    def _write(self, rows, layers):
        for _, start, stop, tokens, blocks in rows:
            for position in range(start, stop):
                for layer in layers:
                    cell = self.caches[layer][blocks[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
                    cell[:] = content(tokens[position], position, layer)


DEVICES = {}
"""Address of a cache -> its device."""

SECOND = set()
"""Configurations of engines with the second model runner, which vLLM refuses on CPUs when it makes a configuration."""


class Executor(UniProcExecutor):
    """Runs ``Worker`` in this process."""

    def _init_executor(self):
        self.driver_worker = Worker(self.vllm_config)

    def compile_or_warm_up_model(self):
        pass

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, single_value=False):  # noqa: PLR0917
        result = getattr(self.driver_worker, method)(*args, **(kwargs or {}))
        if not non_block:
            return result if single_value else [result]
        if isinstance(result, Output):
            return result
        future = Future()
        future.set_result(result if single_value else [result])
        return future


class Engine:
    """One engine, which steps when a test says so.

    Args:
        model: folder with a model's config.
        role: ``kv_role``.
        num_blocks: of its cache.
        transfer: fields of vLLM's ``KVTransferConfig``, beside the usual ones.
        limits: arguments of vLLM's engine, beside the usual ones.
    """

    def __init__(self, model, role, *, num_blocks=64, transfer=None, **limits):
        own = {"cluster_secret": SECRET, "transport": "loopback", "quarantine_s_max": 60.0}
        transfers = KVTransferConfig(
            kv_connector="KVFlowConnector",
            kv_connector_module_path="kvflow.integrations.vllm.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=own,
            **(transfer or {}),
        )
        arguments = EngineArgs(
            model=str(model),
            max_model_len=min(512, (num_blocks - 1) * BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=False,
            kv_transfer_config=transfers,
            **limits,
        )
        config = arguments.create_engine_config()
        config.scheduler_config.async_scheduling = True  # vLLM turns it off on CPUs
        SECOND.add(id(config))
        self.core = engine_core.EngineCore(config, Executor, log_stats=False)
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker
        self.device = self.worker.device
        self.rank = self.worker.connector._runtime.rank
        self.outputs = {}
        self.blocks = self.free_blocks
        assert isinstance(self.scheduler, AsyncScheduler)
        assert config.max_concurrent_batches == 2

    def ask(self, name, prompt, params=None, max_tokens=1):
        """Send a request."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.core.request_block_hasher)
        self.core.add_request(request)
        self.outputs[name] = SimpleNamespace(tokens=[], finished=None, params=None)

    def abort(self, name):
        """Abort a request."""
        self.core.abort_requests([name])

    def step(self):
        """Let the engine take one step of its loop."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for client in (outputs or {}).values():
            for output in client.outputs:
                found = self.outputs[output.request_id]
                found.tokens += output.new_token_ids
                found.finished = output.finish_reason or found.finished
                found.params = output.kv_transfer_params or found.params

    @property
    def has_work(self):
        """Whether vLLM's loop would step the engine."""
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self):
        self.core.shutdown()


def prepare(monkeypatch):
    """Have vLLM behave as on a GPU where it asks, and leave this process as it was."""
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda config: id(config) in SECOND))
    monkeypatch.setattr(engine_core, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(engine_core, "enable_envs_cache", lambda: None)
    monkeypatch.setattr(connector_engine, "_tp_rank", lambda: 0)
    monkeypatch.setattr(connector, "writes_late", lambda _: True)
    monkeypatch.setattr(KVCache, "write_marker", lambda self: DEVICES[self.manifest().regions[0].address].mark)


def zero_new_blocks(monkeypatch):
    """Have vLLM zero new blocks, as it does for models with states."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda _: True))
