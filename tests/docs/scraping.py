"""What Prometheus makes of the metrics of a vLLM server, by the job of docs/howto/monitor.md."""

import re
from typing import Any

import yaml

from .pages import blocks

PAGE = "docs/howto/monitor.md"
ASKED = re.compile(r"(?:\bby \(([^)]*)\) \()?(?:\w+\()?\b(vllm:\w+)(?:\{([^}]*)\})?")
OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to every series."""


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
