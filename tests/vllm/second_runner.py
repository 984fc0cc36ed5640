"""Engines that call their connectors as on GPUs: asynchronous scheduling, and vLLM's second model runner.

vLLM runs neither on CPUs. Here its own ``EngineCore``, ``AsyncScheduler`` and ``ActiveKVConnector`` run over a model
and a device that are stand-ins. The device does its work in order, and only as far as something waits for it. Each
layer keeps numbers that depend on the token, its position and the layer. When a step has written, it reads what it and
all earlier steps and loads should have written, as attention does. Each pipeline stage has a worker and a device of its
own, which waits for what the stage before it computes.

The first model runner, which on GPUs schedules asynchronously, too, is ``first_runner``. Most names here are vLLM's,
which calls them.
"""

from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import core as engine_core
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvflow import KVCache
from kvflow.integrations.vllm import engine as connector_engine

BLOCK_SIZE = 16
TARGET, DRAFT = ("layers.0", "layers.1"), ("layers.2",)
"""Layers of the model, and of the draft model, which writes when the tokens of a step are on their way."""
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
SECRET = "the second model runner, tested without one"


NOT_SAMPLED = 99
"""What a draft model guesses if it is wrong."""


def token_at(position):
    """Return the token that the model samples at a position."""
    return 100 + position


SALTS = np.arange(1, 2 * SPEC.head_size + 1, dtype=np.int64) * 40503


def contents(tokens, positions, layers):
    """Return what layers, by number, keep of tokens: for each layer and token the 16-bit numbers of a cell."""
    known = (np.asarray(tokens, dtype=np.int64) * 7919 + np.asarray(positions, dtype=np.int64) * 104729 + 1) * 2654435
    mixed = (known[None, :, None] + (layers[:, None, None] + 1) * 1299709) * SALTS[None, None, :]
    return (mixed >> 7).astype(np.int16)


def state(tokens, layer):
    """Return the state of a layer behind tokens, as many numbers as the cells of a block have."""
    found = contents(tokens, range(len(tokens)), layer)[0].sum(axis=0, dtype=np.int16)
    return np.multiply.outer(np.arange(1, BLOCK_SIZE + 1, dtype=np.int16), found)


class Device:
    """Work that is done in order; after each piece ``after`` is called."""

    def __init__(self):
        self.after = lambda: None
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
        self.after()


class Output(Future):
    """The output of a step, for which the engine waits as for a copy from the device."""

    def __init__(self, device, is_sampled, output):
        super().__init__()
        self._device, self._is_sampled, self.output = device, is_sampled, output

    def done(self):
        return self._is_sampled()

    def result(self, timeout=None):
        self._device.work(self._is_sampled)
        return self.output


