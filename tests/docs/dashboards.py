"""``python -m tests.docs.dashboards``: write the dashboards of Grafana.

One panel has queries for the metrics of a worker (``kvflow_...``), and for those of a vLLM server
(``vllm:kvflow_...``), which has no metric for some panels.
"""

import json
import re
from dataclasses import dataclass, field
from string import ascii_uppercase

from .pages import ROOT

DASHBOARDS = ROOT / "docker" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A graph, one of three in a row.

    Attributes:
        title: its title.
        says: its description.
        unit: Grafana's name of the unit.
        worker: legend -> query for metrics of workers, without instance and interval; empty: they have none for it.
        vllm: legend -> query for metrics of vLLM servers; likewise.
        stacked: whether its series add up.
    """

    title: str
    says: str
    unit: str
    worker: dict[str, str] = field(default_factory=dict)
    vllm: dict[str, str] = field(default_factory=dict)
    stacked: bool = False


def quantiles(series: str) -> dict[str, str]:
    """Return the queries for quantiles of a histogram of seconds."""
    percent = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        name: f"histogram_quantile({share}, sum by (le) (rate({series}_bucket)))" for name, share in percent.items()
    }


PANELS = (
    Panel(
        "Bytes delivered",
        "Bytes of completed pulls per second.",
        "Bps",
        worker={"from {{peer}}": "sum by (peer) (rate(kvflow_pull_bytes_sum))"},
        vllm={"to {{instance}}": "sum by (instance) (rate(vllm:kvflow_transfer_bytes_sum))"},
    ),
    Panel(
        "Duration of pulls",
        "From the call to the result.",
        "s",
        worker=quantiles("kvflow_pull_seconds"),
        vllm=quantiles("vllm:kvflow_transfer_seconds"),
    ),
    Panel(
        "Phases of a pull",
        "Mean seconds of each phase of a completed pull.",
        "s",
        worker={
            "{{phase}}": "sum by (phase) (rate(kvflow_pull_phase_seconds_sum))"
            " / on () group_left () sum(rate(kvflow_pull_seconds_count))"
        },
        vllm={
            phase: f"sum(rate(vllm:kvflow_{phase}_seconds_sum)) / sum(rate(vllm:kvflow_transfer_seconds_count))"
            for phase in ("queue", "post", "wire", "fence")
        },
        stacked=True,
    ),
    Panel(
        "Pulls",
        "Completed pulls per second.",
        "ops",
        worker={"from {{peer}}": "sum by (peer) (rate(kvflow_pull_seconds_count))"},
        vllm={"to {{instance}}": "sum by (instance) (rate(vllm:kvflow_transfer_seconds_count))"},
    ),
    Panel(
        "Failures",
        "Failed pulls per second, by code. docs/reference/errors.md has a remedy for each code.",
        "ops",
        worker={"from {{peer}} {{code}}": "sum by (peer, code) (rate(kvflow_failed_pulls_total))"},
        vllm={"to {{instance}} {{code}}": "sum by (instance, code) (rate(vllm:kvflow_failed_transfers_total))"},
    ),
    Panel(
        "In flight",
        "Open pulls, and leases that producers hold.",
        "short",
        worker={
            "pulls {{instance}}": "sum by (instance) (kvflow_pulls_in_flight)",
            "leases {{instance}}": "sum by (instance) (kvflow_leases)",
        },
    ),
    Panel(
        "Quarantine",
        "Target blocks of failed pulls into which a read may still write.",
        "short",
        worker={"{{instance}}": "sum by (instance) (kvflow_quarantined_blocks)"},
    ),
    Panel(
        "Bytes read in vain",
        "Bytes that were read and not delivered, per second.",
        "Bps",
        worker={"{{reason}}": "sum by (reason) (rate(kvflow_read_in_vain_bytes_total))"},
    ),
    Panel(
        "Descriptors that merging saves",
        "Share of the descriptors of completed pulls that merging neighbors has saved.",
        "percentunit",
        worker={
            "{{instance}}": "1 - sum by (instance) (rate(kvflow_descriptors_total))"
            " / sum by (instance) (rate(kvflow_descriptors_before_merging_total))"
        },
    ),
    Panel(
        "Bytes of a descriptor",
        "Mean bytes of the descriptors of completed pulls, after neighbors were merged.",
        "bytes",
        vllm={
            "{{instance}}": "sum by (instance) (rate(vllm:kvflow_transfer_bytes_sum))"
            " / sum by (instance) (rate(vllm:kvflow_transfer_descriptors_sum))"
        },
    ),
    Panel(
        "Early tickets",
        "How often a producer did not hold the lease of a ticket yet, per second.",
        "ops",
        worker={"{{instance}}": "sum by (instance) (rate(kvflow_early_checks_total))"},
    ),
    Panel(
        "Ended leases",
        "Leases of the producers per second. Expired leases were not read in time.",
        "ops",
        worker={"{{outcome}}": "sum by (outcome) (rate(kvflow_ended_leases_total))"},
        vllm={"{{outcome}}": "sum by (outcome) (rate(vllm:kvflow_leases_ended_total))"},
    ),
    Panel(
        "Connections",
        "Connections that were dropped, consumers that were rejected, and addresses that failed several times, "
        "per second.",
        "ops",
        worker={
            "dropped {{code}}": "sum by (code) (rate(kvflow_peers_dropped_total))",
            "rejected {{code}}": "sum by (code) (rate(kvflow_consumers_rejected_total))",
            "breakers": "sum(rate(kvflow_breakers_opened_total))",
        },
    ),
    Panel(
        "Requests without a transfer",
        "Requests per second that neither ask for a ticket nor bring one. Many with absent: the router does not ask.",
        "ops",
        vllm={"{{instance}} {{params}}": "sum by (instance, params) (rate(vllm:kvflow_untagged_requests_total))"},
    ),
    Panel(
        "Prompts that sources were asked for",
        "Per second, by outcome. docs/howto/share-prefixes.md says what each outcome means.",
        "ops",
        vllm={"{{outcome}}": "sum by (outcome) (rate(vllm:kvflow_prefixes_total))"},
    ),
    Panel(
        "Defects",
        "Exceptions in kvflow that vLLM's scheduler did not see, per second. Report the traceback in the log.",
        "ops",
        vllm={"{{instance}} {{method}}": "sum by (instance, method) (rate(vllm:kvflow_defects_total))"},
    ),
)


def chosen(query: str) -> str:
    """Return a query with the instances and the interval that the reader of the dashboard chooses."""
    query = re.sub(r"(vllm:)?\bkvflow_\w+", r'\g<0>{instance=~"$instance"}', query)
    return re.sub(r"(?<=rate\()[^)]+", r"\g<0>[$__rate_interval]", query)


def graph(panel: Panel, queries: dict[str, str], number: int) -> dict[str, object]:
    """Return Grafana's form of a panel, the first of which has number 0."""
    custom = {
        "fillOpacity": 60 if panel.stacked else 10,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "showPoints": "never",
    }
    limits = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 8, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": letter, "expr": chosen(query), "legendFormat": legend, "datasource": SOURCE}
            for letter, (legend, query) in zip(ascii_uppercase, queries.items(), strict=False)
        ],
    }


def dashboard(kind: str) -> str:
    """Return the dashboard for one kind of metrics, ``worker`` or ``vllm``."""
    uid, title, instances, series = {
        "worker": ("kvflow", "kvflow", "Worker", "kvflow_worker_info"),
        "vllm": ("kvflow-vllm", "kvflow in vLLM", "Server", "vllm:kvflow_transfer_seconds_count"),
    }[kind]
    variables: list[dict[str, object]] = [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "Prometheus", "value": "prometheus"},
            "hide": 0,
        },
        {
            "name": "instance",
            "label": instances,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": f"label_values({series}, instance)", "refId": "instance"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    panels = [(panel, getattr(panel, kind)) for panel in PANELS if getattr(panel, kind)]
    made = {
        "uid": uid,
        "title": title,
        "tags": ["kvflow"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": [graph(panel, queries, number) for number, (panel, queries) in enumerate(panels)],
    }
    return json.dumps(made, indent=2) + "\n"


def main() -> None:
    """Write the files."""
    for kind in ("worker", "vllm"):
        (DASHBOARDS / f"{kind}.json").write_text(dashboard(kind))


if __name__ == "__main__":
    main()
