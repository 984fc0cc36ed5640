"""``kvflow completion``: a real bash completes every command and flag with the script."""

import shlex
import shutil
import subprocess

import pytest

from kvflow.tools.cli.entry import build_parser, main

from .test_entry import commands


@pytest.fixture
def complete(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def run(*words):
        given = " ".join(map(shlex.quote, ("kvflow", *words)))
        text = f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words)}; _kvflow; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return set(done.stdout.split())

    return run


def test_every_command_and_flag_is_offered(complete):
    for name, parser in commands(build_parser()):
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert flags <= complete(*name.split()[1:], "-")


def test_commands_are_offered_at_their_place(complete):
    assert {"ticket", "ping", "inspect", "keys"} <= complete("")
    assert complete("ti") == {"ticket"}
    assert complete("keys", "p") == {"pair", "public"}
    assert complete("bench", "pull", "--ro") == {"--rounds"}


def test_values_of_a_flag_are_offered_behind_it(complete):
    assert "BHLNC" in complete("layout", "llama-3.1-8b", "--layout", "B")
    assert complete("completion", "") >= {"bash", "zsh"}


def test_the_script_for_zsh_is_that_for_bash_with_a_beginning(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert main(["completion", "bash"]) == 0
    assert script.endswith(capsys.readouterr().out)
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True)
