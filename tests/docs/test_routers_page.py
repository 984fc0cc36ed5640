"""The page of routers names releases, commands and tests that exist. tests/vllm/test_routers.py runs it with vLLM."""

import json
import re
import shlex

from kvflow.tools.cli import build_parser
from tests.helpers.loops import looped
from tests.vllm.replaying import facts

from .pages import ROOT, blocks, require_test
from .reference_tables import VERDICTS

PAGE = "docs/howto/routers.md"
REQUIRED = ROOT / "tests" / "vllm" / "requirements-routers.txt"
FACTS = facts()
KEYS = {"router", "order", "version", "source", "how", "router_settings", "kvflow_settings", "shown"}
REPLAYED_KEYS = {"derived", "transcript", "engines", "recorded"}
NAMED = sorted({test for each in FACTS.values() for row in each["shown"] for test in row["test"].split(", ") if test})


def commands(program):
    return [shlex.split(block) for block in blocks(PAGE, "sh") if block.startswith(f"{program} ")]


def test_the_page_names_the_releases_that_tests_run():
    required = re.findall(r"^[a-z-]+==[0-9.]+$", REQUIRED.read_text(), re.MULTILINE)
    assert [words[-1] for words in commands("pip install") if "ray[llm]==2.60.0" not in words] == required
    for name, release in (each.split("==") for each in required):
        told = json.loads((ROOT / "tests" / "data" / "routers" / f"{name}.json").read_text())
        assert (told["router"], told["version"]) == (name, release)


def test_the_proxy_understands_its_arguments():
    [words] = commands("kvflow proxy")
    build_parser().parse_args(words[1:])


@looped("name", FACTS)
def test_every_fact_of_a_router_is_there(name):
    each = FACTS[name]
    further = REPLAYED_KEYS if each["how"] == "replayed" else set()
    assert each["how"] in ("run", "replayed")
    assert KEYS <= set(each) <= KEYS | further
    assert [row["what"] for row in each["shown"]] == list(dict.fromkeys(row["what"] for row in each["shown"]))
    for row in each["shown"]:
        assert set(row) == {"what", "verdict", "note", "test"}
        assert row["verdict"] in VERDICTS
        assert row["test"] or row["verdict"] == "no"
        assert row["note"] or row["verdict"] not in ("otherwise", "refused")


@looped("test", NAMED)
def test_a_test_that_is_named_is_there(test):
    require_test(test)
