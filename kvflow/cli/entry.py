"""The ``kvflow`` program: finds the subcommand and runs it."""

import argparse
from collections.abc import Sequence

from kvflow import __version__
from kvflow.cli import bench, demo, keys, layout, proxy, simulate

COMMANDS = (layout, keys, bench, simulate, demo, proxy)
"""Modules with ``add_parser`` and ``run``."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="kvflow", description="Move KV caches between prefill and decode workers.")
    parser.add_argument("--version", action="version", version=f"kvflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = build_parser().parse_args(arguments)
    status: int = options.run(options)
    return status
