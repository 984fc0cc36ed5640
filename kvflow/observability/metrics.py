"""Count what a worker does, for Prometheus.

Events are added up in plain numbers; ``prometheus_client`` writes them out. Its own counters would take a tenth of the
CPU time of a short pull.
"""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

from kvflow import events
from kvflow.errors import ConfigInvalid, FailureCode
from kvflow.events import OnlyEvents

PEERS_MAX: Final = 32  # producers with a label value each: the first that are read from
NAMES_MAX: Final = 64  # values of any other label
OTHER: Final = "other"  # the label value that all others share

BATCH: Final = 64  # completed pulls that are counted together, while instructions and counts are in the CPU's caches

# Upper bounds of the buckets of seconds: binding indices takes some microseconds, a hung peer is found after 30 s.
SECONDS: Final = (
    *(0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
NBYTES: Final = tuple(4.0**power for power in range(5, 19))  # upper bounds, from 1 KiB to 64 GiB


class Described(NamedTuple):
    """One metric, as Prometheus shows it. The name of a counter has ``_total`` in addition."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()


METRICS: Final[dict[str, Described]] = {
    "kvflow_pull_seconds": Described("histogram", "Completed pulls, from the call to the result.", ("peer",)),
    "kvflow_pull_phase_seconds": Described(
        "histogram", "Phases of completed pulls, as in TransferReport.timings_s.", ("phase",)
    ),
    "kvflow_pull_bytes": Described("histogram", "Bytes that completed pulls delivered.", ("peer",)),
    "kvflow_read_bytes": Described(
        "counter", "Bytes that completed pulls read, with the parts of staged regions that nobody needs."
    ),
    "kvflow_read_in_vain_bytes": Described(
        "counter",
        "Bytes that were read and not delivered: before an early ticket's lease, or by a failed pull.",
        ("reason",),
    ),
    "kvflow_descriptors_before_merging": Described(
        "counter", "Descriptors of completed pulls before neighbors were merged."
    ),
    "kvflow_descriptors": Described("counter", "Descriptors of completed pulls after merging."),
    "kvflow_early_checks": Described(
        "counter", "How often a read waited because a source rank did not hold the lease yet."
    ),
    "kvflow_failed_pulls": Described(
        "counter", "Pulls that failed, by error code. Stale tickets are stale_lease.", ("peer", "code")
    ),
    "kvflow_connect_seconds": Described(
        "histogram", "Connecting to a rank of a peer, from dialing to the end of the handshake."
    ),
    "kvflow_peers_dropped": Described("counter", "Connections to producers that were dropped, by code.", ("code",)),
    "kvflow_consumers_rejected": Described("counter", "Connections to this worker that failed, by code.", ("code",)),
    "kvflow_breakers_opened": Described("counter", "Addresses that failed several times in a row."),
    "kvflow_reader_resets": Described(
        "counter", "Resets of the reading agent, by the limit that was exceeded.", ("setting",)
    ),
    "kvflow_refused_offers": Described("counter", "Offers that failed, by error code.", ("code",)),
    "kvflow_ended_leases": Described("counter", "Leases of this worker that ended, by outcome.", ("outcome",)),
    "kvflow_lease_held_seconds": Described("histogram", "How long this worker held leases."),
    "kvflow_posted_reads": Described(
        "counter",
        "Reads of pulls, by who made them: the event loop (inline) or the read thread.",
        ("way",),
    ),
    "kvflow_pulls_in_flight": Described("gauge", "Pulls that are open or draining."),
    "kvflow_leases": Described("gauge", "Leases that this worker holds."),
    "kvflow_quarantined_pulls": Described("gauge", "Failed pulls into whose target blocks a read may still write."),
    "kvflow_quarantined_blocks": Described("gauge", "Target blocks of these pulls."),
    "kvflow_staging_buffers": Described("gauge", "Staging buffers, by state.", ("state",)),
    "kvflow_worker_info": Described("gauge", "1, with the identity of the worker.", ("engine_id", "rank", "version")),
}
"""Every metric of a worker, by the name in the documentation."""

PREFIX: Final = "kvflow_"
CODES: Final = frozenset(FailureCode)


class Distribution:
    """How many values lie in each bucket, and their sum; ``bounds`` are the upper bounds, without the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bound of each bucket, and how many values are not above it."""
        found, below = [], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class PeerCounts:
    """What was read from one producer."""

    def __init__(self) -> None:
        self.seconds = Distribution(SECONDS)
        self.nbytes = Distribution(NBYTES)
        self.failed: dict[str, int] = defaultdict(int)


class Metrics:
    """The metrics of one worker. A registry of ``prometheus_client`` takes it as a collector.

    Attributes:
        identity: labels of ``kvflow_worker_info``.
        snapshot: ``Worker.snapshot``, which ``collect`` calls for the gauges; None leaves them out.

    Thread: any; ``collect`` where ``snapshot`` may be called.
    """

    def __init__(self, **identity: str) -> None:
        self.identity = identity
        self.snapshot: Callable[[], Any] | None = None
        self._lock = threading.Lock()
        self._completed: list[events.TransferCompleted] = []  # not counted yet
        self._peers: dict[str, PeerCounts] = {}
        self._phases: dict[str, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self._counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # by name and label, if any
        self._connect = Distribution(SECONDS)
        self._held = Distribution(SECONDS)

    def hooks(self) -> list[events.Hook]:
        """Return the hooks that feed the metrics, for ``open_worker``."""
        return [
            OnlyEvents(events.TransferCompleted, self._on_completed),
            OnlyEvents(events.PullFailed, self._on_failed),
            OnlyEvents(events.TransferRetried, lambda _: self._count("early_checks", "")),
            OnlyEvents(events.PeerConnected, self._on_connected),
            OnlyEvents(events.LeaseEnded, self._on_lease_ended),
            OnlyEvents(events.OfferRefused, lambda event: self._count("refused_offers", event.code)),
            OnlyEvents(events.BreakerOpened, lambda _: self._count("breakers_opened", "")),
            OnlyEvents(events.ReaderReset, lambda event: self._count("reader_resets", event.setting)),
        ]

    def _peer(self, engine_id: str) -> PeerCounts:
        found = self._peers.get(engine_id)
        if found is None:
            name = engine_id or "unknown"
            name = name if name in self._peers or len(self._peers) < PEERS_MAX else OTHER
            found = self._peers.get(name) or self._peers.setdefault(name, PeerCounts())
        return found

    def _on_completed(self, event: events.TransferCompleted) -> None:
        with self._lock:
            self._completed.append(event)
            if len(self._completed) >= BATCH:
                self._count_completed()

    def _count_completed(self) -> None:
        """Count the pulls that have completed since the last call; the caller holds the lock."""
        for event in self._completed:
            report, peer, phases = event.report, self._peer(event.remote_engine_id), self._phases
            for phase, seconds in report.timings_s.items():
                each = peer.seconds if phase == "total" else phases[phase]
                each.counts[bisect_left(SECONDS, seconds)] += 1  # as ``Distribution.add``, in half of the time
                each.total += seconds
            peer.nbytes.add(report.nbytes)
            self._add("read_bytes", report.read_bytes)
            self._add("descriptors", report.descriptors)
            self._add("descriptors_before_merging", round(report.descriptors / (1 - report.merged)))
            self._add("read_in_vain_bytes", report.early_bytes, "early")
        self._completed.clear()

    def _on_failed(self, event: events.PullFailed) -> None:
        code = event.code if event.code in CODES else OTHER  # an engine may refuse with codes of its own
        with self._lock:
            self._peer(event.remote_engine_id).failed[code] += 1
            self._add("read_in_vain_bytes", event.nbytes, "failed")

    def _on_connected(self, event: events.PeerConnected) -> None:
        with self._lock:
            self._connect.add(event.handshake_s)

    def _on_lease_ended(self, event: events.LeaseEnded) -> None:
        with self._lock:
            self._held.add(event.held_s)
            self._add("ended_leases", 1, event.outcome)

    def _count(self, name: str, label: str) -> None:
        with self._lock:
            counts = self._counts[name]
            self._add(name, 1, label if label in counts or len(counts) < NAMES_MAX else OTHER)

    def _add(self, name: str, number: int, label: str = "") -> None:
        self._counts[name][label] += number

    def collect(self) -> Iterator[Any]:
        """Yield every metric, as a family of ``prometheus_client``; raise as ``require_client``."""
        families = Families()
        families.gauge("worker_info", 1, *(self.identity.get(label, "") for label in ("engine_id", "rank", "version")))
        with self._lock:
            self._count_completed()
            for name, peer in self._peers.items():
                _add_peer(families, name, peer)
            for name, counts in self._counts.items():
                for label, number in counts.items():
                    families.counter(name, number, *([label] if METRICS[PREFIX + name].labels else []))
            for phase, seconds in self._phases.items():
                families.histogram("pull_phase_seconds", seconds, phase)
            families.histogram("connect_seconds", self._connect)
            families.histogram("lease_held_seconds", self._held)
        if self.snapshot is not None:
            _add_gauges(families, self.snapshot())
        return iter(families.by_name.values())


class Families:
    """The families of ``prometheus_client`` in one answer, one for each of ``METRICS``."""

    def __init__(self) -> None:
        core = require_client().core
        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        self.by_name: dict[str, Any] = {
            name: kinds[described.kind](name, described.text, labels=described.labels)
            for name, described in METRICS.items()
        }

    def counter(self, name: str, value: float, *labels: str) -> None:
        """Add one value."""
        self.by_name[PREFIX + name].add_metric(labels, value)

    gauge = counter

    def histogram(self, name: str, values: Distribution, *labels: str) -> None:
        """Add buckets."""
        self.by_name[PREFIX + name].add_metric(labels, buckets=values.buckets(), sum_value=values.total)


def _add_peer(families: Families, name: str, peer: PeerCounts) -> None:
    families.histogram("pull_seconds", peer.seconds, name)
    families.histogram("pull_bytes", peer.nbytes, name)
    for code, number in peer.failed.items():
        families.counter("failed_pulls", number, name, code)


def _add_gauges(families: Families, held: Any) -> None:
    families.gauge("pulls_in_flight", held.pulls)
    families.gauge("leases", held.leases)
    families.counter("posted_reads", held.posted_inline, "inline")
    families.counter("posted_reads", held.posted_on_thread, "thread")
    families.gauge("quarantined_pulls", len(held.quarantined))
    families.gauge("quarantined_blocks", sum(each.num_blocks for each in held.quarantined))
    staging = held.staging
    families.gauge("staging_buffers", staging.buffers - staging.in_use, "free")
    families.gauge("staging_buffers", staging.in_use - staging.quarantined, "in_use")
    families.gauge("staging_buffers", staging.quarantined, "quarantined")
    for name, counts in (("consumers_rejected", held.rejected), ("peers_dropped", held.dropped)):
        for code, number in _bounded(counts.items()):
            families.counter(name, number, code)


def _bounded(counts: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    listed = list(counts)
    rest = sum(number for _, number in listed[NAMES_MAX:])
    return [*listed[:NAMES_MAX], *([(OTHER, rest)] if rest else [])]


def require_client() -> Any:
    """Return the package ``prometheus_client``; ``ConfigInvalid`` if it is not installed."""
    try:
        import prometheus_client.core  # noqa: PLC0415 - of an optional extra, and only workers with pages need it
    except ImportError as error:
        raise ConfigInvalid(
            "metrics need the package prometheus_client, which is not installed",
            remedy="Install kvflow[metrics], or leave the setting http out.",
        ) from error
    return prometheus_client


def exposition(metrics: Metrics) -> tuple[bytes, str]:
    """Return the metrics in the text format of Prometheus, and its content type; raise as ``require_client``."""
    client = require_client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return client.generate_latest(registry), client.CONTENT_TYPE_LATEST
