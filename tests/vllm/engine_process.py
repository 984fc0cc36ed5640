"""One vLLM engine in this process, driven by lines of JSON over a socket; ``nursery`` forks it.

The settings have ``llm``, the arguments of ``vllm.LLM``, and ``cpu_layouts``, which replaces the list of layouts that
the CPU's attention declares (null leaves it). Some have ``served``, a module whose ``Served`` obeys further
commands. Commands come one a line, and have an ``op``; answers carry the ``id`` of what they answer.

========  ==================================================  =========================================================
op        fields                                              answer
========  ==================================================  =========================================================
generate  id, prompt, max_tokens, kv_transfer_params, chunk,  id, tokens, finish_reason, kv_transfer_params, or error;
          salt, n                                             samples, a list of tokens for each
abort     id, of a request                                    the request's, with finish_reason ``abort``
state     id                                                  id and the fields of ``state``
reset     id                                                  id, reset: whether the prefix cache was emptied
sleep     id, beneath: whether vLLM's scheduler is left out   id, or error
wake      id, beneath                                         id, or error
ranks     id, broken, of a rank, held: a rank and a kind      id, ranks: one object each, see ``rank_process``
sabotage  id, method, error: name of an exception             id; the next call of that method of kvflow's raises it
drafts    id                                                  id, draft, accepted: how many tokens so far
stop                                                          none; the engine is shut down
========  ==================================================  =========================================================

``{"pid": ...}`` is the first answer, ``{"ready": ...}`` the second, and ``{"fatal": ...}`` the last of an engine that
an exception has ended.
A request with ``progress`` is answered ``{"id": ..., "progress": number of tokens}`` at each of its steps, too.
"""

import builtins
import importlib
import json
import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from . import rank_process

IDLE_S = 0.001
"""How long vLLM's own loop sleeps after a step that ran no model."""
LISTENER = "commands"
"""Name of the thread that takes commands: neither the engine's nor a connector's."""


