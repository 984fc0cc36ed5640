"""``python -m tests.docs.alerts``: write the rules of Prometheus, and their table in docs/howto/monitor.md.

One rule is one query for the metrics of a worker (``kvflow_...``), and one for those of a vLLM server
(``vllm:kvflow_...``), which has no metric for some rules.
"""

import re
from dataclasses import dataclass

import yaml

from .pages import ROOT

RULES = ROOT / "docker" / "grafana" / "rules"
PAGE = ROOT / "docs" / "howto" / "monitor.md"
GENERATED = re.compile(r"(?<=<!-- generated: alerts -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)

# A request that its client gives up is no failure of a transfer.
FAILURES = '{code!="transfer_cancelled"}'
NOT_READ = '{outcome=~"expired|unread"}'


@dataclass(frozen=True)
class Rule:
    """An alert, or without ``says`` a series that an alert compares.

    Attributes:
        name: of the alert.
        says: what is wrong.
        do: what to look at first, with a link from docs/howto.
        worker: query for metrics of workers; empty: they have none for it.
        vllm: query for metrics of vLLM servers; likewise.
        wait: how long the query must hold.
    """

    name: str
    says: str = ""
    do: str = ""
    worker: str = ""
    vllm: str = ""
    wait: str = "5m"


def counted(series: str, by: str) -> str:
    """Return the query for how much a counter has counted in ten minutes.

    Engines serve no series before its first count, which ``increase`` does not see.
    """
    return f"sum by ({by}) ({series} unless {series} offset 10m or increase({series}[10m]))"


def idle(total: str, series: str, asked: str) -> str:
    """Return the query for a total that is asked for something, and has transferred today, but not lately."""
    lately, today = (f"{total} (increase({series}[{window}]))" for window in ("15m", "1d"))
    return f"({lately} == 0) and ({today} > 0) and ({total} ({asked}) > 0)"


ALERTS = (
    Rule(
        "KvflowDown",
        "Prometheus cannot scrape an engine.",
        "Look whether its process runs, and at the end of its log.",
        worker='up{job="kvflow"} == 0',
        vllm='up{job="vllm"} == 0',
        wait="2m",
    ),
    Rule(
        "KvflowTransfersFail",
        "More than five transfers have failed for one reason in ten minutes.",
        "The code names the cause and the remedy: [Pulls fail](debug.md#pulls-fail).",
        worker=counted(f"kvflow_failed_pulls_total{FAILURES}", by="instance, code") + " > 5",
        vllm=counted(f"vllm:kvflow_failed_transfers_total{FAILURES}", by="instance, code") + " > 5",
    ),
    Rule(
        "KvflowPromptsNotRead",
        "More than five prompts were prefilled, and nobody has read them in time.",
        "Look whether the router sends tickets to decode engines, and whether these reach `advertise`.",
        worker=counted(f"kvflow_ended_leases_total{NOT_READ}", by="instance") + " > 5",
        vllm=counted(f"vllm:kvflow_leases_ended_total{NOT_READ}", by="instance") + " > 5",
    ),
    Rule(
        "KvflowNothingTransferred",
        "Bytes were transferred today, but none for 15 minutes, though prompts were offered "
        "(vLLM: though this engine was busy).",
        "[Requests succeed, and nothing is transferred](debug.md#requests-succeed-and-nothing-is-transferred).",
        worker=idle("sum", "kvflow_pull_bytes_count", "increase(kvflow_ended_leases_total[15m])"),
        vllm=idle("sum by (instance)", "vllm:kvflow_transfer_bytes_count", "vllm:num_requests_running"),
        wait="10m",
    ),
    Rule(
        "KvflowBlocksInQuarantine",
        "Blocks have been in quarantine for 15 minutes, because a read from a hung peer may still write into them.",
        "[`kvflow inspect`](debug.md#what-a-worker-does-now) names the peer. Restart it, or this worker.",
        worker="sum by (instance) (kvflow_quarantined_blocks) > 0",
        wait="15m",
    ),
    Rule(
        "KvflowSourceLate",
        "One in five questions for the beginnings of prompts was answered too late.",
        "Look whether the cores of the engines in `sources` are busy, or raise `find_s`.",
        vllm='sum by (instance) (rate(vllm:kvflow_prefixes_total{outcome="late"}[10m])) '
        "> 0.2 * sum by (instance) (rate(vllm:kvflow_prefixes_total[10m]))",
        wait="10m",
    ),
    Rule(
        "KvflowDefect",
        "kvflow has caught an exception of its own.",
        "Nothing is lost but that request. Report the traceback in the log.",
        vllm=counted("vllm:kvflow_defects_total", by="instance, method") + " > 0",
        wait="0m",
    ),
    Rule(
        "KvflowPullsTakeLong",
        "One pull in a hundred takes longer than five seconds.",
        "Look for the longest phase: [Pulls are slow](debug.md#pulls-are-slow).",
        worker="histogram_quantile(0.99, sum by (peer, le) (rate(kvflow_pull_seconds_bucket[5m]))) > 5",
        vllm="histogram_quantile(0.99, sum by (instance, le) (rate(vllm:kvflow_transfer_seconds_bucket[5m]))) > 5",
    ),
    Rule(
        "kvflow:pull_bytes_per_second",
        worker="sum by (peer) (rate(kvflow_pull_bytes_sum[5m]))"
        " / (sum by (peer) (rate(kvflow_pull_seconds_sum[5m])) > 0)",
        vllm="sum by (instance) (rate(vllm:kvflow_transfer_bytes_sum[5m]))"
        " / (sum by (instance) (rate(vllm:kvflow_transfer_seconds_sum[5m])) > 0)",
    ),
    Rule(
        "KvflowReadsSlowly",
        "Bytes arrive at less than a tenth of the last day's rate, the time in which pulls wait included.",
        "[Pulls are slow](debug.md#pulls-are-slow).",
        worker="kvflow:pull_bytes_per_second < 0.1 * avg_over_time(kvflow:pull_bytes_per_second[1d])",
        vllm="kvflow:pull_bytes_per_second < 0.1 * avg_over_time(kvflow:pull_bytes_per_second[1d])",
        wait="10m",
    ),
)


def plain(text: str) -> str:
    """Return a text of the page without its links and its marks of code."""
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).replace("`", "")


