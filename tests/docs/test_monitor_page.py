"""The guide to monitoring asks for metrics that exist."""

import re

import yaml

from kvflow.observability.metrics import METRICS

from .pages import ROOT, fenced

PAGE = "docs/howto/monitor.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {name + suffix for name, described in METRICS.items() for suffix in SUFFIXES[described.kind]}


def test_every_query_asks_for_a_metric_that_exists():
    queries = re.findall(r"^\|[^|]+\? \| `([^`]+)` \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(queries) >= 7
    for query in queries:
        names = set(re.findall(r"\bkvflow_\w+", query))
        assert names, query
        assert names <= SERIES, query


def test_the_configuration_of_prometheus_is_read():
    (block,) = [block for block in fenced(PAGE) if block.language == "yaml"]
    (job,) = yaml.safe_load(block.text)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]
