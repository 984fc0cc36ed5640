"""``vllm serve`` on both sides, one server alone, and a proxy: what the howto tells to start, as processes."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from .engines import (
    ANSWER_S,
    OUT,
    PAUSE_S,
    PYTHON,
    ROOT,
    SERVERS_ENVIRONMENT,
    START_S,
    EngineFailed,
    free_port,
    log_tail,
    look,
    records,
)
from .howto import DECODE_PORT, PAGE, PREFILL_PORT, PROXY_PORT, command

LOGS = OUT / "logs"
STOP_S = 30.0

ROUTERS = Path(os.environ.get("KVFLOW_TEST_ROUTERS", ROOT / ".venv-routers"))
"""An environment with what requirements-routers.txt names."""

RUNNING, WAITING, USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"

PROGRAMS = {
    # As the page says for servers without a GPU: compilation would take longer than all the rest.
    "vllm": f'exec {shlex.quote(PYTHON)} -m tests.vllm.vllm_command "$@" --enforce-eager',
    "kvflow": f'exec {shlex.quote(PYTHON)} -c "import sys; from kvflow.tools.cli import main; sys.exit(main())" "$@"',
    **{name: f'exec {shlex.quote(str(ROUTERS / "bin" / name))} "$@"' for name in ("vllm-router", "smg")},
}
"""What the pages' commands start."""

