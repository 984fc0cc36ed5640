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

from .pages import ROOT
from .scraping import KINDS, PAGE, RULES, job_named, renamed, rules

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


def firing_of_both(kind, *, job, fails, ended, unread, pull, extra, slow):
    """Yield promtool's tests of the alerts that workers and vLLM have alike, by what their series are called."""
    is_slow = {slow.rpartition(" ")[2]: "sick"}

    def failures(instance, code, values):
        return f'{fails}{{instance="{instance}", code="{code}", {extra}}}', values

    yield firing(
        kind,
        "KvflowDown",
        SICK | {"job": job},
        (f'up{{job="{job}", instance="sick"}}', "0x120"),
        (f'up{{job="{job}", instance="well"}}', "1x120"),
    )
    well = failures("well", "peer_lost", RESTS), failures("well", "transfer_cancelled", RISES)
    for values, minutes in ((RISES, 120), (APPEARS, 67)):
        scraped = failures("sick", "peer_lost", values), *well
        yield firing(kind, "KvflowTransfersFail", SICK | {"code": "peer_lost"}, *scraped, minutes=minutes)
    yield firing(
        kind,
        "KvflowPromptsNotRead",
        SICK,
        (f'{ended}{{instance="sick", outcome="{unread}"}}', RISES),
        (f'{ended}{{instance="well", outcome="released"}}', RISES),
    )
    yield firing(
        kind,
        "KvflowPullsTakeLong",
        is_slow,
        *[
            (f'{pull}_seconds_bucket{{{slow}="{each}", le="{le}"}}', values)
            for each, first in (("sick", "0x120"), ("well", RISES))
            for le, values in (("5", first), ("10", RISES), ("+Inf", RISES))
        ],
    )
    yield firing(
        kind,
        "KvflowReadsSlowly",
        is_slow,
        (f'{pull}_bytes_sum{{{slow}="sick"}}', SLOWER),
        (f'{pull}_bytes_sum{{{slow}="well"}}', "0+1000x1460"),
        *[(f'{pull}_seconds_sum{{{slow}="{each}"}}', "0+1x1460") for each in ("sick", "well")],
        minutes=1455,
    )


FIRING = {
    "worker": [
        *firing_of_both(
            "worker",
            job="kvflow",
            fails="kvflow_failed_pulls_total",
            ended="kvflow_ended_leases_total",
            unread="unread",
            pull="kvflow_pull",
            extra='peer="p"',
            slow='instance="i", peer',
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
    ],
    "vllm": [
        *firing_of_both(
            "vllm",
            job="vllm",
            fails="vllm:kvflow_failed_transfers_total",
            ended="vllm:kvflow_leases_ended_total",
            unread="expired",
            pull="vllm:kvflow_transfer",
            extra='engine="0"',
            slow="instance",
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
