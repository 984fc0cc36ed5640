"""What exists is documented: settings, events, errors, metrics and flags, as the code describes them."""

import re
from pathlib import Path

import pytest

from kvflow.integrations.vllm.settings import OWN_KEYS
from kvflow.observability.logs import LEVELS, logger_of
from kvflow.report import TransferReport

from . import reference_tables
from .reference_tables import PARTS, event_name, page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def section(page, heading):
    """Return the text under a heading of level two."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/{page} has no section {heading!r}"
    return found[1]


@pytest.mark.parametrize("name", PARTS)
def test_generated_parts_are_current(name):
    """If one differs: ``make docs``, and read what changed."""
    assert (REFERENCE / name).read_text() == page(name)


def test_settings_of_the_connector_of_vllm_are_documented():
    rows = re.findall(r"^\| `(\w+)` \|", section("config.md", "The connector of vLLM"), re.MULTILINE)
    assert set(rows) == OWN_KEYS


@pytest.mark.parametrize("kind", LEVELS, ids=event_name)
def test_docstrings_of_events_describe_every_field(kind):
    assert logger_of(kind).name == f"kvflow.{event_name(kind).partition('.')[0]}", "as the page says"
    assert list(reference_tables.attributes(kind)) == list(kind.__struct_fields__)
    named = re.findall(r"`(\w+)`", section("events.md", event_name(kind)))
    assert set(kind.__struct_fields__) <= set(named)


def test_fields_and_phases_of_a_report_are_documented():
    reported = set(TransferReport.__dataclass_fields__)
    assert set(reference_tables.attributes(TransferReport)) == reported
    named = set(re.findall(r"`(\w+)`", section("events.md", "transfer.completed")))
    assert reported - {"timings_s"} <= named
    assert len(reference_tables.phases()) == 9
    assert set(reference_tables.phases()) <= named


def test_every_flag_and_command_has_a_meaning():
    flags = re.findall(r"^- `-.*", (REFERENCE / "cli.md").read_text(), re.MULTILINE)
    assert len(flags) > 50
    assert [line for line in flags if not re.search(r"`: \w", line)] == []


@pytest.mark.parametrize(
    ("named", "source", "said"),
    [
        ("test_a.py", '@pytest.mark.proves("telepathy", engine="real")\ndef test_a(): ...', "unknown row: `telepathy`"),
        ("test_a.py", '@pytest.mark.proves("EFA")\nasync def test_a(): ...', "test_a.py::test_a: the engine is one of"),
        ("test_a.py", '@pytest.mark.proves("EFA", engine="bytes", pairs="x-")\ndef test_a(): ...', "no pair of"),
        ("test_a.py", '@pytest.mark.proves("EFA", engine="bytes", pair="x")\ndef test_a(): ...', "unknown `pair`"),
        ("test_a.py", '@pytest.mark.proves(engine="bytes")\ndef test_a(): ...', "names no row"),
        ("test_a.py", '@pytest.mark.proves("EFA", engine="bytes")\ndef helper(): ...', "stands at no test"),
        ("helper.py", '@pytest.mark.proves("EFA", engine="bytes")\ndef test_a(): ...', "stands at no test"),
    ],
)
def test_a_marker_that_proves_nothing_is_named(tmp_path, named, source, said):
    (tmp_path / named).write_text(source)
    with pytest.raises(AssertionError, match=said):
        reference_tables.proofs(tmp_path)


def test_a_row_without_a_test_says_so(monkeypatch):
    monkeypatch.setattr(reference_tables, "proofs", lambda: {row: [] for row in reference_tables.PARITY})
    assert reference_tables.parity().count("| no test |") == len(reference_tables.PARITY) > 20


def test_a_missing_section_is_noticed():
    with pytest.raises(AssertionError, match="has no section"):
        section("config.md", "Nothing")