EXPORTED = ("KVFLOW_CLUSTER_SECRET", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
"""Variables that the page exports."""

PATIENCE = {"lease_s": 300, "connect_s": 10, "handshake_s": ANSWER_S, "fence_s": ANSWER_S, "wire_s": ANSWER_S}
"""Settings that the page leaves as they are: on a busy machine a step of a tiny model takes seconds."""


def fetch(url: str | urllib.request.Request) -> bytes:
    """Return what a server answers.

    Raises:
        OSError: it answers with an error, or not at all.
    """
    with urllib.request.urlopen(url, timeout=STOP_S) as answer:
        content: bytes = answer.read()
        return content


class Server:
    """A process that serves HTTP; ``name`` is for its log."""

    def __init__(self, name: str, shell: str, port: int, environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = LOGS / f"serve-{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {shell}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                fetch(f"{self.url}/health")
                return
            if not self.alive or time.monotonic() > deadline:
                raise EngineFailed(f"{self.name} does not serve\n{log_tail(self.log)}")
            time.sleep(PAUSE_S)

    def stop(self) -> int:
        """End it, and what it has started, and return its exit status."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        return self.kill()

    def kill(self) -> int:
        """End it, and what it has started, at once; return its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(STOP_S)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series that have these labels; 0 if there is none."""
        return sum(value for series, value in self._series(name) if labels.items() <= series.items())

    def counted(self, name: str, label: str) -> set[str]:
        """Return the values of a label for which a metric is not 0."""
        return {series[label] for series, value in self._series(name) if value}

    def _series(self, name: str) -> list[tuple[dict[str, str], float]]:
        families = text_string_to_metric_families(fetch(f"{self.url}/metrics").decode())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return [(each.labels, each.value) for each in samples]

    def wait_metric(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has a value: vLLM tells of a step after the step."""
        look(
            lambda: self.metric(name, **labels),
            lambda found: found == value,
            lambda found: f"{self.name}: {name} {labels} is {found} and not {value}",
        )

    def wait_idle(self) -> None:
        """Wait until no request runs or waits, and no block is taken, by an offer's lease either."""
        for name in (RUNNING, WAITING, USAGE):
            self.wait_metric(0, name)

    def wait_logged(self, text: str) -> None:
        """Wait until it has logged a text."""
        logged = partial(self.log.read_text, errors="replace")
        look(logged, lambda log: text in log, lambda _: f"{self.name} has not logged {text!r}", START_S)


class Together:
    """Processes that start and stop together, also if one cannot start. Use it as a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            for server in self.start():
                server.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> Iterable[Server]:
        """Start all of them; return those that are not ready yet."""
        raise NotImplementedError


class Deployment(Together):
    """A pair of servers, a proxy before them, and one server alone.

    Args:
        model: its folder.
        folder: for programs and records.

    Attributes:
        page: whose commands start them.
        flags: of both servers, behind those of the page.
        has_alone: whether there is a server alone.
        ran: the blocks of pages that have run, in the order in which they ran first.
    """

    page = PAGE
    flags = ""
    has_alone = True

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__()
        self.ran = [command("export", "kvflow keys"), command("export", "VLLM_CPU")]
        self.folder = folder
        self.model = str(model)
        self.ports = {port: free_port() for port in (PREFILL_PORT, DECODE_PORT, PROXY_PORT)}
        self.alone_port = free_port()
        self._environment = self._make_environment()
        exported = self.run("\n".join([*self.ran, f"printenv {' '.join(EXPORTED)}"])).split()
        self._environment |= dict(zip(EXPORTED, exported, strict=True))

    def start(self) -> Iterable[Server]:
        """See ``Together.start``."""
        self.start_prefill()
        self.decode = self._start("decode", f"{self._page('vllm serve', 'kv_consumer')} {self.flags}", DECODE_PORT)
        self.proxy = self._start("proxy", f"{self._page('kvflow proxy')} --listen 127.0.0.1:8000", PROXY_PORT)
        if not self.has_alone:
            return self.prefill, self.decode, self.proxy
        self.alone = self.serve("alone", f"vllm serve {self.model} --port {self.alone_port}", self.alone_port)
        return self.prefill, self.decode, self.proxy, self.alone

    def start_prefill(self) -> None:
        """Start the server that prefills, for the first time or again; it is not ready yet."""
        self.prefill = self._start("prefill", f"{self._page('vllm serve', 'kv_producer')} {self.flags}", PREFILL_PORT)

    def restart_prefill(self) -> None:
        """Start it again, and wait until it is ready."""
        self.start_prefill()
        self.prefill.wait_ready()

    def settle(self) -> None:
        """Wait until both servers are idle."""
        self.prefill.wait_idle()
        self.decode.wait_idle()

    def start_second_prefill(self, **settings: Any) -> Server:
        """Start one more server that prefills, with further settings of the connector."""
        port, further = free_port(), "".join(f"{json.dumps(key)}: {json.dumps(settings[key])}, " for key in settings)
        shell = command("vllm serve", "kv_producer").replace('_config": {', f'_config": {{{further}')
        server = self.serve("second", self.fitted(shell, {PREFILL_PORT: port}), port)
        server.wait_ready()
        return server

    def fitted(self, text: str, ports: Mapping[int, int] = {}) -> str:
        """Return a text of a page with this model, with ports that are free, and with more patience.

        Args:
            text: of the page.
            ports: port of the page -> another one than this deployment's own.
        """
        free = {**self.ports, **ports}
        known = "|".join(map(str, free))
        moved = re.sub(rf"(?<=:)({known})\b|(?<=--port )({known})\b", lambda found: str(free[int(found[0])]), text)
        patient = moved.replace('_config": {', f'_config": {{{json.dumps(PATIENCE)[1:-1]}, ')
        return patient.replace("MODEL", self.model)

    def run(self, shell: str, ports: Mapping[int, int] = {}) -> str:
        """Run commands of a page, fitted, and return what they print."""
        done = subprocess.run(
            ["bash", "-ec", self.fitted(shell, ports)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._environment,
            timeout=START_S,
            check=True,
        )
        return done.stdout

    def records(self, side: str) -> list[dict[str, Any]]:
        """Return the records that one side's ``log_file`` has."""
        return records(self.folder / f"{side}.jsonl")

    def _page(self, *words: str) -> str:
        """Return a command of the page that is about to run, and note its block."""
        block = command(*words, page=self.page)
        if block not in self.ran:
            self.ran.append(block)
        return block

    def _start(self, name: str, shell: str, port: int) -> Server:
        return self.serve(name, self.fitted(shell), self.ports[port])

    def serve(self, name: str, shell: str, port: int) -> Server:
        """Start a server that ends with the deployment."""
        server = Server(name, shell, port, self._environment, self.folder)
        self._stack.callback(server.stop)
        return server

    def _make_environment(self) -> dict[str, str]:
        programs = self.folder / "bin"
        programs.mkdir()
        LOGS.mkdir(parents=True, exist_ok=True)
        for name, script in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        paths = {"PATH": f"{programs}:{os.environ['PATH']}"}
        return {**os.environ, **SERVERS_ENVIRONMENT, **paths, "VLLM_SERVER_DEV_MODE": "1"}
