"""docs/reference/routers.md: what is known of each router, from tests/data/routers.

    PYTHONPATH=. .venv/bin/python -m tests.docs.routers_page

writes the page.
"""

from pathlib import Path
from typing import Any

from tests.vllm.replaying import facts

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "routers.md"
VERDICTS = {"works": "yes", "otherwise": "otherwise", "refused": "refused", "no": "no", "": ""}
COLUMNS = ("completions", "chat", "stream", "n=2", "concurrent", "prefill fails")

INTRODUCTION = """\
# Routers

This page lists routers for disaggregated prefill, and what kvflow needs behind each. It is generated from
`tests/data/routers`; a test fails if the two differ, or if a named test does not exist.

*Run*: the tests start the router itself before two `vllm serve` with `KVFlowConnector`. *Replayed*: the router cannot
be installed where the tests run. Instead, the tests send a transcript of its requests, derived from its source with the
lines behind each step, to the same servers. A replay writes JSON as the router does: Go sorts keys and turns every
number into a double, and some routers write `remote_host` themselves.

*Yes* means that a test has seen both of these:

- The tokens are those of one `vllm serve` without a connector.
- The cache has moved. `vllm:kvflow_transfer_seconds_count` and `vllm:kvflow_transfer_bytes_sum` of the decode engine
  have grown by the number of the prompts and by their bytes. `vllm:kvflow_leases_ended_total` of the prefill engine,
  with `outcome="released"`, has grown by their number.

*Refused* means that the client gets an error, and *otherwise* that it gets an answer in another way; the note explains
it. An empty cell was not tested.

Equal tokens without a transfer are a failure. If a router asks for no ticket, both engines compute every prompt, and
the tokens are still equal. To check that your deployment moves caches, look at the same three metrics.
"""


def cell(shown: dict[str, dict[str, Any]], what: str) -> str:
    return VERDICTS[shown.get(what, {"verdict": ""})["verdict"]]


def overview(known: list[dict[str, Any]]) -> str:
    heads = ("router", "version", "how", *COLUMNS)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in known:
        shown = {row["what"]: row for row in each["shown"]}
        cells = [cell(shown, what) for what in COLUMNS]
        version = f"[{each['version']}]({each['source']})"
        lines.append(f"| {' | '.join([each['router'], version, each['how'], *cells])} |")
    return "\n".join(lines)


def settings(title: str, told: list[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {each}" for each in told or ["nothing"])])


def section(each: dict[str, Any]) -> str:
    """Return what is known of one router."""
    rows = ["| what | works | how it was seen |", "|---|---|---|"]
    for row in each["shown"]:
        tests = ", ".join(f"`{test}`" for test in row["test"].split(", ") if test)
        rows.append(f"| {row['what']} | {VERDICTS[row['verdict']]} | {'; '.join(filter(None, (row['note'], tests)))} |")
    parts = [
        f"## {each['router']}",
        settings("Set on the router", each["router_settings"]),
        settings("Set for kvflow", each["kvflow_settings"]),
        "\n".join(rows),
    ]
    if each["how"] == "replayed":
        derived = each["derived"]
        notes = "".join(f" {note[0].upper()}{note[1:]}." for note in derived["notes"])
        parts.append(f"Derived from `{derived['repository']}`, {derived['commit']}.{notes}")
    return "\n\n".join(parts)


def page() -> str:
    """Return the page as it must be."""
    known = sorted(facts().values(), key=lambda each: each["order"])
    return "\n".join([INTRODUCTION, overview(known), "", "\n\n".join(map(section, known)), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
