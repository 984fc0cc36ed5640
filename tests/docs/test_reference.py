"""What exists is documented: settings, events, errors and flags, each in a row of its table."""

import argparse
import inspect
import re
from pathlib import Path

import msgspec
import pytest

import handshake.errors
import kvflow.errors
from handshake.limits import Limits
from kvflow.config import WorkerConfig
from kvflow.events import event_name
from kvflow.integrations.vllm.settings import OWN_KEYS
from kvflow.observability.logs import LEVELS
from kvflow.report import TransferReport
from kvflow.tools.cli.entry import build_parser
from kvflow.tools.demo.__main__ import build_parser as build_engine_parser

from . import events_page
from .reference_tables import TABLES, with_tables

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def section(page, heading):
    """Return the text under a heading of level two."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/{page} has no section {heading!r}"
    return found[1]


def rows(text):
    """Return the tables of a text, by the first cell without its marks: the other cells."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def errors_of(module, base):
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)]
    assert len(found) > 5
    return found


@pytest.mark.parametrize(("heading", "kind"), [("WorkerConfig", WorkerConfig), ("handshake.Limits", Limits)])
def test_settings_and_their_defaults_are_documented(heading, kind):
    documented = rows(section("config.md", heading))
    for field in msgspec.structs.fields(kind):
        given = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = "required" if field.required else f"`{given!r}`".replace("'", '"')
        assert documented[field.encode_name][0] == default, field.name


def test_no_setting_is_documented_that_is_not_there():
    documented = {name for name in rows(section("config.md", "WorkerConfig")) if name.isidentifier()}
    assert documented - {"setting"} == set(WorkerConfig.__struct_fields__)


def test_settings_of_the_connector_of_vllm_are_documented():
    assert set(rows(section("config.md", "The connector of vLLM"))) - {"setting", "---"} == OWN_KEYS


def test_events_are_documented_as_in_their_docstrings():
    assert events_page.page() == events_page.PAGE.read_text(), "run: python -m tests.docs.events_page"


@pytest.mark.parametrize("kind", LEVELS, ids=event_name)
def test_docstrings_of_events_describe_every_field(kind):
    assert list(events_page.attributes(kind)) == list(kind.__struct_fields__)
    documented = rows(section("events.md", event_name(kind)))
    assert set(kind.__struct_fields__) <= set(documented)


def test_fields_and_phases_of_a_report_are_documented():
    reported = set(TransferReport.__dataclass_fields__)
    assert set(events_page.attributes(TransferReport)) == reported
    documented = rows(section("events.md", "transfer.completed"))
    assert reported - {"timings_s"} <= set(documented)
    assert len(events_page.phases()) == 9
    assert set(events_page.phases()) <= set(documented)


@pytest.mark.parametrize(
    ("module", "base"),
    [(kvflow.errors, kvflow.errors.KvflowError), (handshake.errors, handshake.errors.HandshakeError)],
    ids=["kvflow", "handshake"],
)
def test_errors_are_documented_with_code_and_remedy(module, base):
    text = section("errors.md", module.__name__)
    for error in errors_of(module, base):
        row = f"| `{error.__name__}` | `{error.code}` | `{error.__mro__[1].__name__}` |"
        lines = [line for line in text.splitlines() if line.startswith(row)]
        assert len(lines) == 1, row
        assert error.default_remedy in lines[0]


def test_refusals_are_documented():
    assert set(handshake.errors.FailureCode) <= set(rows(section("errors.md", "Refusals")))
    codes = {error.code for error in errors_of(kvflow.errors, kvflow.errors.KvflowError)}
    causes = set(kvflow.errors.FailureCode) - codes
    assert causes <= set(rows(section("errors.md", "Codes of failed transfers")))


def actions(parser):
    """Return the flags of one parser, without its subcommands."""
    return [action for action in parser._actions if action.option_strings]


def commands(parser, name="kvflow"):
    """Yield every command with its parser, subcommands included."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from commands(command, f"{name} {word}")


@pytest.mark.parametrize(
    ("name", "parser"), [*commands(build_parser()), ("python -m kvflow.tools.demo", build_engine_parser())]
)
def test_flags_are_documented_with_defaults(name, parser):
    documented = rows(section("cli.md", name))
    for action in actions(parser):
        cells = documented["`, `".join(action.option_strings)]
        meaning = re.sub(r" \(default: .*\)$| \[KVFLOW_\w+\]$", "", action.help)
        assert cells[-1].startswith(meaning)
        if action.nargs != 0 and action.default is not None:
            assert f"`{action.default}`" in cells


def test_variables_of_the_engines_are_documented():
    documented = set(re.findall("KVFLOW_DEMO_[A-Z_]+", section("cli.md", "python -m kvflow.tools.demo")))
    assert documented == set(re.findall("KVFLOW_DEMO_[A-Z_]+", build_engine_parser().format_help()))


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_are_current(name):
    """If one differs: ``python -m tests.docs.reference_tables``."""
    assert (REFERENCE / name).read_text() == with_tables(name)


def test_a_missing_row_is_noticed():
    text = "| setting | default |\n|---|---|\n| `rank` | `0` |\n"
    assert rows(text)["rank"] == ["`0`"]
    assert "num_ranks" not in rows(text)
    with pytest.raises(AssertionError, match="has no section"):
        section("config.md", "Nothing")
