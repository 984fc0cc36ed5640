"""The rules of Prometheus: one file for the metrics of a worker, one for those of a vLLM server."""

from typing import Any

import yaml

from .pages import ROOT

RULES = ROOT / "docker" / "grafana" / "rules"
KINDS = ("worker", "vllm")


def rules(kind: str) -> list[dict[str, Any]]:
    """Return the rules of a kind, as Prometheus reads them: alerts, and series that alerts compare."""
    (group,) = yaml.safe_load((RULES / f"{kind}.yaml").read_text())["groups"]
    return list(group["rules"])
