"""Metrics count what events say, with a bounded number of labels, in a form that Prometheus reads."""

import sys
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvflow import events
from kvflow.errors import ConfigInvalid, FailureCode
from kvflow.observability.metrics import METRICS, NAMES_MAX, PEERS_MAX, SECONDS, Metrics, exposition
from kvflow.reads.pulls import TIMED
from kvflow.report import TransferReport
from kvflow.worker.worker import Snapshot

from .examples import EVENTS, PEER, REPORT

REPORTED = EVENTS["transfer.completed"]


def fed(*those, **identity):
    """Return metrics that have taken some events."""
    metrics = Metrics(**identity)
    hooks = metrics.hooks()
    for event in those:
        for hook in hooks:
            hook(event)
    return metrics


def labels_of(family):
    """Return the names of the labels of a metric."""
    return (*METRICS[family.name].labels, "le")


def samples(metrics):
    """Return the value of each sample: name, then the values of its labels in their order."""
    text, content_type = exposition(metrics)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *(sample.labels[label] for label in labels_of(family) if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_completed_pull_is_counted():
    found = samples(fed(REPORTED, REPORTED))
    assert found["kvflow_pull_seconds_count", "prefill-0"] == 2
    assert found["kvflow_pull_seconds_sum", "prefill-0"] == pytest.approx(2 / 3)
    assert found["kvflow_pull_bytes_sum", "prefill-0"] == 8192
    assert found["kvflow_read_bytes_total",] == 16384
    assert found["kvflow_descriptors_total",] == 6
    assert found["kvflow_descriptors_before_merging_total",] == 8  # a quarter was saved
    for phase, seconds in REPORT.timings_s.items():
        if phase != "total":
            assert found["kvflow_pull_phase_seconds_sum", phase] == pytest.approx(2 * seconds)


def test_buckets_count_what_is_not_above_them():
    found = samples(fed(REPORTED))
    wire = {bound: found["kvflow_pull_phase_seconds_bucket", "wire", repr(bound)] for bound in SECONDS}
    assert {bound for bound, count in wire.items() if count} == {bound for bound in SECONDS if bound >= 0.03}
    assert found["kvflow_pull_phase_seconds_bucket", "wire", "+Inf"] == 1


def test_failures_have_a_code_and_bytes_in_vain():
    refused = events.PullFailed(9, "r", "a_code_of_the_engine", "check", "", "", quarantined=False)
    lost = events.PullFailed(
        8, "r", "peer_lost", "wire", PEER, "gone", quarantined=True, nbytes=1024, remote_engine_id="prefill-0"
    )
    found = samples(fed(lost, lost, refused))
    assert found["kvflow_failed_pulls_total", "prefill-0", "peer_lost"] == 2
    assert found["kvflow_read_in_vain_bytes_total", "failed"] == 2048
    assert found["kvflow_failed_pulls_total", "unknown", "other"] == 1


def test_other_events_are_counted():
    found = samples(fed(*EVENTS.values()))
    assert found["kvflow_early_checks_total",] == 1
    assert found["kvflow_connect_seconds_sum",] == 0.25
    assert found["kvflow_ended_leases_total", "released"] == 1
    assert found["kvflow_lease_held_seconds_sum",] == 1.5
    assert found["kvflow_refused_offers_total", "capacity_exceeded"] == 1
    assert found["kvflow_reader_resets_total", "quarantine_s_max"] == 1
    assert found["kvflow_breakers_opened_total",] == 1


def test_bytes_before_a_lease_are_in_vain():
    early = TransferReport(
        request_id="r", nbytes=10, descriptors=1, reads=2, early=1, early_bytes=512, timings_s={"total": 1.0}
    )
    found = samples(fed(events.TransferCompleted(1, "r", early, "", "p")))
    assert found["kvflow_read_in_vain_bytes_total", "early"] == 512


def test_gauges_are_read_from_the_worker():
    metrics = fed(engine_id="decode-0", rank="1", version="9")
    assert samples(metrics) == {
        ("kvflow_worker_info", "decode-0", "1", "9"): 1,
        **{key: 0 for key in samples(Metrics()) if key[0].startswith(("kvflow_lease_held", "kvflow_connect"))},
    }
    rejected = {f"code-{n}": 1 for n in range(NAMES_MAX + 5)}
    metrics.snapshot = lambda: Snapshot(leases=3, pulls=2, quarantined=(), rejected=rejected, dropped={"peer_lost": 4})
    found = samples(metrics)
    assert (found["kvflow_leases",], found["kvflow_pulls_in_flight",]) == (3, 2)
    assert found["kvflow_peers_dropped_total", "peer_lost"] == 4
    assert found["kvflow_consumers_rejected_total", "other"] == 5


def test_peers_and_labels_are_bounded():
    metrics = fed(*(events.TransferCompleted(n, "r", REPORT, "", f"engine-{n}") for n in range(3 * PEERS_MAX)))
    hooks = metrics.hooks()
    for n in range(3 * NAMES_MAX):
        for hook in hooks:
            hook(events.OfferRefused("r", f"code-{n}", "", ""))
            hook(events.PullFailed(n, "r", f"code-{n}", "wire", "", "", quarantined=False, remote_engine_id="e"))
    found = samples(metrics)
    peers = {key[1] for key in found if key[0] == "kvflow_pull_seconds_count"}
    assert peers == {f"engine-{n}" for n in range(PEERS_MAX)} | {"other"}
    assert found["kvflow_pull_seconds_count", "other"] == 2 * PEERS_MAX
    assert len([key for key in found if key[0] == "kvflow_refused_offers_total"]) == NAMES_MAX + 1
    codes = {key[2] for key in found if key[0] == "kvflow_failed_pulls_total"}
    assert codes <= {"other", *FailureCode}


def test_many_producers_have_few_series():
    report = replace(REPORT, timings_s=dict.fromkeys(TIMED, 0.01))
    metrics = fed(
        *EVENTS.values(),
        *(events.TransferCompleted(n, "r", report, "", f"engine-{n}") for n in range(PEERS_MAX + 1)),
        *(
            events.PullFailed(n, "r", code, "wire", "", "", quarantined=False, remote_engine_id=f"engine-{n}")
            for n in range(PEERS_MAX + 1)
            for code in ("stale_lease", "peer_lost")
        ),
    )
    found = samples(metrics)
    assert {name for name, metric in METRICS.items() if "peer" in metric.labels} == {
        "kvflow_pull_seconds",
        "kvflow_pull_bytes",
        "kvflow_failed_pulls",
    }
    assert len(found) <= 1700


def test_hostile_names_stay_in_their_label():
    name = 'x"} 1\nkvflow_leases 7\\'
    found = samples(fed(events.TransferCompleted(1, "r", REPORT, "", name)))
    assert found["kvflow_pull_seconds_count", name] == 1
    assert ("kvflow_leases",) not in found


def test_every_metric_is_described_and_in_base_units():
    text = exposition(fed(*EVENTS.values()))[0].decode()
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {
        name + ("_total" if described.kind == "counter" else "") for name, described in METRICS.items()
    }
    for name, described in METRICS.items():
        assert described.text.endswith(".")
        assert not name.endswith(("_ms", "_us", "_mb", "_total"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigInvalid, match="prometheus_client, which is not installed") as caught:
        exposition(Metrics())
    assert "kvflow[metrics]" in caught.value.remedy
