"""The dashboards of Grafana: one for the metrics of a worker, one for those of a vLLM server."""

import json

from .pages import ROOT

DASHBOARDS = ROOT / "docker" / "grafana" / "dashboards"
KINDS = {kind: json.loads((DASHBOARDS / f"{kind}.json").read_text()) for kind in ("worker", "vllm")}
