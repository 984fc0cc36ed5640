"""The command line, ``kvflow``: finds the subcommand, runs it, and says why it fails. Most have a module each."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvflow.errors import KvflowError
from kvflow.tools.cli import config, doctor, explain, inspect, layout, small, ticket
from kvflow.tools.cli.arguments import CHECKOUT, CommandFailed, print_json
from kvflow.tools.doctor.codes import failure_of
from kvflow.version import __version__

COMMANDS = (
    layout.add_parser,
    explain.add_parser,
    doctor.add_parser,
    inspect.add_parser,
    ticket.add_parser,
    config.add_parser,
    small.add_trace,
    small.add_keys,
    small.add_bench,
    small.add_demo,
    small.add_proxy,
)

PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit status of a command whose output is not read: that of a program that SIGPIPE ends."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command that Ctrl-C ends: that of a program that SIGINT ends."""


class _ShowVersion(argparse.Action):
    """Print the release, and in a checkout the commit, with a mark if files have changed since; then exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        commit = ""
        if (CHECKOUT / ".git").exists():
            describe = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
            with suppress(OSError, subprocess.CalledProcessError):  # git is missing, or the checkout is another user's
                commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
        print(f"kvflow {__version__}{f' (commit {commit})' if commit else ''}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvflow",
        description="Move KV caches between prefill and decode workers.",
        epilog="Run kvflow COMMAND --help for what a command does, with an example.",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the release, and exit")
    parser.set_defaults(misuse=())  # errors of kvflow that say that the command line is wrong
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has left, as head does. What is still buffered has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except CommandFailed as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return error.status
    except KvflowError as error:
        if getattr(options, "json", False):
            print_json({"error": failure_of(error)})
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, options.misuse) else 1
    return status
