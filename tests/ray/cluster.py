"""What docs/howto/routers.md tells its reader to do, done on this host: two nodes of Ray, and the application."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port
from tests.vllm.engines import PAUSE_S, PYTHON, SERVERS_ENVIRONMENT, EngineFailed, log_tail, look, records
from tests.vllm.howto import ROUTERS_PAGE, blocks
from tests.vllm.pairs import await_all
from tests.vllm.servers import LOGS, PATIENCE, Server, Together, fetch

MODEL = "tiny"
NODES = ("127.0.0.2", "127.0.0.3")
"""Addresses of this host. kvflow listens at neither by itself, and Ray takes 127.0.0.1 for the outer address."""

START_S = 900.0
"""Ray and four engines import vLLM eight times."""
STOP_S = 60.0

NODE_OPTIONS = "--block --num-cpus=5 --object-store-memory=80000000"
"""Beside those of the page: nothing outlives the command, and little memory is taken. Each node has room for two
replicas, of two CPUs each, and one of them for the ingress.
"""

SLOW = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_LLM_DEFAULT_HEALTH_CHECK_TIMEOUT_S": "300",
}
"""Patience with a busy machine."""


def command(*words: str) -> str:
    """Return the one block of the page's shell commands that has all of these words."""
    [found] = [block for block in blocks("sh", ROUTERS_PAGE) if all(word in block for word in words)]
    return found.strip()


def application(model: Path, log_file: Path) -> str:
    """Return the page's application for a model in a folder, on CPUs, with records elsewhere."""
    [text] = blocks("python", ROUTERS_PAGE)
    for written, meant in {
        '"MODEL"}': f'"{MODEL}", "model_source": "{model}"}}',
        '"/tmp/kvflow.jsonl"': f'"{log_file}", {json.dumps(PATIENCE)[1:-1]}',
        "engine_kwargs={": 'accelerator_config={"kind": "cpu"},\n        engine_kwargs={"enforce_eager": True,',
    }.items():
        assert written in text
        text = text.replace(written, meant)
    return text


class Cluster(Together):
    """Two nodes with the page's application, and Ray's HTTP proxy.

    Args:
        model: its folder.
        folder: for the application and the records.
    """

    model = MODEL

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__()
        self.log_file = folder / "kvflow.jsonl"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._metrics_ports = {node: free_port() for node in NODES}
        self._port = port
        self._folder = folder
        (folder / "app.py").write_text(application(model, self.log_file))

    def records(self, event: str = "") -> list[dict[str, Any]]:
        """Return the records that the replicas of both nodes have written, of one event or of all."""
        return records(self.log_file, event)

    def wait_records(self, event: str, number: int) -> list[dict[str, Any]]:
        """Return the records of one event as soon as there are so many."""
        return await_all(lambda: self.records(event), number)

    def metric(self, name: str) -> float:
        """Return the sum of a metric that Ray serves to Prometheus, over the replicas of both nodes."""
        pages = [fetch(f"http://{node}:{port}/metrics").decode() for node, port in self._metrics_ports.items()]
        samples = (each for page in pages for family in text_string_to_metric_families(page) for each in family.samples)
        return sum(each.value for each in samples if each.name == name)

    def wait_metric(self, name: str, value: float) -> None:
        """Wait until a metric has a value: Ray collects them every few seconds."""
        look(lambda: self.metric(name), lambda found: found == value, lambda found: f"{name} is {found}, not {value}")

    def start(self) -> Iterable[Server]:
        """See ``Together.start``. It returns when all are ready."""
        # Ray's sockets lie below it, and the path of a socket has 107 bytes at most.
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        head = f"{NODES[0]}:{free_port()}"
        driver = environment() | {"RAY_ADDRESS": head}
        self._run(command("kvflow keys secret"), driver)
        first = f"{command('ray start', '--head')} --port={head.rpartition(':')[2]} --temp-dir={scratch}"
        first += f" --include-dashboard=false --ray-client-server-port={free_port()}"
        other = command("ray start", "--address").replace("HEAD:6379", head)
        for name, shell, node in zip(("head", "node"), (first, other), NODES, strict=True):
            own = f"{NODE_OPTIONS} --node-ip-address={node} --metrics-export-port={self._metrics_ports[node]}"
            own += f" --dashboard-agent-listen-port={free_port()}"
            self._launch_node(name, f"{shell} {own}")
        # Another port than that of the page, and one proxy: both nodes are this host.
        self._run(f"serve start --http-port {self._port} --proxy-location HeadOnly", driver)
        self._launch("serve", command("serve run"), driver, "is ready at")
        return ()

    def _run(self, shell: str, environment: Mapping[str, str]) -> None:
        """Run a command to its end."""
        subprocess.run(["bash", "-ec", shell], cwd=self._folder, env=dict(environment), check=True, timeout=START_S)

    def _launch_node(self, name: str, shell: str) -> None:
        """Start a node. Ray gives it 30 s, which is not always enough on a busy machine: then again."""
        attempts = 4
        while attempts:
            attempts -= 1
            try:
                self._launch(name, shell, environment(), "Ray runtime started")
                return
            except EngineFailed as error:
                if not attempts or "timed out during startup" not in str(error):
                    raise

    def _launch(self, name: str, shell: str, environment: Mapping[str, str], ready: str) -> None:
        """Start a command of the page, and wait until it says that it is ready."""
        log = LOGS / f"ray-{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-ec", shell.replace("ray start", "exec ray start").replace("serve run", "exec serve run")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env=dict(environment),
                start_new_session=True,
            )
        self._stack.callback(stop, process)
        deadline = time.monotonic() + START_S
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                stop(process)
                raise EngineFailed(f"{name} is not ready\n{log_tail(log)}")
            time.sleep(PAUSE_S)


def environment() -> dict[str, str]:
    """Return the environment of what the page starts, but for what a node has alone."""
    paths = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}
    return {**os.environ, **SERVERS_ENVIRONMENT, **SLOW, **paths, "RAY_USAGE_STATS_ENABLED": "0"}


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command and wait for it: Ray's end what they have started. One that does not obey is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
