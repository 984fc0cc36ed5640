"""What Prometheus and Grafana make of metrics: rules, dashboards, and the job of docs/howto/monitor.md for vLLM."""

import json
import re
from typing import Any

import yaml

from .pages import ROOT, blocks

PAGE = "docs/howto/monitor.md"
KINDS = ("worker", "vllm")
"""Of rules, and of dashboards: one file for the metrics of a worker, one for those of a vLLM server."""
RULES = ROOT / "docker" / "grafana" / "rules"
ASKED = re.compile(r"(?:\bby \(([^)]*)\) \()?(?:\w+\()?\b(vllm:\w+)(?:\{([^}]*)\})?")
OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to every series."""


def rules(kind: str) -> list[dict[str, Any]]:
    """Return the rules of a kind, as Prometheus reads them: alerts, and series that alerts compare."""
    (group,) = yaml.safe_load((RULES / f"{kind}.yaml").read_text())["groups"]
    return list(group["rules"])


def dashboard(kind: str) -> dict[str, Any]:
    """Return the dashboard of a kind."""
    return dict(json.loads((ROOT / "docker" / "grafana" / "dashboards" / f"{kind}.json").read_text()))


def queries_shown(kind: str) -> list[str]:
    """Return all queries of a dashboard."""
    return [target["expr"] for panel in dashboard(kind)["panels"] for target in panel["targets"]]


def job_named(name: str) -> dict[str, Any]:
    """Return the page's job for Prometheus."""
    read = map(yaml.safe_load, blocks(PAGE, "yaml"))
    (found,) = [job for each in read for job in each.get("scrape_configs", []) if job["job_name"] == name]
    return dict(found)


def renamed(name: str) -> str:
    """Return the name under which the page's job stores a series of vLLM."""
    for rule in job_named("vllm").get("metric_relabel_configs", []):
        assert rule.keys() == {"source_labels", "regex", "target_label", "replacement"}, rule
        assert (*rule["source_labels"], rule["target_label"]) == ("__name__", "__name__"), rule
        if found := re.fullmatch(rule["regex"], name):
            name = found.expand(rule["replacement"].replace("$", "\\"))
    return name


def labels_asked_for(query: str) -> dict[str, set[str]]:
    """Return each series of vLLM that a query asks for, with the labels that it selects or groups by."""
    asked: dict[str, set[str]] = {}
    for by, name, selectors in ASKED.findall(query):
        labels = {*re.findall(r"\w+", by), *re.findall(r"(\w+)[=!]", selectors)}
        asked.setdefault(name, set()).update(labels - OF_TARGETS)
    return asked
