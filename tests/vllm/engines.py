"""Two vLLM engines as child processes, and what a router does between them."""

import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.ports import free_port

from .tiny_models import CONTEXT

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVFLOW_TEST_VLLM_PYTHON", sys.executable)
"""The interpreter of an environment with vLLM."""
OUT = ROOT / os.environ.get("KVFLOW_TEST_VLLM_OUT", "out/vllm")
"""Models and logs."""
START_S = 480.0
"""An engine is ready in 10 s when nothing else runs."""
PROGRAM_S = 850.0
ANSWER_S = 120.0
STOP_S = 60.0
PAUSE_S = 0.05
"""Between two looks at something that will come."""

T = TypeVar("T")

SERVERS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all engines of a host are bound to the same core
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # no AMX: see plain_cpu/sitecustomize.py
    "PYTHONPATH": f"{ROOT / 'tests/vllm/plain_cpu'}{os.pathsep}{ROOT}",
}
"""Of every server and engine, from before vLLM is imported."""
ENVIRONMENT = SERVERS_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Of engines that are in a process of ours."""

KVFLOW = os.environ.get("KVFLOW_TEST_VLLM_CONNECTOR", "KVFlowConnector")
"""What is proved. vLLM's own passes what does not speak of tickets, which is how the proofs are proved."""
NIXL = "NixlConnector"
DISK = "ExampleConnector"
"""It keeps prompts in files: the one connector for offloading that runs without a GPU."""

DTYPES = {"granite": "float32"}
"""Models whose tokens differ in bfloat16 when the last one of a prompt is computed alone."""
LAST_TOKEN_ALONE = ("qwen3next",)
"""Models whose tokens differ thus, too, and that cannot compute in float32: alone, they compute it in its own step."""
LOG_TAIL = 6000


class EngineFailed(AssertionError):
    """An engine has ended, or does not answer; the message has the end of its log."""


def run_with_vllm(*words: str, python: str = PYTHON) -> str:
    """Run a program of Python in a process that may import vLLM, and return what it prints."""
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert not done.returncode, done.stderr[-LOG_TAIL:]
    return done.stdout


def look(
    find: Callable[[], T], wanted: Callable[[T], object], missing: Callable[[T], str], patience_s: float = ANSWER_S
) -> T:
    """Look until what is found is as wanted, and return it.

    Raises:
        EngineFailed: it is not in time; the message is what ``missing`` says of the last look.
    """
    deadline = time.monotonic() + patience_s
    while not wanted(found := find()):
        if time.monotonic() > deadline:
            raise EngineFailed(f"{missing(found)} after {patience_s} s")
        time.sleep(PAUSE_S)
    return found


def log_tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-LOG_TAIL:]


def records(path: Path, event: str = "", having: str = "") -> list[dict[str, Any]]:
    """Return the records of a log file, of one event or of all, whose text has a part; none without the file."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if event in line and having in line]
    return [record for record in found if event in ("", record["event"])]


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
        ranks: that divide the heads, a process each if there are several: ``tensor_parallel_size``.
        stages: that divide the layers: ``pipeline_parallel_size``; each has ``ranks``.
        dtype: that the model computes in; empty for the usual one.
        extra: ``kv_connector_extra_config`` beside what the connector needs.
        llm: arguments of ``vllm.LLM`` beside the usual ones.
        served: module of the engine's process whose ``Served`` obeys commands; empty for the usual.
        variables: of its environment, beside the usual ones.
        beside: other children of a ``MultiConnector``: name -> ``kv_connector_extra_config``.
        last: whether they stand before ``connector`` there.
        module_path: ``kv_connector_module_path``; empty leaves it to the entry point.
    """

    model: str = "llama"
    connector: str = KVFLOW
    block_size: int = 0
    layout: str = ""
    prefix_caching: bool = False
    failure_policy: str = "fail"
    ranks: int = 1
    stages: int = 1
    dtype: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    served: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last: bool = False
    module_path: str = ""

    @property
    def num_ranks(self) -> int:
        """Processes of all stages."""
        return self.ranks * self.stages

    @property
    def speaks_kvflow(self) -> bool:
        """Whether the connector is kvflow's, by whatever name."""
        return self.connector == "KVFlowConnector" or self.module_path.startswith("kvflow.")


def disk_of(engine_id: str) -> Path:
    """Return the folder in which ``DISK`` keeps the prompts of one engine."""
    return OUT / "disk" / engine_id


def transfer_config(options: Options, role: str, engine_id: str, secret: str) -> dict[str, Any] | None:
    """Return what ``--kv-transfer-config`` says."""
    if not options.connector:
        return None
    own = {"cluster_secret": secret, "bind": "tcp://127.0.0.1:0"} if options.speaks_kvflow else {}
    config = {
        "kv_connector": options.connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": own | options.extra,
    }
    if options.module_path:
        config["kv_connector_module_path"] = options.module_path
    if options.beside:
        others = [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}
            for name, extra in options.beside.items()
        ]
        for other in others:
            if other["kv_connector"] == DISK:
                other["kv_connector_extra_config"]["shared_storage_path"] = str(disk_of(engine_id))
        children = [*others, config] if options.last else [config, *others]
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"connectors": children},
        }
    return config | {"kv_load_failure_policy": options.failure_policy, "engine_id": engine_id}


