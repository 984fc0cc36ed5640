"""What the workers have counted, in the classes that vLLM sends, logs and serves to Prometheus."""

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
}
"""Counts of a tally -> name after ``vllm:kvflow_``, meaning, and the label that has the key."""


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
    """Histograms and counters of ``vllm:kvflow_...``, for each engine of a server."""

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

    def observe(self, transfer_stats_data: Tally, engine_idx: int = 0) -> None:
        """Take a tally over."""
        labels = self.per_engine_labelvalues[engine_idx]
        for series in SERIES:
            histogram = self._histograms[series].labels(*labels)
            for value in transfer_stats_data[series]:
                histogram.observe(value)
        for count in COUNTS:
            for key, number in transfer_stats_data[count].items():
                self._counters[count].labels(*labels, key).inc(number)
