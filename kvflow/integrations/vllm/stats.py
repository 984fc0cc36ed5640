"""The counters of ``messages`` in vLLM's classes, which vLLM sends, logs and serves to Prometheus."""

import sys
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvflow.errors import FailureCode
from kvflow.events import TIMED_OUT
from kvflow.integrations.vllm.messages import COUNTS, SERIES, Counters, add_counters, empty_counters, is_empty, summary

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""A short prompt over shared memory takes less than a millisecond; a transfer that ends at its deadline takes 30 s."""

NBYTES = tuple(4.0**power for power in range(5, 19))  # 1 KiB to 64 GiB

DESCRIPTORS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)

HISTOGRAMS = {
    "total_s": ("transfer_seconds", "From the command for a transfer to the last check of its leases", SECONDS),
    "queue_s": ("queue_seconds", "From the submission of a transfer to its first read", SECONDS),
    "post_s": ("post_seconds", "Inside calls that post reads", SECONDS),
    "wire_s": ("wire_seconds", "From the first read of a transfer to its last byte, without posting", SECONDS),
    "fence_s": ("fence_seconds", "Checks of the leases of a transfer after its last byte", SECONDS),
    "nbytes": ("transfer_bytes", "Bytes of a transfer", NBYTES),
    "descriptors": ("transfer_descriptors", "Descriptors of a transfer", DESCRIPTORS),
}
"""Name in ``SERIES`` -> name after ``vllm:kvflow_``, meaning, buckets."""

COUNTERS = {
    "failed": ("failed_transfers", "Transfers that failed, by error code", "code"),
    "leases": ("leases_ended", "Ended leases of this engine's prompts, by outcome", "outcome"),
    "defects": ("defects", "Exceptions in kvflow that vLLM's scheduler did not see, by method", "method"),
    "untagged": (
        "untagged_requests",
        "Requests that neither ask for a ticket nor bring one, by the content of kv_transfer_params",
        "params",
    ),
    "prefixes": ("prefixes", "Prompts that sources were asked for, by outcome, and ignored hints", "outcome"),
}
"""Name in ``COUNTS`` -> name after ``vllm:kvflow_``, meaning, and the label that holds the key."""

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
"""Name after ``vllm:nixl_`` -> names in ``SERIES`` that are added up; meaning; buckets. Names and buckets are those of
vLLM's ``NixlConnector``, so that its dashboards also show kvflow."""

NIXL_COUNTERS = {
    "num_failed_transfers": "Failed KV cache transfers, including failed handshakes, without expired leases",
    "num_kv_expired_reqs": "Leases of this engine's prompts that no reader has read in time",
}
"""Name after ``vllm:nixl_`` -> meaning."""

NO_TRANSFER = frozenset(
    {
        FailureCode.BLOCK_IDS_INVALID,
        FailureCode.BLOCK_RANGE_MISMATCH,
        FailureCode.CONTENT_MISMATCH,
        FailureCode.STALE_LEASE,
        FailureCode.TICKET_INVALID,
        FailureCode.TRANSFER_CANCELLED,
    }
)
"""Codes of tickets, leases and requests, which are no failed transfers for ``NixlConnector``."""


@dataclass
class KVFlowStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counters on their way from a rank, or from the scheduler's side, to vLLM's loggers."""

    data: Counters

    def __init__(self, data: Counters | None = None) -> None:
        self.data = data or empty_counters()

    def reset(self) -> None:
        """Set all counters to nothing."""
        self.data = empty_counters()

    def aggregate(self, other: KVConnectorStats) -> "KVFlowStats":
        """Add the counters of another rank or of a later step."""
        add_counters(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of one log line."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return is_empty(self.data)


class KVFlowMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Histograms and counters ``vllm:kvflow_...`` and ``vllm:nixl_...``, for each engine of a server.

    If vLLM's own ``NixlConnector`` runs in the same engine, kvflow leaves ``vllm:nixl_...`` to it, because Prometheus
    accepts each name once. vLLM loads the classes of all connectors of an engine before it asks for metrics.
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
        """Return the metrics of ``NixlConnector`` that kvflow also serves: name -> engine -> metric, all at 0."""
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

    def observe(self, transfer_stats_data: Counters, engine_idx: int = 0) -> None:
        """Add counters to the metrics."""
        self._observe_own(transfer_stats_data, engine_idx)
        if self._nixl:
            self._observe_nixl(transfer_stats_data, engine_idx)

    def _observe_own(self, counters: Counters, engine: int) -> None:
        labels = self.per_engine_labelvalues[engine]
        for series in SERIES:
            histogram = self._histograms[series].labels(*labels)
            for value in counters[series]:
                histogram.observe(value)
        for count in COUNTS:
            for key, number in counters[count].items():
                self._counters[count].labels(*labels, key).inc(number)

    def _observe_nixl(self, counters: Counters, engine: int) -> None:
        for name, (series, _, _) in NIXL_HISTOGRAMS.items():
            for values in zip(*(counters[each] for each in series), strict=True):
                self._nixl[name][engine].observe(sum(values))
        failed = sum(number for code, number in counters["failed"].items() if code not in NO_TRANSFER)
        self._nixl["num_failed_transfers"][engine].inc(failed)
        self._nixl["num_kv_expired_reqs"][engine].inc(sum([counters["leases"].get(each, 0) for each in TIMED_OUT]))
