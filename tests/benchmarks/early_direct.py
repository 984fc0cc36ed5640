# ruff: noqa: T201 - a script prints what it finds
"""How many tickets are early if they go from engine to engine without HTTP? See ``early_tickets``.

Both engines are driven in their own processes, and a ticket is read as soon as the prefill engine has answered it::

    .venv-vllm/bin/python -m tests.benchmarks.early_direct
"""

import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvflow.tools.bench import quantile
from tests.benchmarks.beside_vllm import make_model
from tests.benchmarks.early_tickets import CONNECTORS, LENGTH
from tests.vllm import engines
from tests.vllm.engines import Nursery, Options, Pair
from tests.vllm.prompts import prompt_of

IN_FLIGHT = 16
REQUESTS = 96
EXTRA = {"lease_s": 300.0, "fence_s": 100.0, "wire_s": 100.0}

transfer_config = engines.transfer_config


def configured(options: Options, *rest: str) -> dict[str, Any] | None:
    """Return what ``--kv-transfer-config`` says, for either connector of ours."""
    config = transfer_config(replace(options, connector="KVFlowConnector"), *rest)
    module = dict(CONNECTORS.values())[options.connector]
    return {**(config or {}), "kv_connector": options.connector, "kv_connector_module_path": module}


def measure(held: str, ranks: int, model: Path, nursery: Nursery) -> str:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decode.jsonl"
        options = Options("llama", connector=CONNECTORS[held][0], extra=EXTRA)
        sides = replace(options, ranks=ranks), replace(options, extra={**EXTRA, "log_file": str(log)})
        with Pair(model, *sides, nursery=nursery) as pair, ThreadPoolExecutor(IN_FLIGHT) as pool:

            def send(number: int) -> None:
                prompt = prompt_of(LENGTH, f"direct {number}")
                answer = pair.decode.generate(prompt, pair.ticket(prompt), max_tokens=4)
                assert answer["finish_reason"] == "length", answer

            def records() -> list[dict[str, Any]]:
                read = map(json.loads, log.read_text().splitlines())
                return [each for each in read if each["event"] == "transfer.completed"]

            list(pool.map(send, range(REQUESTS, REQUESTS + IN_FLIGHT)))  # everything is warm
            skipped = len(records())
            list(pool.map(send, range(REQUESTS)))
            found = records()[skipped:]
    early = sum(each["early"] > 0 for each in found)
    moved, vain = (sum(each[name] for each in found) / 2**20 for name in ("nbytes", "early_bytes"))
    took_ms = sorted(1e3 * each["total_s"] for each in found)
    return (
        f"| {held} | {ranks} | {len(found)} | {early} ({early / len(found):.0%}) | {moved:.1f} "
        f"| {vain:.1f} ({vain / moved:.0%}) | {statistics.median(took_ms):.1f} | {quantile(took_ms, 0.9):.1f} |"
    )


def main() -> int:
    engines.transfer_config = configured
    model = make_model("llama")
    print("| a lease is held | ranks of prefill | transfers | early | MiB moved | MiB read in vain | p50, ms | p90 |")
    print("|---|---|---|---|---|---|---|---|")
    with Nursery() as nursery:
        for ranks in (1, 2):
            for held in reversed(CONNECTORS):
                print(measure(held, ranks, model, nursery), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
