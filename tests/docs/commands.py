"""Checks commands of the documentation without running them: programs, options, targets, files and packages exist."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from kvflow.tools.cli import build_parser

from .pages import ROOT, Block

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER_PROGRAMS = {"cat", "cd", "curl", "echo", "export", "grep", "head", "kubectl", "ray", "rm", "serve", "timeout"}
OTHER_PROGRAMS |= {"ibv_devinfo", "ls", "lsmod", "nvidia-smi", "ulimit", "zip"}
"""Programs whose arguments only the shell checks here."""


def check_commands(block: Block) -> None:
    """Check every command of a block.

    Raises:
        AssertionError: the shell or the program does not understand a command, or a name in it does not exist.
    """
    text = without_prompts(block.text)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert not checked.stderr, f"{block}: {checked.stderr}"
    for words in commands(text):
        check_command(words)


def without_prompts(text: str) -> str:
    """Return the commands of a block without the prompts before them."""
    return re.sub(r"^\$ ", "", text, flags=re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a block as lists of arguments, without comments, variables and redirections."""
    for line in _lines(text):
        words: list[str] = []
        plain = re.sub(r"\d?[<>]+ *\S+(?=\s)", "", line) if "'" not in line else line
        for word in [*shlex.split(plain, comments=True), ";"]:
            if word in {";", "|", "||", "&&"}:
                if words:
                    yield words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a block. A backslash or an open quote continues a line."""
    line = ""
    for part in text.splitlines():
        line += part + "\n"
        if not part.endswith("\\") and line.count("'") % 2 == 0:
            yield line.replace("\\\n", " ")
            line = ""


def check_command(words: list[str]) -> None:
    """Check one command, as a list of arguments."""
    program, arguments = words[0].rpartition("/")[2], words[1:]
    match program:
        case "kvflow":
            _check_kvflow(arguments)
        case "make":
            _check_make(arguments)
        case "python":
            assert arguments[0] == "-m", words
            _check_module(arguments[1], arguments[2:])
        case "pip":
            _check_pip(arguments)
        case "docker":
            _check_docker(arguments)
        case _:
            assert program in OTHER_PROGRAMS, f"the test does not know the program {program}"


def _check_kvflow(arguments: list[str]) -> None:
    try:
        build_parser().parse_args(arguments)
    except SystemExit as ended:
        assert ended.code == 0, arguments  # noqa: PT017


def _check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        if assigned:
            assert f"$${{{name}:" in MAKEFILE, f"make does not read {name}"
        else:
            assert name in targets, f"make has no target {name}"


def _check_module(module: str, arguments: list[str]) -> None:
    path = ROOT / module.replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for argument in arguments:
        if argument.startswith("-"):
            assert f'"{argument.partition("=")[0]}"' in source, f"{module} does not know {argument}"


def _check_pip(arguments: list[str]) -> None:
    if arguments[0] == "download":
        *options, dest, folder = arguments[1 : arguments.index("--dest") + 2]
        assert (options[:2], dest, folder) == (["--no-deps", "--only-binary=:all:"], "--dest", "wheels"), arguments
        assert set(options[2::2]) == {"--python-version", "--platform"}, options
        assert all(Requirement(each) for each in arguments[arguments.index(folder) + 1 :])
        return
    assert arguments[0] == "install", arguments
    flags = [argument for argument in arguments if argument.startswith("-")]
    assert set(flags) <= {"--index-url", "--no-deps"}, flags
    for argument in arguments[1:]:
        if argument.startswith(("-", "https://")):
            continue
        named = "kvflow" + argument[1:] if argument.startswith(".") else argument
        requirement = Requirement(named)
        if requirement.name == "kvflow":
            assert requirement.extras <= PROJECT["optional-dependencies"].keys(), argument


def _check_docker(arguments: list[str]) -> None:
    if arguments[0] == "build":
        file = Path(arguments[arguments.index("--file") + 1])
        known = set(re.findall(r"^ARG (\w+)", (ROOT / file).read_text(), re.MULTILINE))
        given = [value for flag, value in pairwise(arguments) if flag == "--build-arg"]
        assert given
        assert {each.partition("=")[0] for each in given} <= known
    elif arguments[0] == "run":
        assert arguments[-1] == "kvflow:cuda", "the image that docs/howto/deploy.md builds"
    elif arguments[0] == "compose":
        _check_compose(arguments[1:])
    else:
        assert arguments[:2] == ["rm", "--force"], arguments


def _check_compose(arguments: list[str]) -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    assert arguments[0] == "--profile"
    assert arguments[1] in profiles
    if arguments[2] == "run":
        place, command = next((place, word) for place, word in enumerate(arguments) if word in services)
        assert arguments[1] in services[command]["profiles"]
        if arguments[place + 1 :]:  # else that of the service
            check_command(arguments[place + 1 :])
        return
    while arguments[0] == "--profile":
        assert arguments[1] in profiles
        arguments = arguments[2:]
    if arguments[:2] == ["up", "--detach"]:
        assert set(arguments[2:]) <= services.keys()
    else:
        assert arguments == ["down", "--volumes"], arguments