class Worker:
    """A rank, which does for each step what ``vllm/v1/worker/gpu/model_runner.py`` does, in the same order.

    A draft model guesses a token for each step, and is right in half of all cases. States are written with the layers
    of the model; ``states_late``: when the tokens of the step are on their way.

    Args:
        config: vLLM's.
        before: the rank of the pipeline stage before it.

    Attributes:
        wrong: what a step has read and should not: request, layer, position.
        order: launches, and what a test adds.
        between: called after new blocks are cleared and before the connector is told of the step.
    """

    states_late = True

    def __init__(self, config, before=None):
        self.config = config
        self.device = Device()
        self.before = before
        self.stage, stages = 0 if before is None else before.stage + 1, config.parallel_config.pipeline_parallel_size
        self.is_last = self.stage == stages - 1
        each = len(TARGET) // stages
        self.num_own = each  # its layers of the model that keep tokens; others follow them
        drafts = DRAFT if self.is_last and config.speculative_config is not None else ()
        self.layers = (*TARGET[self.stage * each : (self.stage + 1) * each], *drafts)
        self.has_states = config.model_config.is_hybrid
        if self.has_states:
            self.num_own = 1
            self.layers = (f"layers.{2 * self.stage}", f"layers.{2 * self.stage + 1}")
        self._numbers = np.array([int(name.removeprefix("layers.")) for name in self.layers])
        self.caches = {}
        self.wrong = []
        self.order = []
        self.between = lambda: None
        self._guess = Random(0)
        self._blocks = {}
        self._states = {}
        self._tokens = {}
        self._computed = {}
        self._num_known = {}
        self._sampled = set()
        self._step = None

    def get_kv_cache_spec(self):
        specs = dict.fromkeys(self.layers, SPEC)
        if self.has_states:
            shapes, length = ((SPEC.page_size_bytes // 2,),), self.config.model_config.max_model_len
            specs[self.layers[1]] = MambaSpec(block_size=length, shapes=shapes, dtypes=(SPEC.dtype,))
        return specs

    def get_supported_kv_cache_layouts(self):
        return ["LBHNC"]

    def set_kv_cache_layout(self, name):
        self.config.cache_config.kv_cache_layout = name

    def determine_available_memory(self):
        return 1 << 30

    def initialize_from_config(self, kv_cache_configs):
        kv_cache_config = kv_cache_configs[self.stage]
        shape = (kv_cache_config.num_blocks, SPEC.num_kv_heads, BLOCK_SIZE, 2 * SPEC.head_size)
        memory = torch.zeros((1 if self.has_states else len(self.layers), *shape), dtype=SPEC.dtype)
        self.caches = dict(zip(self.layers, memory.expand(len(self.layers), *shape), strict=True))
        self.cells = memory.view(torch.int16).numpy().reshape(len(memory), -1, 2 * SPEC.head_size)
        self._groups = [each.layer_names for each in kv_cache_config.kv_cache_groups]
        if self.has_states:  # as vLLM lays layers of two groups over each other
            assert {each.offset for each in kv_cache_config.kv_cache_tensors} == {0}
            assert sorted(self._groups) == [[name] for name in self.layers]
            self.caches[self.layers[1]] = memory[0].flatten(1).view(torch.uint8)[:, None, None]
        DEVICES[memory.data_ptr()] = self.device
        STAGE[0] = self.stage
        self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        with self.active():
            self.connect()

    @contextmanager
    def active(self):
        """Have vLLM find the connector of this rank: a process of its own has no other."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def connect(self):
        """Hand the caches to the connector."""
        self.kv_connector = ActiveKVConnector(self.config, self.caches)

    def get_kv_connector_handshake_metadata(self):
        return {(self.stage, 0): self.connector.get_handshake_metadata()}

    def execute_model(self, scheduled):
        self._prepare(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return self.kv_connector.no_forward(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=None, req_ids=names, num_tokens=scheduled.total_num_scheduled_tokens)
        self.kv_connector.pre_forward(scheduled, batch, {})
        rows = self._launch(scheduled)
        self.kv_connector.finish_forward()
        self._step = rows, scheduled.finished_req_ids
        return None

    def sample_tokens(self, _grammar):
        rows, ended = self._step
        is_sampled = self.device.mark()
        self._draft(rows)
        return self._output(rows, is_sampled, self._ended(ended))

    def shutdown(self):
        self.connector.shutdown()

    def _prepare(self, scheduled):
        self._learn(scheduled)
        if scheduled.new_block_ids_to_zero:
            self.device.give(self._zero, scheduled.new_block_ids_to_zero)
        self.between()

    def _ended(self, finished):
        """Tell the connector that the step was given to the device; return what it reports."""
        return self.kv_connector.post_forward(finished)

    def _launch(self, scheduled):
        guesses = scheduled.scheduled_spec_decode_tokens
        counts = scheduled.num_scheduled_tokens.items()
        rows = [self._row(name, number, len(guesses.get(name, ()))) for name, number in counts]
        self.order.append("launch")
        if self.before is not None:
            self.device.give(self.before.device.work, self.before.device.mark())
        self.device.give(self._compute, rows, slice(self.num_own))
        if self.has_states and not self.states_late:
            self.device.give(self._move_states, rows)
        return rows

    def _draft(self, rows):
        """Have written what is written when the tokens of the step are on their way."""
        if self.has_states and self.states_late:
            self.device.give(self._move_states, rows)
        elif len(self.layers) > self.num_own:
            self.device.give(self._compute, rows, slice(self.num_own, None))

    def _output(self, rows, is_sampled, transfers):
        if not self.is_last:
            return ModelRunnerOutput.with_kv_conn_output_only(transfers)
        names = [row.name for row in rows]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[row.sampled for row in rows],
            kv_connector_output=transfers,
        )
        return Output(self.device, is_sampled, output)

    def _learn(self, scheduled):
        for name in scheduled.finished_req_ids:
            for known in (self._blocks, self._states, self._tokens, self._computed, self._num_known):
                known.pop(name, None)
            self._sampled.discard(name)
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = []
            self._add(new.req_id, new.block_ids)
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._computed[new.req_id] = new.num_computed_tokens
            self._num_known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            self._sampled.discard(new.req_id)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:  # of the first runner; the second one learns of such requests anew
                self._blocks[name], self._computed[name] = [], start
                self._num_known[name] = len(cached.all_token_ids[name])
                self._sampled.discard(name)
            self._add(name, blocks or ())

    def _add(self, name, blocks):
        for layers, more in zip(self._groups, blocks, strict=False):
            if layers[0] in self.layers[: self.num_own]:
                self._blocks[name] += more
            elif more and self.has_states:
                (self._states[name],) = more

    def _row(self, name, number, num_guesses):
        """Return what a step computes of a request."""
        start, prompt = self._computed[name], self._tokens[name]  # vLLM counts every guess as right until it knows
        stop, known = start + number, start + number - num_guesses
        guesses_right = 0.5 if name in self._sampled else 0.0  # before that, vLLM has put guesses there that are none
        tokens = [*prompt, *map(token_at, range(len(prompt), stop))][:stop]
        # vLLM samples nothing of a chunk that ends within known tokens: after a preemption, they include the answer.
        sampled = [token_at(known)] if known >= self._num_known[name] else []
        for position in range(known, stop):
            if self._guess.random() >= guesses_right:
                tokens[position:] = [NOT_SAMPLED] * (stop - position)
                break
            sampled.append(token_at(position + 1))
        self._computed[name] = known + max(0, len(sampled) - 1)
        self._sampled.update([name] if sampled else [])
        return Row(name, start, stop, tokens, np.array(self._blocks[name]), sampled, self._states.get(name, 0))

    def _zero(self, blocks):
        for cache in self.caches.values():
            cache[blocks] = 0

    def _move_states(self, rows):
        """Read the state of each request, and write the next one."""
        for row in rows:
            cells = self.cells[0, row.state * BLOCK_SIZE : (row.state + 1) * BLOCK_SIZE]
            if row.start and (cells != state(row.tokens[: row.start], self._numbers[1:])).any():
                self.wrong.append((row.name, self.layers[1], row.start))
            cells[:] = state(row.tokens, self._numbers[1:])

    def _compute(self, rows, layers):
        """Write the tokens of all requests, and then read all that each one has: some may share blocks."""
        for row in rows:
            positions = np.arange(row.start, row.stop)
            written = contents(row.tokens[row.start :], positions, self._numbers[layers])
            self.cells[layers, row.slots(positions)] = written
        for row in rows:
            positions = np.arange(row.stop)
            found = self.cells[layers, row.slots(positions)]
            right = (found == contents(row.tokens, positions, self._numbers[layers])).all(axis=2)
            if not right.all():
                self.wrong += [(row.name, self.layers[layers][layer], int(at)) for layer, at in np.argwhere(~right)]


@dataclass(frozen=True)
class Row:
    """What a step computes of a request.

    Attributes:
        name: of the request.
        start: tokens that were computed before.
        stop: index after the last token of the step.
        tokens: the first ``stop``, of which guesses may be wrong.
        blocks: its blocks.
        sampled: the tokens that come of it.
        state: the block that has its state, if there are any.
    """

    name: str
    start: int
    stop: int
    tokens: list
    blocks: np.ndarray
    sampled: list
    state: int = 0

    def slots(self, positions):
        """Return where tokens are: the index of a cell in a layer."""
        return self.blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


DEVICES = {}
"""Address of a cache -> its device."""

STAGE = [0]
"""Pipeline stage of the rank that starts."""

IS_SECOND, HAS_STATES = "is_second", "has_states"
"""What is added to configurations of engines: vLLM refuses the second model runner on CPUs when it makes one."""


class Executor(UniProcExecutor):
    """Runs the workers of all pipeline stages in this process, and puts together what they report."""

    worker_class = Worker

    def _init_executor(self):
        self.workers = [self.worker_class(self.vllm_config)]
        for _ in range(1, self.vllm_config.parallel_config.pipeline_parallel_size):
            self.workers.append(self.worker_class(self.vllm_config, self.workers[-1]))

    def compile_or_warm_up_model(self):
        pass

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, single_value=False):  # noqa: PLR0917
        results = [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]
        if not single_value:
            return results
        *others, result = results
        if isinstance(result, Output):
            result.output = self._together(others, result.output)
            return result
        if others and result is not None:
            result = self._together(others, result)
        if not non_block:
            return result
        future = Future()
        future.set_result(result)
        return future

    def _together(self, others, output):
        if not others:
            return output
        return self.kv_output_aggregator.aggregate([*others, copy(output)], len(others))

    def shutdown(self):
        for worker in self.workers:
            worker.shutdown()


class Engine:
    """One engine, which steps when a test says so.

    Args:
        model: folder with a model's config.
        role: ``kv_role``.
        num_blocks: of its cache.
        executor: runs its worker.
        drafts: it has a draft model.
        states: every other layer of its model has states; each stage has one, and one with keys and values.
        stages: pipeline stages. With the first runner, vLLM then schedules no step of a request before its last token.
        own: settings of the connector, beside the usual ones.
        transfer: fields of vLLM's ``KVTransferConfig``, beside the usual ones.
        limits: arguments of vLLM's engine, beside the usual ones.
    """

    def __init__(
        self,
        model,
        role,
        *,
        num_blocks=64,
        executor=Executor,
        drafts=True,
        states=False,
        stages=1,
        own=None,
        transfer=None,
        **limits,
    ):
        usual = {"cluster_secret": SECRET, "transport": "loopback", "quarantine_s_max": 60.0}
        transfers = KVTransferConfig(
            kv_connector="KVFlowConnector",
            kv_connector_module_path="kvflow.integrations.vllm.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=usual | (own or {}),
            **(transfer or {}),
        )
        arguments = EngineArgs(
            model=str(model),
            max_model_len=min(512, (num_blocks - 1 - states) * BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            kv_transfer_config=transfers,
            **{"enable_prefix_caching": False} | limits,
        )
        if drafts:
            guessing = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 1}
            arguments.speculative_config = guessing
        config = arguments.create_engine_config()
        is_second = executor.worker_class is Worker
        config.scheduler_config.async_scheduling = is_second or stages == 1  # vLLM turns it off on CPUs
        config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = stages
        vars(config)[IS_SECOND], vars(config.model_config)[HAS_STATES] = is_second, states
        self.core = engine_core.EngineCore(config, executor, log_stats=False)
        self.scheduler = self.core.scheduler
        self.workers = self.core.model_executor.workers
        self.worker = self.workers[0]
        self.device = self.worker.device
        self.ranks = [worker.connector._runtime.rank for worker in self.workers]
        self.rank = self.ranks[0]
        self.outputs = {}
        self.blocks = self.free_blocks
        assert isinstance(self.scheduler, AsyncScheduler) is (is_second or stages == 1)
        assert config.max_concurrent_batches == (stages + 1 if is_second else 2)

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
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda config: vars(config).get(IS_SECOND, False)))
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda config: vars(config).get(HAS_STATES, False)))
    monkeypatch.setattr(engine_core, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(engine_core, "enable_envs_cache", lambda: None)
    monkeypatch.setattr(engine_core, "cleanup_dist_env_and_memory", lambda *_, **__: None)  # it collects garbage
    monkeypatch.setattr(connector_engine, "_tp_rank", lambda: 0)
    monkeypatch.setattr(connector_engine, "_pp_rank", lambda: STAGE[0])
    monkeypatch.setattr(KVCache, "write_marker", lambda self: DEVICES[self.manifest().regions[0].address].mark)


def zero_new_blocks(monkeypatch):
    """Have vLLM zero new blocks, as it does for models with states."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda _: True))
