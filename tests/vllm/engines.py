"""Two vLLM engines as child processes, and what a router does between them."""

import itertools
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from .tiny_models import CONTEXT

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVFLOW_TEST_VLLM_PYTHON", sys.executable)
"""The interpreter of an environment with vLLM."""
OUT = ROOT / "out" / "vllm"
"""Models and logs."""
START_S = 300.0
"""An engine is ready in 15 s when nothing else runs."""
ANSWER_S = 120.0
STOP_S = 60.0

KVFLOW = "KVFlowConnector"
NIXL = "NixlConnector"

DTYPES = {"granite": "float32"}
"""Models whose tokens differ in bfloat16 when the last one of a prompt is computed alone."""
LOG_TAIL = 6000


class EngineFailed(AssertionError):
    """An engine has ended, or does not answer; the message has the end of its log."""


def free_port() -> int:
    """Return a port that is free and stays so: the kernel gives none below 32768 to who asks for any."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Options:
    """How an engine is started.

    Attributes:
        model: a name of ``tiny_models``.
        connector: name of the connector; empty for none.
        block_size: tokens; 0 leaves it to vLLM.
        layout: of the cache; empty leaves it to vLLM.
        prefix_caching: whether blocks of one request serve the next.
        failure_policy: ``kv_load_failure_policy``.
        extra: ``kv_connector_extra_config`` beside what the connector needs.
        llm: arguments of ``vllm.LLM`` beside the usual ones.
    """

    model: str = "llama"
    connector: str = KVFLOW
    block_size: int = 0
    layout: str = ""
    prefix_caching: bool = False
    failure_policy: str = "fail"
    extra: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)


def transfer_config(options: Options, role: str, engine_id: str, secret: str) -> dict[str, Any] | None:
    """Return what ``--kv-transfer-config`` says."""
    common = {
        "kv_connector": options.connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": options.failure_policy,
        "engine_id": engine_id,
    }
    match options.connector:
        case "":
            return None
        case "KVFlowConnector":
            own = {"cluster_secret": secret, "bind": "tcp://127.0.0.1:0"}
            module = {"kv_connector_module_path": "kvflow.integrations.vllm"}
            return common | module | {"kv_connector_extra_config": own | options.extra}
        case _:
            return common | {"kv_connector_extra_config": dict(options.extra)}


class Engine:
    """A child process with one engine.

    Use it as a context manager: leaving it ends the process.

    Args:
        options: how it is started.
        folder: of the model.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        name: for the log and as the engine's id.
        secret: of the cluster.
    """

    def __init__(self, options: Options, folder: Path, *, role: str, name: str, secret: str = "") -> None:
        self.options = options
        self.name = name
        self.log = OUT / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[str, Future[dict[str, Any]]] = {}
        self._progress: dict[str, Callable[[int], None]] = {}
        self._ready: Future[dict[str, Any]] = Future()
        llm = {
            "model": str(folder),
            "dtype": DTYPES.get(options.model, "bfloat16"),
            "max_model_len": CONTEXT,
            "max_num_seqs": 16,
            "max_num_batched_tokens": CONTEXT,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": options.prefix_caching,
            "kv_transfer_config": transfer_config(options, role, name, secret),
        }
        if options.block_size:
            llm["block_size"] = options.block_size
        settings = {
            "llm": llm | options.llm,
            "cpu_layouts": ["LBHNC", "BLHNC", "BHLNC"] if options.layout else None,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.vllm.engine_process", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment(options),
                text=True,
                bufsize=1,
            )
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]

    def wait_ready(self) -> "Engine":
        self._await(self._ready, START_S)
        return self

    def submit(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        *,
        max_tokens: int = 32,
        request_id: str | None = None,
        chunk: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> "Request":
        """Start a request.

        Args:
            prompt: token ids.
            params: ``kv_transfer_params``.
            max_tokens: how many are generated.
            request_id: unique in this engine; chosen here if None.
            chunk: where nothing else runs, the tokens of a prompt that one step computes; 0 leaves it to vLLM.
            progress: called with the number of tokens after each step, on a thread of the engine's.
        """
        request_id = request_id or f"{self.name}-{next(self._ids)}"
        if progress is not None:
            self._progress[request_id] = progress
        fields = {"prompt": list(prompt), "max_tokens": max_tokens, "kv_transfer_params": params, "chunk": chunk}
        answer = self._command("generate", request_id, **fields, progress=progress is not None)
        return Request(self, request_id, answer)

    def generate(self, prompt: Sequence[int], params: Mapping[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        """Run a request to its end and return the engine's answer: see ``engine_process``."""
        return self.submit(prompt, params, **named).wait()

    def state(self) -> dict[str, Any]:
        """Return the blocks and requests of the engine, and the descriptors of reads since the last call."""
        return self._await(self._command("state", f"state-{next(self._ids)}"), ANSWER_S)

    def reset_prefix_cache(self) -> bool:
        answer = self._await(self._command("reset", f"reset-{next(self._ids)}"), ANSWER_S)
        return bool(answer["reset"])

    def wait_state(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask until the state is as wanted."""
        deadline = time.monotonic() + timeout_s
        while not condition(state := self.state()):
            if time.monotonic() > deadline:
                raise EngineFailed(f"{self.name} is still at {state} after {timeout_s} s\n{self.log_tail()}")
            time.sleep(0.05)
        return state

    def stop(self) -> None:
        """End the process; one that does not obey is killed."""
        with suppress(OSError, ValueError):
            self._send({"op": "stop"})
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()

    def _command(self, op: str, command_id: str, **fields: Any) -> "Future[dict[str, Any]]":
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._answers[command_id] = answer
        try:
            self._send({"op": op, "id": command_id} | fields)
        except (OSError, ValueError) as error:
            raise EngineFailed(f"{self.name} has ended\n{self.log_tail()}") from error
        return answer

    def _send(self, command: dict[str, Any]) -> None:
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _await(self, answer: "Future[dict[str, Any]]", timeout_s: float) -> dict[str, Any]:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise EngineFailed(f"{self.name} does not answer in {timeout_s} s\n{self.log_tail()}") from None

    def _read(self) -> None:
        """Hand out answers until the engine's output ends; what is still asked for then has failed."""
        fatal = "it ended"
        for line in self._process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(answer)
            elif "fatal" in answer:
                fatal = answer["fatal"]
            elif "progress" in answer:
                self._progress[answer["id"]](answer["progress"])
            else:
                with self._lock:
                    waiting = self._answers.pop(answer["id"])
                waiting.set_result(answer)
        with self._lock:
            waiting = [*self._answers.values(), *([] if self._ready.done() else [self._ready])]
            self._answers.clear()
        for answer in waiting:
            answer.set_exception(EngineFailed(f"{self.name}: {fatal}\n{self.log_tail()}"))


@dataclass(frozen=True)
class Request:
    """A request in flight."""

    engine: Engine
    request_id: str
    answer: "Future[dict[str, Any]]"

    def wait(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        return self.engine._await(self.answer, timeout_s)

    def abort(self) -> None:
        """End it; the answer has ``finish_reason`` ``abort`` unless it was over already."""
        self.engine._send({"op": "abort", "id": self.request_id})


def environment(options: Options) -> dict[str, str]:
    """Return the environment that one engine on shared cores needs."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",  # the threads of two engines would be bound to the same core
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if options.layout:
        variables["VLLM_KV_CACHE_LAYOUT"] = options.layout
    return os.environ | variables


PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router gives to the prefill engine."""


class Pair:
    """A prefill and a decode engine, started at once.

    Use it as a context manager.

    Args:
        prefill: how the one is started.
        decode: how the other is; None for the same.
        folder: of the model.
    """

    def __init__(self, folder: Path, prefill: Options, decode: Options | None = None) -> None:
        secret = secrets.token_hex(32)
        name = f"{prefill.model}-{secrets.token_hex(2)}"
        self.secret = secret
        self.prefill = Engine(prefill, folder, role="kv_producer", name=f"{name}-prefill", secret=secret)
        self.decode = Engine(decode or prefill, folder, role="kv_consumer", name=f"{name}-decode", secret=secret)

    def __enter__(self) -> Self:
        try:
            self.prefill.wait_ready()
            self.decode.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    def monolithic(self, prompt: Sequence[int], **named: Any) -> list[int]:
        """Return the tokens that the prefill engine makes of a prompt on its own."""
        return self.prefill.generate(prompt, **named)["tokens"]

    def ticket(self, prompt: Sequence[int], **named: Any) -> dict[str, Any]:
        """Prefill a prompt and return the ``kv_transfer_params`` that a router carries to the decode engine."""
        return self.prefill.generate(prompt, PREFILL_PARAMS, max_tokens=1, **named)["kv_transfer_params"]

    def disaggregated(self, prompt: Sequence[int], **named: Any) -> list[int]:
        """Return the tokens of a prompt that one engine prefills and the other decodes."""
        return self.decode.generate(prompt, self.ticket(prompt), **named)["tokens"]
