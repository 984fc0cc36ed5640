"""``kvflow completion``: a script with which a shell completes the commands and flags of kvflow."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvflow.tools.cli.arguments import add_command

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

SHELLS = ("bash", "zsh")

BASH = """\
_kvflow() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="kvflow" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$command $word" in
{commands}
        esac
    done
    case "$command $previous" in
{values}
    esac
    case "$command" in
{offers}
    esac
}}
complete -F _kvflow kvflow
"""

ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""Has zsh complete as bash does."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``completion`` to the command line."""
    parser = add_command(
        commands,
        "completion",
        summary="print a script that completes commands and flags in a shell",
        description="Print a script with which bash or zsh completes the commands and flags of kvflow.",
        examples="kvflow completion bash >> ~/.bash_completion",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    script = script_of(options.root)
    print(f"{ZSH}{script}" if options.shell == "zsh" else script, end="")
    return 0


def script_of(parser: argparse.ArgumentParser) -> str:
    """Return the script for bash that completes a parser."""
    commands, values, offers = [], [], []
    for name, command in _commands(parser, "kvflow"):
        if name != "kvflow":
            commands.append(f'            "{name}") command="{name}" ;;')
        actions = command._actions  # noqa: SLF001 - argparse gives no public name to what it knows
        flags = [flag for action in actions for flag in action.option_strings]
        below = [word for action in actions if not action.option_strings and action.choices for word in action.choices]
        offers.append(f'        "{name}") {_reply(" ".join([*below, *flags]), files=not below)} ;;')
        for action in actions:
            if action.option_strings and action.nargs != 0:
                pattern = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                values.append(f"        {pattern}) {_reply(' '.join(map(str, action.choices or ())))}; return ;;")
    return BASH.format(commands="\n".join(commands), values="\n".join(values), offers="\n".join(offers))


def _reply(offered: str, *, files: bool = True) -> str:
    """Return the command that offers texts, and files if there are to be any."""
    return f'COMPREPLY=($(compgen {"-f " if files else ""}-W "{offered}" -- "$current"))'


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a parser and those of its subcommands, each with its name."""
    yield name, parser
    for action in parser._actions:  # noqa: SLF001 - likewise
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - likewise
            for word, command in action.choices.items():
                yield from _commands(command, f"{name} {word}")
