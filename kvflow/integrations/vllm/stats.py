"""What the workers have counted, in the classes that vLLM sends, logs and serves to Prometheus."""

import sys
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvflow.integrations.vllm.tally import COUNTS, SERIES, Tally, add_tallies, empty_tally, is_empty, summary

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""A short prompt on shared memory takes less than a millisecond, one that ends at its deadline 30 s."""

NBYTES = tuple(4.0**power for power in range(5, 19))
"""1 KiB to 64 GiB."""

DESCRIPTORS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)

HISTOGRAMS = {
    "total_s": ("transfer_seconds", "From the order of a transfer to its last fence", SECONDS),
    "queue_s": ("queue_seconds", "From the submission of a transfer to its first read", SECONDS),
    "post_s": ("post_seconds", "Inside calls that post reads", SECONDS),
    "wire_s": ("wire_seconds", "From the first read of a transfer to its last byte, but for posting", SECONDS),
    "fence_s": ("fence_seconds", "Reading the epochs of a transfer", SECONDS),
    "nbytes": ("transfer_bytes", "Bytes of a transfer", NBYTES),
    "descriptors": ("transfer_descriptors", "Descriptors of a transfer", DESCRIPTORS),
}
"""Series of a tally -> name after ``vllm:kvflow_``, meaning, buckets."""

COUNTERS = {
    "failed": ("failed_transfers", "Transfers that delivered nothing, by the code of the error", "code"),
    "leases": ("leases_ended", "Leases of this engine's prompts that have ended, by outcome", "outcome"),
    "defects": ("defects", "Exceptions of kvflow's that were kept from the engine's scheduler, by method", "method"),
    "untagged": (
        "untagged_requests",
        "Requests without a ticket or a wish for one, by whether their parameters are absent or decline one",
        "params",
    ),
}
"""Counts of a tally -> name after ``vllm:kvflow_``, meaning, and the label that has the key."""

NIXL_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

NIXL_HISTOGRAMS = {
    "xfer_time_seconds": (
        ("post_s", "wire_s"),
        "From the first read of a KV cache transfer to its last byte",
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    ),
    "post_time_seconds": (
        ("post_s",),
        "Inside calls that post reads of a KV cache transfer",
        (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    ),
    "bytes_transferred": (
        ("nbytes",),
        "Bytes of a KV cache transfer",
        tuple(2.0**power for power in range(11, 34, 2)),
    ),
    "num_descriptors": (
        ("descriptors",),
        "Descriptors of a KV cache transfer",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    ),
}
"""Name after ``vllm:nixl_`` -> series of a tally, added up; meaning; buckets. Names and buckets are those of vLLM's
``NixlConnector``, so that its dashboards show kvflow.
"""

NIXL_COUNTERS = {
    "num_failed_transfers": "KV cache transfers that have failed, handshakes among them; expired leases do not count",
    "num_kv_expired_reqs": "Leases of this engine's prompts that have expired",
}
"""Name after ``vllm:nixl_`` -> meaning."""

NO_TRANSFER = frozenset(
    {
        "block_ids_invalid",
        "block_range_mismatch",
        "content_mismatch",
        "stale_lease",
        "ticket_invalid",
        "transfer_cancelled",
    }
)
"""Codes of failures that ``NixlConnector`` does not count as failed transfers, or does not know: a ticket that does not
fit its request, a lease that has ended, a request that was aborted.
"""


@dataclass
class KVFlowStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A tally on its way from a worker to a logger."""

    data: Tally

    def __init__(self, data: Tally | None = None) -> None:
        self.data = data or empty_tally()

    def reset(self) -> None:
        """Forget everything."""
        self.data = empty_tally()

    def aggregate(self, other: KVConnectorStats) -> "KVFlowStats":
        """Add what another rank, or a later step, has counted."""
        add_tallies(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one line of the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return is_empty(self.data)


class KVFlowMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Histograms and counters of ``vllm:kvflow_...`` and ``vllm:nixl_...``, for each engine of a server.

    The latter are left to vLLM's own ``NixlConnector`` where it stands beside ours: Prometheus knows each name once.
    vLLM has loaded the classes of all connectors of an engine before it asks the first one for metrics.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            series: self._histogram_cls(
                name=f"vllm:kvflow_{name}", documentation=f"{text}.", buckets=buckets, labelnames=labelnames
            )
            for series, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            count: self._counter_cls(
                name=f"vllm:kvflow_{name}", documentation=f"{text}.", labelnames=[*labelnames, label]
            )
            for count, (name, text, label) in COUNTERS.items()
        }
        self._nixl = {} if NIXL_PACKAGE in sys.modules else self._nixl_metrics()

    def _nixl_metrics(self) -> dict[str, dict[int, Any]]:
        """Return vLLM's own metrics that kvflow has figures for: name -> engine -> metric, all of them at 0."""
        metrics = {
            name: self._histogram_cls(
                name=f"vllm:nixl_{name}", documentation=f"{text}.", buckets=buckets, labelnames=self._labelnames
            )
            for name, (_, text, buckets) in NIXL_HISTOGRAMS.items()
        }
        metrics |= {
            name: self._counter_cls(name=f"vllm:nixl_{name}", documentation=f"{text}.", labelnames=self._labelnames)
            for name, text in NIXL_COUNTERS.items()
        }
        return {
            name: {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
            for name, metric in metrics.items()
        }

    def observe(self, transfer_stats_data: Tally, engine_idx: int = 0) -> None:
        """Take a tally over."""
        self._observe_own(transfer_stats_data, engine_idx)
        if self._nixl:
            self._observe_nixl(transfer_stats_data, engine_idx)

    def _observe_own(self, tally: Tally, engine: int) -> None:
        labels = self.per_engine_labelvalues[engine]
        for series in SERIES:
            histogram = self._histograms[series].labels(*labels)
            for value in tally[series]:
                histogram.observe(value)
        for count in COUNTS:
            for key, number in tally[count].items():
                self._counters[count].labels(*labels, key).inc(number)

    def _observe_nixl(self, tally: Tally, engine: int) -> None:
        for name, (series, _, _) in NIXL_HISTOGRAMS.items():
            for values in zip(*(tally[each] for each in series), strict=True):
                self._nixl[name][engine].observe(sum(values))
        failed = sum(number for code, number in tally["failed"].items() if code not in NO_TRANSFER)
        self._nixl["num_failed_transfers"][engine].inc(failed)
        self._nixl["num_kv_expired_reqs"][engine].inc(tally["leases"].get("expired", 0))
