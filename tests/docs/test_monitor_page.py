"""docs/howto/monitor.md asks for metrics that exist."""

import ast
import re
import shutil
import subprocess
from typing import get_args

import pytest
import yaml

from kvflow.errors import FailureCode
from kvflow.events import Outcome
from kvflow.observability.metrics import METRICS, Described
from tests.helpers.loops import looped

from .alerts import KINDS, RULES, rules
from .pages import ROOT
from .scraping import PAGE, job_named, renamed

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def vllm_metrics():
    """Return the metrics that stats.py names, as ``METRICS``, without importing vLLM."""
    tree = ast.parse((ROOT / "kvflow/integrations/vllm/stats.py").read_text())
    assigned = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
    found = {}
    for rows, kind in (("HISTOGRAMS", "histogram"), ("COUNTERS", "counter")):
        for row in assigned[rows].values:
            name, text, last = row.elts
            labels = ("engine", "model_name", *([last.value] if kind == "counter" else []))
            found[f"vllm:kvflow_{name.value}"] = Described(kind, text.value, labels)
    return found


def series(metrics):
    """Return the names of all series of metrics."""
    return {name + suffix for name, described in metrics.items() for suffix in SUFFIXES[described.kind]}


VLLM_METRICS = vllm_metrics()
VLLM_SERIES = series(VLLM_METRICS)
SERIES = series(METRICS)


def described(name):
    """Return the metric that a series belongs to."""
    metrics = METRICS | VLLM_METRICS
    return metrics[name if name in metrics else re.sub(r"_(total|bucket|sum|count)$", "", name)]


def firing(kind, alert, labels, *scraped, minutes=120):
    """Return promtool's test of an alert that fires with these labels alone, or does not fire: None.

    ``sick`` and ``well`` are both scraped.
    """
    (rule,) = [each for each in rules(kind) if each.get("alert") == alert]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in scraped],
        "alert_rule_test": [
            {
                "eval_time": f"{minutes}m",
                "alertname": alert,
                "exp_alerts": []
                if labels is None
                else [{"exp_labels": labels, "exp_annotations": rule["annotations"]}],
            }
        ],
    }