def declare_layouts(names: list[str]) -> None:
    """Let the CPU's attention declare other layouts than its one; its kernels go by strides, and read them well."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in names)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)  # type: ignore[method-assign]


def outcome(call: Callable[[], object]) -> dict[str, str]:
    """Return nothing, or what a call has raised as the field ``error``."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the driver is told, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def fork_workers() -> None:
    """Let the processes of tensor-parallel ranks be forked: nothing has run in this one that a fork would harm.

    vLLM for CPUs spawns them, and each would import vLLM again, which takes longer than all the rest.
    """
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def receive_unwarmed() -> None:
    """Let a later pipeline stage work without a warm-up, in which vLLM makes what receives the stage before it.

    On CPUs vLLM has no warm-up if it does not compile the model.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gathered(runner: Any, *args: Any) -> Any:
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return gather(runner, *args)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gathered


def send(answers: TextIO, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


class Served:
    """An engine and the requests that it has.

    Attributes:
        ops: commands that are methods of the same name.
    """

    ops = frozenset({"generate", "abort", "state", "reset", "sleep", "wake", "ranks", "sabotage", "drafts"})

    def __init__(self, settings: dict[str, Any], answers: TextIO) -> None:
        rank_process.watch()
        if settings["cpu_layouts"] is not None:
            declare_layouts(settings["cpu_layouts"])
        if settings["llm"]["tensor_parallel_size"] > 1 or settings["llm"]["pipeline_parallel_size"] > 1:
            fork_workers()
            receive_unwarmed()
        import vllm

        self.answers = answers
        self.llm = vllm.LLM(**settings["llm"])
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.tokens_per_step = self.scheduler.max_num_scheduled_tokens
        self.requests: dict[str, dict[str, Any]] = {}
        self.steps = 0

    def answer(self, **fields: Any) -> None:
        send(self.answers, **fields)

    def generate(self, command: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = command.get("kv_transfer_params")
        # Where a prompt is cut decides about the last bits of a state. Only a request that is alone can say it.
        self.scheduler.max_num_scheduled_tokens = command.get("chunk") or self.tokens_per_step
        n = command.get("n", 1)
        try:
            sampling = SamplingParams(
                temperature=0.0 if n == 1 else 1.0,
                max_tokens=command.get("max_tokens", 32),
                n=n,
                output_kind=RequestOutputKind.CUMULATIVE if n == 1 else RequestOutputKind.FINAL_ONLY,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if params is None else {"kv_transfer_params": params},
            )
            prompt = {"prompt_token_ids": command["prompt"]}
            if command.get("salt"):
                prompt["cache_salt"] = command["salt"]
            self.engine.add_request(command["id"], prompt, sampling)
        except Exception as error:  # noqa: BLE001 - the driver is told, whatever it is
            self.answer(id=command["id"], error=f"{type(error).__name__}: {error}")
        else:
            self.requests[command["id"]] = command

    def abort(self, command: dict[str, Any]) -> None:
        if self.requests.pop(command["id"], None) is None:
            return
        self.engine.abort_request([command["id"]])
        self.answer(id=command["id"], tokens=[], finish_reason="abort", kv_transfer_params=None)

    def state(self, command: dict[str, Any]) -> None:
        """Answer how many blocks and requests there are; ``held`` counts requests that wait to be freed, too."""
        pool = self.scheduler.kv_cache_manager.block_pool
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        self.answer(
            id=command["id"],
            free_blocks=pool.get_num_free_blocks(),
            blocks=pool.num_gpu_blocks,
            held=len(self.scheduler.requests),
            block_sizes=[group.kv_cache_spec.block_size for group in groups],
            descriptors=rank_process.READS.take(),
            steps=self.steps,
        )

    def reset(self, command: dict[str, Any]) -> None:
        """Answer whether the prefix cache was reset; an exception of vLLM is the field ``error``."""
        reset = []
        flags = command["running"], command["external"]
        error = outcome(lambda: reset.append(self.engine.reset_prefix_cache(*flags)))
        self.answer(id=command["id"], reset=reset == [True], **error)

    def sleep(self, command: dict[str, Any]) -> None:
        """Sleep as vLLM does, or have only its workers sleep, whatever its scheduler knows of."""
        from tests.vllm.sleeping import teach_sleep

        teach_sleep()
        asleep = self.core.model_executor.sleep if command["beneath"] else self.engine.sleep
        self.answer(id=command["id"], **outcome(asleep))

    def wake(self, command: dict[str, Any]) -> None:
        from tests.vllm.sleeping import introduce_ranks

        awake = self.core.model_executor.wake_up if command["beneath"] else self.engine.wake_up
        self.answer(id=command["id"], **outcome(lambda: (awake(), introduce_ranks(self.core))))

    def ranks(self, command: dict[str, Any]) -> None:
        """Answer what each rank says of itself; let the next read of one fail, or wait, if the command names it."""
        executor = self.core.model_executor
        if (held := command.get("held")) is not None:
            executor.collective_rpc(rank_process.hold_next_read, args=held)
        if (broken := command.get("broken")) is not None:
            executor.collective_rpc(rank_process.break_next_read, args=(broken,))
        self.answer(id=command["id"], ranks=executor.collective_rpc(rank_process.describe))

    def sabotage(self, command: dict[str, Any]) -> None:
        """Have the next call of ``loading.matched``, say, raise an exception."""
        owner, _, name = command["method"].rpartition(".")
        target = self.scheduler.connector._scheduler_side
        target = getattr(target, owner) if owner else target
        whole = getattr(target, name)

        def broken(*_: Any, **__: Any) -> None:
            setattr(target, name, whole)
            raise getattr(builtins, command["error"])("sabotage")

        setattr(target, name, broken)
        self.answer(id=command["id"])

    def drafts(self, command: dict[str, Any]) -> None:
        counts = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        names = {name: f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")}
        self.answer(id=command["id"], **{name: counts.get(metric, 0) for name, metric in names.items()})

    def step(self) -> None:
        """Run one step and answer what has ended in it."""
        outputs = self.engine.step()
        self.steps += 1
        for output in outputs:
            completion = output.outputs[0]
            if (request := self.requests.get(output.request_id)) is None:
                continue
            if not output.finished:
                if request.get("progress"):
                    self.answer(id=output.request_id, progress=len(completion.token_ids))
                continue
            del self.requests[output.request_id]
            self.answer(
                id=output.request_id,
                tokens=list(completion.token_ids),
                samples=[list(each.token_ids) for each in output.outputs],
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                cached_tokens=output.num_cached_tokens,
                kv_transfer_params=output.kv_transfer_params,
            )
        if not outputs:
            time.sleep(IDLE_S)

    def serve(self, commands: "queue.Queue[dict[str, Any]]") -> None:
        """Obey until told to stop, and step while there is work, as vLLM's own loop does."""
        for command in self.pending(commands):
            match command.get("op"):
                case "stop":
                    return
                case None:
                    self.step()
                case op if op in self.ops:
                    getattr(self, op)(command)

    def pending(self, commands: "queue.Queue[dict[str, Any]]") -> Iterator[dict[str, Any]]:
        """Yield commands as they come, and an empty one where the engine should take a step."""
        while True:
            try:
                yield commands.get(block=not self.scheduler.has_requests())
            except queue.Empty:
                yield {}


def run(settings: dict[str, Any], lines: TextIO, answers: TextIO) -> None:
    """Start an engine and obey commands until told to stop, or until whoever sent them is gone."""
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    send(answers, pid=os.getpid())

    def listen() -> None:
        for line in lines:
            commands.put(json.loads(line))
        commands.put({"op": "stop"})

    try:
        served = importlib.import_module(settings.get("served", __name__)).Served(settings, answers)
        threading.Thread(target=listen, name=LISTENER, daemon=True).start()
        served.answer(ready=True)
        served.serve(commands)
    except BaseException as error:  # noqa: BLE001 - the driver is told, and the process ends
        send(answers, fatal=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        os._exit(1)  # whatever threads there are
    served.core.shutdown()
    os._exit(0)  # taking the interpreter down, module by module, takes longer than all the rest