class Engine:
    """A child process with one engine.

    Use it as a context manager: leaving it ends the process. ``folder`` is the model's, and ``name`` the engine's id.
    """

    def __init__(
        self, options: Options, folder: Path, *, role: str, name: str, secret: str, nursery: "Nursery"
    ) -> None:
        self.options = options
        self.name = name
        self.free_blocks = 0
        self.log = OUT / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[str, Future[dict[str, Any]]] = {}
        self._progress: dict[str, Callable[[int], None]] = {}
        self._ready: Future[dict[str, Any]] = Future()
        llm = {
            "model": str(folder),
            "dtype": options.dtype or DTYPES.get(options.model, "bfloat16"),
            "tensor_parallel_size": options.ranks,
            "pipeline_parallel_size": options.stages,
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
        if options.served:
            settings["served"] = options.served
        wanted = {"root": str(ROOT), "log": str(self.log), "environment": environment(options), "settings": settings}
        self._connection = nursery.connect()
        self._commands = self._connection.makefile("w")
        self._answered = self._connection.makefile("r")
        self._send(wanted)
        self.pid = json.loads(self._answered.readline())["pid"]
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._reader.is_alive()

    def log_tail(self) -> str:
        return log_tail(self.log)

    def reason(self, request_id: str) -> str:
        """Return the code of the error that the connector has logged for a request; empty if none."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if f"request {request_id}-" in line]
        codes = re.findall(r"\[([a-z_]+)\]", lines[-1]) if lines else []
        return codes[0] if codes else ""

    def wait_ready(self) -> "Engine":
        """Wait until it serves, and note how many blocks are free then."""
        self._await(self._ready, START_S)
        self.free_blocks = int(self.state()["free_blocks"])
        return self

    def submit(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        *,
        max_tokens: int = 32,
        request_id: str | None = None,
        chunk: int = 0,
        salt: str = "",
        n: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> "Request":
        """Start a request.

        Args:
            prompt: token ids.
            params: ``kv_transfer_params``.
            max_tokens: how many are generated.
            request_id: unique in this engine; chosen here if None.
            chunk: where nothing else runs, the tokens of a prompt that one step computes; 0 leaves it to vLLM.
            salt: ``cache_salt``; empty for none.
            n: samples; one is of the likeliest tokens, several are drawn.
            progress: called with the number of tokens after each step, on a thread of the engine's.
        """
        request_id = request_id or f"{self.name}-{next(self._ids)}"
        if progress is not None:
            self._progress[request_id] = progress
        fields = {"prompt": list(prompt), "max_tokens": max_tokens, "kv_transfer_params": params, "chunk": chunk}
        answer = self._command("generate", request_id, **fields, salt=salt, n=n, progress=progress is not None)
        return Request(self, request_id, answer)

    def generate(self, prompt: Sequence[int], params: Mapping[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        """Run a request to its end and return the engine's answer: see ``engine_process``."""
        return self.submit(prompt, params, **named).wait()

    def ticket(self, prompt: Sequence[int], **named: Any) -> dict[str, Any]:
        """Prefill a prompt and return the ``kv_transfer_params`` that a router carries to a decode engine."""
        params: dict[str, Any] = self.generate(prompt, PREFILL_PARAMS, max_tokens=1, **named)["kv_transfer_params"]
        return params

    def obey(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a command of its process, and wait for the answer, which must be no error."""
        answer = self._await(self._command(op, f"{op}-{next(self._ids)}", **fields), ANSWER_S)
        assert "error" not in answer, answer["error"]
        return answer

    def state(self) -> dict[str, Any]:
        """Return the blocks and requests of the engine, and the descriptors of reads since the last call."""
        return self.obey("state")

    def ranks(self, *, broken: int | None = None, held: tuple[int, str] | None = None) -> list[dict[str, Any]]:
        """Return what each rank says of itself: see ``rank_process.describe``.

        The next read of the rank ``broken`` fails before NIXL has seen it; a read of the rank ``held`` waits.
        """
        return list(self.obey("ranks", broken=broken, held=held)["ranks"])

    def sabotage(self, method: str, error: str) -> None:
        """Have the next call of a method of kvflow's scheduler side raise an exception of Python's."""
        self.obey("sabotage", method=method, error=error)

    def reset_prefix_cache(self, *, running: bool = False, external: bool = False) -> bool:
        """Return whether vLLM has reset its cache; with ``external`` also the connector, with ``running`` by force."""
        return bool(self.obey("reset", running=running, external=external)["reset"])

    def forget(self) -> None:
        """Forget the prompts that ``DISK`` keeps."""
        shutil.rmtree(disk_of(self.name), ignore_errors=True)

    def sleep(self, *, beneath: bool = False) -> None:
        """Have it sleep, or ``beneath`` only its workers, whatever its scheduler waits for, which may refuse."""
        self.obey("sleep", beneath=beneath)

    def wake(self, *, beneath: bool = False) -> None:
        self.obey("wake", beneath=beneath)

    def wait_state(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask until the state is as wanted."""
        return look(
            self.state, condition, lambda state: f"{self.log_tail()}\n{self.name} is still at {state}", timeout_s
        )

    def settle(self, timeout_s: float = ANSWER_S) -> None:
        """Wait until it keeps no request, and every block is free that was free at the start."""
        self.wait_state(lambda state: state["held"] == 0 and state["free_blocks"] == self.free_blocks, timeout_s)

    def stop(self) -> None:
        """End the process; one that does not obey is killed."""
        with suppress(OSError, ValueError):
            self._send({"op": "stop"})
        self._reader.join(STOP_S)
        if self._reader.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            self._reader.join(STOP_S)
        for end in (self._commands, self._answered, self._connection):
            with suppress(OSError):
                end.close()
        self.forget()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join(STOP_S)
        self.stop()

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
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()

    def _await(self, answer: "Future[dict[str, Any]]", timeout_s: float) -> dict[str, Any]:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise EngineFailed(f"{self.name} does not answer in {timeout_s} s\n{self.log_tail()}") from None

    def _read_answers(self) -> Iterator[dict[str, Any]]:
        """Yield answers until the engine's output ends; if it was killed with a command unread, that is a reset."""
        with suppress(ConnectionResetError):
            for line in self._answered:
                yield json.loads(line)

    def _read(self) -> None:
        """Hand out answers until the engine's output ends; what is still asked for then has failed."""
        fatal = "it ended"
        for answer in self._read_answers():
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


class Nursery:
    """The process that forks engines, started by the first who needs it unless the environment names another.

    Use it as a context manager.
    """

    def __init__(self, python: str = PYTHON) -> None:
        self._python = python
        self._log = OUT / "logs" / f"nursery-{Path(python).parents[1].name.lstrip('.')}.log"
        self._stack = ExitStack()
        self._path = os.environ.get("KVFLOW_TEST_VLLM_NURSERY", "") if python == PYTHON else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self) -> socket.socket:
        """Return a connection, which is an engine's from now on."""
        if not self._path:
            self._path = self._start()
        connection = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + START_S
        while connection.connect_ex(self._path) != 0:
            if time.monotonic() > deadline:
                raise EngineFailed(f"vLLM is not imported after {START_S} s; see {self._log}")
            time.sleep(0.1)
        return connection

    def _start(self) -> str:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        path = f"{folder}/nursery"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        log = self._stack.enter_context(self._log.open("wb"))
        self._stack.enter_context(
            subprocess.Popen(
                [self._python, "-m", "tests.vllm.nursery", path],
                stdin=subprocess.PIPE,  # closed on the way out, which ends it
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
            )
        )
        return path


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
    """Return what one engine's environment has that another's has not."""
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    if options.layout:
        variables["VLLM_KV_CACHE_LAYOUT"] = options.layout
    return ENVIRONMENT | variables | dict(options.variables)


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
    """A prefill and a decode engine, started at once; the latter like the former unless it is told otherwise.

    Use it as a context manager.
    """

    def __init__(
        self,
        folder: Path,
        prefill: Options,
        decode: Options | None = None,
        *,
        nursery: Nursery,
        decode_nursery: Nursery | None = None,
    ) -> None:
        secret = secrets.token_hex(32)
        name = f"{prefill.model}-{secrets.token_hex(2)}"
        self.secret = secret
        self.prefill = Engine(
            prefill, folder, role="kv_producer", name=f"{name}-prefill", secret=secret, nursery=nursery
        )
        self.decode = Engine(
            decode or prefill,
            folder,
            role="kv_consumer",
            name=f"{name}-decode",
            secret=secret,
            nursery=decode_nursery or nursery,
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Wait until both are ready."""
        try:
            self.prefill.wait_ready()
            self.decode.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    @property
    def alive(self) -> bool:
        return self.prefill.alive and self.decode.alive

    def settle(self) -> None:
        """Wait until neither engine keeps a request, and every block is free that was free at the start."""
        self.prefill.settle()
        self.decode.settle()

    def monolithic(self, prompt: Sequence[int], **named: Any) -> list[int]:
        """Return the tokens that the prefill engine makes of a prompt on its own."""
        return self.alone(self.prefill, prompt, **named)

    def alone(self, engine: Engine, prompt: Sequence[int], **named: Any) -> list[int]:
        """Return the tokens that one of the engines makes of a prompt on its own."""
        if engine.options.model in LAST_TOKEN_ALONE:
            named.setdefault("chunk", len(prompt) - 1)
        return engine.generate(prompt, **named)["tokens"]

    def ticket(self, prompt: Sequence[int], **named: Any) -> dict[str, Any]:
        """See ``Engine.ticket``."""
        return self.prefill.ticket(prompt, **named)

    def disaggregated(self, prompt: Sequence[int], **named: Any) -> list[int]:
        """Return the tokens of a prompt that one engine prefills and the other decodes, without computing it itself."""
        answer = self.decode.generate(prompt, self.ticket(prompt), **named)
        assert not (reason := self.decode.reason(answer["id"])), reason
        return answer["tokens"]
