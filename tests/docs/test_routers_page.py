"""The page of routers is what tests/data/routers says, and the tests that it names are there."""

import re
from pathlib import Path

import pytest

from tests.vllm.replaying import facts

from .routers_page import PAGE, VERDICTS, page

ROOT = Path(__file__).parents[2]
FACTS = facts()
KEYS = {"router", "order", "version", "source", "how", "router_settings", "kvflow_settings", "shown"}
REPLAYED_KEYS = {"derived", "transcript", "engines", "recorded"}
NAMED = sorted({test for each in FACTS.values() for row in each["shown"] for test in row["test"].split(", ") if test})


def test_the_page_is_what_is_known_of_the_routers():
    """If they differ: ``PYTHONPATH=. python -m tests.docs.routers_page``, and read what changed."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", FACTS)
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


def test_rows_are_in_an_order():
    orders = [each["order"] for each in FACTS.values()]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_the_page_names_is_there(test):
    path, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
