"""The guide to monitoring asks for metrics that exist."""

import re

import yaml

from kvflow.observability.metrics import METRICS
from kvflow.report import PHASES

from .pages import ROOT, fenced

PAGE = "docs/howto/monitor.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
YAML = [yaml.safe_load(block.text) for block in fenced(PAGE) if block.language == "yaml"]
SERIES = {name + suffix for name, described in METRICS.items() for suffix in SUFFIXES[described.kind]}


def test_every_query_asks_for_a_metric_that_exists():
    queries = re.findall(r"^\|[^|]+\? \| `([^`]+)` \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(queries) >= 7
    for query in queries:
        names = set(re.findall(r"\bkvflow_\w+", query))
        assert names, query
        assert names <= SERIES, query


def test_the_configuration_of_prometheus_is_read():
    (job,) = next(read for read in YAML if "scrape_configs" in read)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]


def test_alerts_ask_for_series_labels_and_phases_that_exist():
    (group,) = next(read for read in YAML if "groups" in read)["groups"]
    recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
    assert [rule.get("alert", "") for rule in group["rules"]] == ["KvflowPullsTakeLong", "", "KvflowPeerReadSlowly"]
    for rule in group["rules"]:
        query = rule["expr"]
        names = set(re.findall(r"\bkvflow[_:]\w+", query))
        assert names
        assert names <= SERIES | recorded
        assert query.count("(") == query.count(")")
        for labels, name in re.findall(r"\bby \(([^)]*)\) \(rate\((kvflow_\w+)", query):
            assert set(labels.split(", ")) - {"le"} <= set(METRICS[re.sub(r"_(bucket|sum)$", "", name)].labels)
        assert {phase for given in re.findall(r'phase=~"([^"]*)"', query) for phase in given.split("|")} <= {*PHASES}
