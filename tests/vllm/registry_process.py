"""What vLLM's registry of connectors and its metrics say of kvflow: ``python -m tests.vllm.registry_process``.

A process of its own, because plugins and modules are loaded once in a process. It prints one JSON object.
"""

import dataclasses
import json
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm import plugins
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvflow.integrations.vllm.messages import empty_counters

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
DURATIONS = ((0.004, 0.5), (0.02, 0.001), (0.3, 7.0))
"""Seconds of three transfers: inside posting calls, and behind them."""


def load_plugins(allowed: str | None) -> None:
    """Load plugins as a new process of vLLM does."""
    os.environ.pop("VLLM_PLUGINS", None)
    if allowed is not None:
        os.environ["VLLM_PLUGINS"] = allowed
    plugins.plugins_loaded = False
    plugins.load_general_plugins()


def found(name: str, module_path: str | None = None) -> str:
    """Return the class that vLLM finds by a name, or why it finds none."""
    config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module_path)
    try:
        cls = KVConnectorFactory.get_connector_class(config)
    except ValueError as error:
        return str(error)
    return f"{cls.__module__}.{cls.__name__}"


def metrics(cls: type[Any], registry: CollectorRegistry) -> Any:
    """Return a class of metrics that registers its own there."""
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return cls(SimpleNamespace(kv_transfer_config=None), types, LABELS, ENGINES)


def served(registry: CollectorRegistry) -> list[str]:
    """Return the lines of ``/metrics`` that have figures, but for the time at which each was made."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#") and "_created{" not in line)


def main() -> None:
    load_plugins("another")
    answer: dict[str, Any] = {"not allowed": found("KVFlowConnector")}
    load_plugins(None)
    answer["imported by the plugin"] = "kvflow.integrations.vllm.connector" in sys.modules
    load_plugins(None)
    load_plugins("kvflow")
    answer["keys"] = sorted(field.name for field in dataclasses.fields(KVTransferConfig))
    answer["by name"] = found("KVFlowConnector")
    answer["by module path"] = found("KVFlowConnector", "kvflow.integrations.vllm")
    answer["alias"] = found("NixlConnector", "kvflow.integrations.vllm")

    from kvflow.integrations.vllm.stats import KVFlowMetrics

    ours, theirs = CollectorRegistry(), CollectorRegistry()
    kvflow_alone = metrics(KVFlowMetrics, ours)
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

    nixl = metrics(NixlPromMetrics, theirs)
    answer["at the start"] = [served(ours), served(theirs)]
    counters, counted = empty_counters(), NixlKVConnectorStats()
    for number, (post_s, wire_s) in enumerate(DURATIONS, start=1):
        for series in counters.values():
            if isinstance(series, list):
                series.append(9.0)  # what does not belong to a transfer's time in vLLM's words
        counters["post_s"][-1], counters["wire_s"][-1] = post_s, wire_s
        counters["nbytes"][-1], counters["descriptors"][-1] = 10**number, 25 * number
        counted.data["transfer_duration"].append(post_s + wire_s)
        counted.data["post_duration"].append(post_s)
        counted.data["bytes_transferred"].append(10**number)
        counted.data["num_descriptors"].append(25 * number)
    counters["failed"] = {
        "peer_lost": 2,
        "layout_mismatch": 1,
        "stale_lease": 7,
        "ticket_invalid": 7,
        "transfer_cancelled": 7,
    }
    counters["leases"] = {"expired": 4, "released": 5}
    counted.data["num_failed_transfers"] += [1, 1, 1]
    counted.data["num_kv_expired_reqs"] += [1, 1, 1, 1]
    kvflow_alone.observe(counters, 1)
    nixl.observe(counted.data, 1)
    answer["counted"] = [served(ours), served(theirs)]
    metrics(KVFlowMetrics, theirs).observe(counters, 1)
    answer["beside"] = served(theirs)
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()