RISES, RESTS = "0+9x120", "9x120"
APPEARS = "_x60 9x60"
STOPPED = "0+1x60 60x60"
SLOWER = "0+1000x1400 1400010+10x60"
SICK = {"instance": "sick"}
FIRING = {
    "worker": [
        firing(
            "worker",
            "KvflowDown",
            SICK | {"job": "kvflow"},
            ('up{job="kvflow", instance="sick"}', "0x120"),
            ('up{job="kvflow", instance="well"}', "1x120"),
        ),
        firing(
            "worker",
            "KvflowTransfersFail",
            SICK | {"code": "peer_lost"},
            ('kvflow_failed_pulls_total{instance="sick", code="peer_lost", peer="p"}', RISES),
            ('kvflow_failed_pulls_total{instance="well", code="transfer_cancelled", peer="p"}', RISES),
            ('kvflow_failed_pulls_total{instance="well", code="peer_lost", peer="p"}', RESTS),
        ),
        firing(
            "worker",
            "KvflowTransfersFail",
            SICK | {"code": "peer_lost"},
            ('kvflow_failed_pulls_total{instance="sick", code="peer_lost", peer="p"}', APPEARS),
            ('kvflow_failed_pulls_total{instance="well", code="peer_lost", peer="p"}', RESTS),
            minutes=67,
        ),
        firing(
            "worker",
            "KvflowPromptsNotRead",
            SICK,
            ('kvflow_ended_leases_total{instance="sick", outcome="unread"}', RISES),
            ('kvflow_ended_leases_total{instance="well", outcome="released"}', RISES),
        ),
        firing(
            "worker",
            "KvflowNothingTransferred",
            {},  # of all workers together: those that read have no pull, and those that are read from have leases
            ('kvflow_pull_bytes_count{instance="decode-0", peer="p"}', STOPPED),
            ('kvflow_pull_bytes_count{instance="decode-1", peer="p"}', STOPPED),
            ('kvflow_ended_leases_total{instance="prefill-0", outcome="expired"}', RISES),
        ),
        firing(
            "worker",
            "KvflowNothingTransferred",
            None,
            ('kvflow_pull_bytes_count{instance="decode-0", peer="p"}', STOPPED),
            ('kvflow_pull_bytes_count{instance="decode-1", peer="p"}', RISES),
            ('kvflow_ended_leases_total{instance="prefill-0", outcome="released"}', RISES),
        ),
        firing(
            "worker",
            "KvflowBlocksInQuarantine",
            SICK,
            ('kvflow_quarantined_blocks{instance="sick"}', RESTS),
            ('kvflow_quarantined_blocks{instance="well"}', "9x110 0x10"),
        ),
        firing(
            "worker",
            "KvflowPullsTakeLong",
            {"peer": "sick"},
            *[
                (f'kvflow_pull_seconds_bucket{{instance="i", peer="{peer}", le="{le}"}}', values)
                for peer, first in (("sick", "0x120"), ("well", RISES))
                for le, values in (("5", first), ("10", RISES), ("+Inf", RISES))
            ],
        ),
        firing(
            "worker",
            "KvflowReadsSlowly",
            {"peer": "sick"},
            ('kvflow_pull_bytes_sum{peer="sick"}', SLOWER),
            ('kvflow_pull_bytes_sum{peer="well"}', "0+1000x1460"),
            *[(f'kvflow_pull_seconds_sum{{peer="{peer}"}}', "0+1x1460") for peer in ("sick", "well")],
            minutes=1455,
        ),
    ],
    "vllm": [
        firing(
            "vllm",
            "KvflowDown",
            SICK | {"job": "vllm"},
            ('up{job="vllm", instance="sick"}', "0x120"),
            ('up{job="vllm", instance="well"}', "1x120"),
        ),
        firing(
            "vllm",
            "KvflowTransfersFail",
            SICK | {"code": "peer_lost"},
            ('vllm:kvflow_failed_transfers_total{instance="sick", code="peer_lost", engine="0"}', RISES),
            ('vllm:kvflow_failed_transfers_total{instance="well", code="transfer_cancelled", engine="0"}', RISES),
        ),
        firing(
            "vllm",
            "KvflowTransfersFail",
            SICK | {"code": "peer_lost"},
            ('vllm:kvflow_failed_transfers_total{instance="sick", code="peer_lost", engine="0"}', APPEARS),
            ('vllm:kvflow_failed_transfers_total{instance="well", code="peer_lost", engine="0"}', RESTS),
            minutes=67,
        ),
        firing(
            "vllm",
            "KvflowPromptsNotRead",
            SICK,
            ('vllm:kvflow_leases_ended_total{instance="sick", outcome="expired"}', RISES),
            ('vllm:kvflow_leases_ended_total{instance="well", outcome="released"}', RISES),
        ),
        firing(
            "vllm",
            "KvflowNothingTransferred",
            SICK,
            ('vllm:kvflow_transfer_bytes_count{instance="sick"}', STOPPED),
            ('vllm:kvflow_transfer_bytes_count{instance="well"}', RISES),
            ('vllm:num_requests_running{instance="sick"}', "3x120"),
            ('vllm:num_requests_running{instance="well"}', "3x120"),
        ),
        firing(
            "vllm",
            "KvflowSourceLate",
            SICK,
            ('vllm:kvflow_prefixes_total{instance="sick", outcome="late"}', "0+5x120"),
            ('vllm:kvflow_prefixes_total{instance="sick", outcome="held"}', "0+5x120"),
            ('vllm:kvflow_prefixes_total{instance="well", outcome="late"}', "0+1x120"),
            ('vllm:kvflow_prefixes_total{instance="well", outcome="held"}', "0+9x120"),
        ),
        firing(
            "vllm",
            "KvflowDefect",
            SICK | {"method": "build_connector_meta"},
            ('vllm:kvflow_defects_total{instance="sick", method="build_connector_meta"}', "_x60 1x60"),
            ('vllm:kvflow_defects_total{instance="well", method="build_connector_meta"}', RESTS),
            minutes=67,
        ),
        firing(
            "vllm",
            "KvflowPullsTakeLong",
            SICK,
            *[
                (f'vllm:kvflow_transfer_seconds_bucket{{instance="{instance}", le="{le}"}}', values)
                for instance, first in (("sick", "0x120"), ("well", RISES))
                for le, values in (("5", first), ("10", RISES), ("+Inf", RISES))
            ],
        ),
        firing(
            "vllm",
            "KvflowReadsSlowly",
            SICK,
            ('vllm:kvflow_transfer_bytes_sum{instance="sick"}', SLOWER),
            ('vllm:kvflow_transfer_bytes_sum{instance="well"}', "0+1000x1460"),
            *[(f'vllm:kvflow_transfer_seconds_sum{{instance="{each}"}}', "0+1x1460") for each in ("sick", "well")],
            minutes=1455,
        ),
    ],
}