def rules(queries: str) -> str:
    """Return the file of rules for one kind of metrics, ``worker`` or ``vllm``."""
    made: list[dict[str, object]] = []
    for rule in ALERTS:
        if query := getattr(rule, queries):
            if rule.says:
                notes = {"summary": plain(rule.says), "description": plain(rule.do)}
                made.append({"alert": rule.name, "expr": query, "for": rule.wait, "annotations": notes})
            else:
                made.append({"record": rule.name, "expr": query})
    group = {"groups": [{"name": f"kvflow-{queries}", "rules": made}]}
    head = "# Written by `make docs` from tests/docs/alerts.py, for the metrics of "
    head += "workers with `http`.\n" if queries == "worker" else "vLLM servers, scraped as job `vllm`.\n"
    return head + str(yaml.safe_dump(group, sort_keys=False, width=1000))


def table() -> str:
    """Return the table of the page."""
    rows = ["| alert | what is wrong | what to do |", "|---|---|---|"]
    for rule in ALERTS:
        if rule.says:
            only = " (`http` only)" if not rule.vllm else " (vLLM only)" if not rule.worker else ""
            rows.append(f"| `{rule.name}`{only} | {rule.says} | {rule.do} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the files."""
    RULES.mkdir(exist_ok=True)
    for queries in ("worker", "vllm"):
        (RULES / f"{queries}.yaml").write_text(rules(queries))
    PAGE.write_text(GENERATED.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
