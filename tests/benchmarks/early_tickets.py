# ruff: noqa: T201 - a script prints what it finds
"""How many tickets are early under load, and what does that cost?

Two ``vllm serve``, prefill and decode, behind ``kvflow proxy``, with so many requests in flight that the prefill engine
always computes others when a ticket leaves it. Each is asked with leases that are held when the ticket is signed, and
with leases that are held by the engine's next step. A ticket is early if it is read before its lease is held. What was
read by then is read again. From the root of the repository, with the interpreter of an environment that has vLLM::

    .venv-vllm/bin/python -m tests.benchmarks.early_tickets
    .venv-vllm/bin/python -m tests.benchmarks.early_tickets --in-flight 16 --requests 160 --rounds 2
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflow.tools.bench import quantile
from tests.benchmarks.beside_vllm import make_model
from tests.ports import free_port
from tests.vllm.engines import ENVIRONMENT, OUT, PYTHON
from tests.vllm.prompts import prompt_of
from tests.vllm.servers import LOGS, PATIENCE, Server, Together

LENGTH = 700
TOKENS = 16
ANSWER_S = 600.0
CONNECTORS = {
    "at once": ("KVFlowConnector", "kvflow.integrations.vllm"),
    "with the next step": ("StepOnlyConnector", "tests.benchmarks.step_only"),
}


@dataclass(frozen=True)
class Round:
    """What a round of requests has taken.

    Attributes:
        ttft_s: of each request, from the client's request to its first chunk.
        records: of the transfers.
        failed: requests without an answer.
    """

    ttft_s: list[float]
    records: list[dict[str, Any]]
    failed: int


class Servers(Together):
    """A pair of servers and a proxy."""

    def __init__(self, held: str, model: Path, ranks: int) -> None:
        super().__init__()
        self.held, self.model, self.ranks = held, str(model), ranks

    def start(self) -> Iterable[Server]:
        """See ``Together.start``."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = folder / "kv_consumer.jsonl"
        multiprocess = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        environment = {**os.environ, **multiprocess, "KVFLOW_CLUSTER_SECRET": secrets.token_hex(32)}
        servers = [self._start(role, folder, environment) for role in ("kv_producer", "kv_consumer")]
        urls = [server.url for server in servers]
        port = free_port()
        kvflow = f"{PYTHON} -c 'from kvflow.tools.cli import main; raise SystemExit(main())'"
        proxy = f"{kvflow} proxy --prefill {urls[0]} --decode {urls[1]} --listen 127.0.0.1:{port}"
        self.proxy = self._started(Server("early-proxy", proxy, port, environment, folder))
        return *servers, self.proxy

    def ask(self, name: str, in_flight: int, requests: int) -> Round:
        """Send requests, so many at a time, and return what they took."""
        before = len(self._records())
        gate = threading.Semaphore(in_flight)

        def send(number: int) -> float | None:
            body = {"model": self.model, "prompt": prompt_of(LENGTH, f"{name} {number}"), "max_tokens": TOKENS}
            data = json.dumps({**body, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
            asked = urllib.request.Request(
                f"{self.proxy.url}/v1/completions", data, {"Content-Type": "application/json"}
            )
            with gate:
                started = time.monotonic()
                try:
                    with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
                        answer.readline()
                        first = time.monotonic() - started
                        return first if b"[DONE]" in answer.read() else None
                except OSError:
                    return None

        with ThreadPoolExecutor(in_flight) as pool:
            taken = list(pool.map(send, range(requests)))
        ttft_s = [each for each in taken if each is not None]
        return Round(ttft_s, self._records()[before:], requests - len(ttft_s))

    def _records(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        records = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [each for each in records if each["event"].startswith("transfer.")]

    def _start(self, role: str, folder: Path, environment: dict[str, str]) -> Server:
        connector, module = CONNECTORS[self.held]
        port = free_port()
        config = {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": role,
            "kv_connector_extra_config": {"log_file": str(folder / f"{role}.jsonl"), **PATIENCE},
        }
        ranks = f"--tensor-parallel-size {self.ranks}" if role == "kv_producer" else ""
        shell = (
            f"{PYTHON} -m tests.vllm.vllm_command serve {self.model} --port {port} --enforce-eager {ranks} "
            f"--max-num-seqs 16 --kv-transfer-config '{json.dumps(config)}'"
        )
        return self._started(Server(f"early-{role}", shell, port, environment, folder))

    def _started(self, server: Server) -> Server:
        self._stack.callback(server.stop)
        return server


def row(held: str, rounds: list[Round]) -> str:
    """Return what was found as a row of a table."""
    records = [record for each in rounds for record in each.records if record["event"] == "transfer.completed"]
    failed = sum(each.failed for each in rounds) + sum(len(each.records) for each in rounds) - len(records)
    early = [record for record in records if record["early"]]
    moved, vain = (sum(record[name] for record in records) for name in ("nbytes", "early_bytes"))
    ttft_ms = sorted(1e3 * each for round_ in rounds for each in round_.ttft_s)
    waited_ms = [1e3 * record["total_s"] for record in records]
    return (
        f"| {held} | {len(records)} | {failed} | {len(early)} ({len(early) / len(records):.0%}) | {moved / 2**20:.1f} "
        f"| {vain / 2**20:.1f} ({vain / moved:.0%}) | {statistics.median(waited_ms):.1f} "
        f"| {quantile(sorted(waited_ms), 0.9):.1f} | {statistics.median(ttft_ms):.0f} | {quantile(ttft_ms, 0.9):.0f} |"
    )


HEAD = (
    "| a lease is held | transfers | failed | early | MiB moved | MiB read in vain | a transfer p50, ms | p90 "
    "| first token p50, ms | p90 |\n|---|---|---|---|---|---|---|---|---|---|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.early_tickets")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at a time")
    parser.add_argument("--requests", type=int, default=96, help="requests of a round")
    parser.add_argument("--rounds", type=int, default=2, help="how often the servers are started, in turns")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of the prefill engine")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    model = make_model("llama")
    found: dict[str, list[Round]] = {held: [] for held in CONNECTORS}
    for number in range(chosen.rounds):
        for held in list(CONNECTORS)[:: 1 if number % 2 else -1]:
            with Servers(held, model, chosen.ranks) as servers:
                servers.ask(f"warm {number}", chosen.in_flight, chosen.in_flight)
                found[held].append(servers.ask(f"round {number}", chosen.in_flight, chosen.requests))
            print(row(held, found[held][-1:]), file=sys.stderr, flush=True)
    print(f"{chosen.in_flight} in flight, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; logs in {OUT}")
    print(HEAD, *(row(held, rounds) for held, rounds in found.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
