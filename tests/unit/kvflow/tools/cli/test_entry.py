"""Every command explains itself, prints JSON, ends with a documented status, and says why it fails."""

import argparse
import io
import json
import re
import shlex
import sys

import pytest

from kvflow.tools.cli import INTERRUPTED, build_parser, main
from kvflow.tools.demo.__main__ import build_parser as build_engine_parser
from tests.helpers.loops import looped

SERVERS = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


def commands(parser, name="kvflow"):
    """Yield every command below one, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield f"{name} {word}", command
                yield from commands(command, f"{name} {word}")


def examples(parser):
    """Return the command lines in the help of a command."""
    heading, *lines = parser.epilog.splitlines()
    assert heading in ("example:", "examples:")
    return [line.strip() for line in lines]


@looped("name, parser", [*commands(build_parser())])
def test_every_command_has_a_description_and_an_example_that_parses(name, parser):
    assert parser.description.endswith(".")
    for example in examples(parser):
        assert f"{name} " in f"{example} "
        command = example.strip("()").rpartition(";")[2].partition(">")[0].partition("<")[0]
        assert build_parser().parse_args(shlex.split(command)[1:]).run
        assert f"  {example}\n" in parser.format_help()


WORDS = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
WITHOUT_RESULTS = {"kvflow keys secret", "kvflow keys pair", "kvflow keys public", "kvflow proxy"}
"""Commands that print variables or an address, for programs already."""


def flags(parser):
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


@looped("name, parser", [*commands(build_parser()), ("python -m kvflow.tools.demo", build_engine_parser())])
def test_commands_and_flags_are_kebab_case(name, parser):
    assert WORDS.fullmatch(name.split()[-1].rpartition(".")[2])
    assert [flag for flag in flags(parser) if not WORDS.fullmatch(flag.removeprefix("--"))] == []


@looped("name, parser", [*commands(build_parser())])
def test_commands_with_results_print_them_as_json(name, parser):
    has_subcommands = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    assert ("--json" in flags(parser)) == (not has_subcommands and name not in WITHOUT_RESULTS)


FREE_PORT = "127.0.0.1:1"
SECRET = "a secret of thirty-two characters"
ENDINGS = [
    ("layout llama-3.1-8b --json", 0),
    ("layout no-such-model", 2),
    ("explain llama-3.1-8b --json", 0),
    ("explain llama-3.1-8b --source kv=none", 2),
    (f"explain --from {FREE_PORT} --from {FREE_PORT} --json", 1),
    ("explain", 2),
    (f"inspect {FREE_PORT} --json", 1),
    ("inspect tcp://", 2),
    ("ticket nonsense --json", 1),
    ("ticket --file no-such-file", 2),
    ("config --file no-such-file", 2),
    ("trace no-such-file", 2),
    ("trace empty-file", 1),
    ("keys secret", 0),
    ("keys public", 2),
    (f"bench pull --source {FREE_PORT} --json", 1),
    ("bench pull --rounds 0", 2),
    (f"demo --prefill {FREE_PORT}", 2),
    ("proxy", 2),
    (f"doctor {FREE_PORT} --json", 1),
    ("doctor tcp://", 2),
    ("no-such-command", 2),
]


@pytest.fixture
def member(monkeypatch, tmp_path):
    """A member of a cluster in an empty folder, with nothing on standard input."""
    monkeypatch.setenv("KVFLOW_CLUSTER_SECRET", SECRET)
    monkeypatch.setattr("kvflow.tools.cli.small.SOURCE_START_S", 0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("empty-file").touch()


def status_of(arguments):
    try:
        return main(shlex.split(arguments))
    except SystemExit as ended:  # argparse ends the program
        return ended.code


@pytest.mark.usefixtures("member")
@pytest.mark.parametrize(("arguments", "status"), ENDINGS)
def test_commands_end_with_the_status_that_is_documented(arguments, status, capsys):
    assert status_of(arguments) == status
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "\x1b" not in printed.err, "no progress without a terminal"
    if status:
        assert printed.err or "findings" in printed.out
    if "--json" in arguments and printed.out:
        json.loads(printed.out)


def test_every_command_has_an_ending():
    ended = {word for arguments, _ in ENDINGS for word in arguments.split()[:1]}
    assert {name.split()[1] for name, _ in commands(build_parser())} <= ended


@pytest.mark.usefixtures("member")
def test_ctrl_c_is_a_status_without_a_traceback(monkeypatch, capsys):
    class Interrupted(io.BytesIO):
        def read(self, size=-1):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted()))
    assert main(["ticket"]) == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("member")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("explain gpt-2 --target tp=2", "trying change 1 of "),
        ("trace long-file", "10,000 lines of 1 of 1 file"),
    ],
)
def test_long_work_shows_progress_on_a_terminal_only(arguments, shown, capsys, monkeypatch, tmp_path):
    tmp_path.joinpath("long-file").write_text("{}\n" * 10_000)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        for as_json in ("", " --json"):
            status_of(arguments + as_json)
            printed = capsys.readouterr()
            assert (shown in printed.err) == (is_terminal and not as_json)
            assert ("\r\x1b[K" in printed.err) == (is_terminal and not as_json)
            assert "\x1b" not in printed.out


def test_a_log_that_cannot_be_written_is_named(capsys, tmp_path):
    path = tmp_path / "no such folder" / "proxy.jsonl"
    assert main(["proxy", *SERVERS, "--log", str(path)]) == 2
    assert capsys.readouterr().err == f"kvflow proxy: --log {path} cannot be written: No such file or directory\n"