def test_every_query_asks_for_a_metric_that_exists():
    queries = re.findall(r"^\|[^|]+\? \| `([^`]+)` \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(queries) >= 7
    for query in queries:
        names = set(re.findall(r"\bkvflow_\w+", query))
        assert names, query
        assert names <= SERIES, query


def test_the_configurations_of_prometheus_are_read():
    assert job_named("kvflow")["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]
    assert job_named("vllm")["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_the_job_of_vllm_gives_names_their_colon_back():
    """``prometheus_client`` takes it away: https://github.com/prometheus/client_python/issues/1177.

    tests/vllm/test_serve.py asks a real server.
    """
    for name in VLLM_SERIES:
        assert renamed(name.replace(":", "_")) == name
        assert renamed(name) == name


def test_the_table_of_the_page_is_that_of_the_rules():
    """Without the links and the marks of code, which Prometheus would show."""
    alerts = {kind: {rule["alert"]: rule["annotations"] for rule in rules(kind) if "alert" in rule} for kind in KINDS}
    rows = re.findall(
        r"^\| `(Kvflow\w+)`(?: \((.*?) only\))? \| (.*) \| (.*) \|$", (ROOT / PAGE).read_text(), re.MULTILINE
    )
    assert {name for name, *_ in rows} == alerts["worker"].keys() | alerts["vllm"].keys()
    for name, only, *texts in rows:
        found = [alerts[kind][name] for kind in KINDS if name in alerts[kind]]
        assert only == ("" if len(found) == 2 else "`http`" if name in alerts["worker"] else "vLLM")
        says, do = (re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).replace("`", "") for text in texts)
        assert found == [{"summary": says, "description": do}] * len(found)


@looped("kind, rule", [(kind, rule) for kind in KINDS for rule in rules(kind)])
def test_alerts_ask_for_series_and_labels_that_exist(kind, rule):
    query = rule["expr"]
    known = (SERIES if kind == "worker" else VLLM_SERIES) | {each.get("record") for each in rules(kind)}
    names = set(re.findall(r"\b(?:vllm:)?kvflow[_:]\w+", query))
    assert names <= known
    assert names or query.startswith("up{")
    for labels, name in re.findall(r"\bby \(([^)]*)\) \((?:\w+\()?((?:vllm:)?kvflow_\w+)", query):
        assert set(labels.split(", ")) <= {"instance", "le", *described(name).labels}
    assert set(re.findall(r'code!="(\w+)"', query)) <= {*FailureCode}
    for outcomes in re.findall(r'outcome=~"([^"]+)"', query):
        assert set(outcomes.split("|")) <= set(get_args(Outcome))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus")
def test_promtool_accepts_the_rules():
    files = [str(RULES / f"{kind}.yaml") for kind in KINDS]
    checked = subprocess.run(["promtool", "check", "rules", *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("SUCCESS") == 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus")
def test_alerts_fire_for_what_they_are_for_and_not_without_it(tmp_path):
    """Each alert of workers and of vLLM, on series that the test makes up: one that is wrong, and one that is well."""
    for kind in KINDS:
        given = {"rule_files": [str(RULES / f"{kind}.yaml")], "evaluation_interval": "1m", "tests": FIRING[kind]}
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(given))
        checked = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    alerts = {test["alert_rule_test"][0]["alertname"] for kind in FIRING for test in FIRING[kind]}
    assert alerts == {rule["alert"] for kind in KINDS for rule in rules(kind) if "alert" in rule}
