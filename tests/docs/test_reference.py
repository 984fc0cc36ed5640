"""What exists is documented: settings, events, errors, metrics and flags, as the code describes them."""

import re
from pathlib import Path

import pytest

from kvflow.integrations.vllm.settings import OWN_KEYS
from kvflow.observability.logs import LEVELS, logger_of
from kvflow.report import PHASES, TransferReport
from tests.helpers.loops import looped

from . import planning_tables, reference_tables
from .pages import section
from .reference_tables import PARITY, PARTS, REFERENCE, Proof, event_name, page


@looped("name", PARTS)
def test_generated_parts_are_current(name):
    """If one differs: ``make docs``, and read what changed."""
    assert (REFERENCE / name).read_text() == page(name)


def test_the_tables_of_planning_are_those_of_the_planner():
    """If they differ: ``python -m tests.docs.planning_tables``, and read what changed."""
    text = planning_tables.PAGE.read_text()
    assert text == planning_tables.with_tables(text)


def test_settings_of_the_connector_of_vllm_are_documented():
    rows = re.findall(r"^\| `(\w+)` \|", section("docs/reference/config.md", "The connector of vLLM"), re.MULTILINE)
    assert set(rows) == OWN_KEYS


@looped("kind", LEVELS)
def test_docstrings_of_events_describe_every_field(kind):
    assert logger_of(kind).name == f"kvflow.{event_name(kind).partition('.')[0]}", "as the page says"
    assert list(reference_tables.attributes(kind)) == list(kind.__struct_fields__)


def test_fields_and_phases_of_a_report_are_documented():
    assert set(reference_tables.attributes(TransferReport)) == set(TransferReport.__dataclass_fields__)
    assert list(reference_tables.phases()) == [f"{phase}_s" for phase in (*PHASES, "total")]


def test_every_flag_and_command_has_a_meaning():
    flags = re.findall(r"^- `-.*", (REFERENCE / "cli.md").read_text(), re.MULTILINE)
    assert len(flags) > 50
    assert [line for line in flags if not re.search(r"`: \w", line)] == []


@pytest.mark.parametrize(
    ("named", "source", "said"),
    [
        ("test_a.py", '@pytest.mark.proves("telepathy", engine="real")\ndef test_a(): ...', "unknown row: `telepathy`"),
        ("test_a.py", '@pytest.mark.proves("EFA")\nasync def test_a(): ...', "test_a.py::test_a: the engine is one of"),
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


def prove(monkeypatch, *proofs, usual, full):
    """Have these proofs of EFA alone, and these tests in the two runs."""
    monkeypatch.setattr(reference_tables, "proofs", lambda: dict.fromkeys(PARITY, ()) | {"EFA": proofs})
    monkeypatch.setattr(reference_tables, "started", lambda run, _files: {"usual": usual, "full": full}[run])


def test_a_row_without_a_test_says_so(monkeypatch):
    prove(monkeypatch, usual={}, full={})
    assert reference_tables.parity().count("| no test |") == len(PARITY) > 20


A = "vllm/test_a.py::test_a"


@pytest.mark.parametrize(
    ("pairs", "usual", "rare"),
    [
        ("", {A: [""]}, False),
        ("", {}, True),
        ("-turned", {A: ["llama", "granite-turned"]}, False),
        ("-turned", {A: ["llama", "granite"]}, True),
    ],
)
def test_what_only_the_full_run_starts_says_so(monkeypatch, pairs, usual, rare):
    proof = Proof("real", "test_a", Path("vllm/test_a.py"), pairs)
    prove(monkeypatch, proof, usual=usual, full={A: ["", "llama", "granite-turned"]})
    (row,) = (line for line in reference_tables.parity().splitlines() if line.startswith("| EFA |"))
    assert row.endswith(f"| real: [test_a](../../tests/vllm/test_a.py){' (full run only)' if rare else ''} |")


@pytest.mark.parametrize("full", [{}, {A: []}, {A: ["llama"]}])
def test_a_proof_that_no_run_starts_is_named(monkeypatch, full):
    prove(monkeypatch, Proof("real", "test_a", Path("vllm/test_a.py"), "-turned"), usual={}, full=full)
    with pytest.raises(AssertionError, match=r"test_a.py::test_a: no run starts it with a pair that has '-turned'"):
        reference_tables.parity()


def test_what_a_run_leaves_out_by_file_by_mark_and_by_pair_is_not_started():
    files = reference_tables.files_with_vllm(proof for shown in reference_tables.proofs().values() for proof in shown)
    usual, full = (reference_tables.started(run, files) for run in reference_tables.RUNS)
    gone = {test.partition("::")[0] for test in full} - {test.partition("::")[0] for test in usual}
    assert {"vllm/test_cached.py", "vllm/test_drafts.py", "vllm/test_events.py"} <= gone
    assert "vllm/test_tokens.py" not in gone
    test = "vllm/test_tokens.py::test_two_engines_say_what_one_says"
    assert "granite-ranks-2-to-1" in usual[test]
    assert "llama-32-to-128" in set(full[test]) - set(usual[test])
