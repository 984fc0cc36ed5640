"""How commands print: results as JSON or as lines, each failure with its code and remedy, and progress."""

import sys
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from kvflow.errors import KvflowError


class FailureFigures(Struct, frozen=True, kw_only=True):
    """What failed, as ``--json`` prints it.

    Attributes:
        code: stable name of the kind of error.
        message: what is wrong.
        remedy: what to do about it.
    """

    code: str
    message: str
    remedy: str


def failure_of(error: KvflowError) -> FailureFigures:
    """Return an error as it is printed."""
    return FailureFigures(code=str(error.code), message=error.message, remedy=error.remedy)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_failure(command: str, error: KvflowError, *, as_json: bool, status: int = 1) -> int:
    """Print why a command failed; return its exit status.

    Args:
        command: as the user calls it.
        error: the reason.
        as_json: print it as JSON on standard output, too.
        status: what to return.
    """
    if as_json:
        print_json({"error": failure_of(error)})
    print(f"{command}: {error}", file=sys.stderr)
    return status


class ProgressLine:
    """One line on standard error that replaces itself, for work that takes seconds.

    Args:
        as_json: the command prints JSON, so a program probably reads it: show nothing. Without a terminal, too.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.is_shown = not as_json and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show a text; an empty one clears the line."""
        if self.is_shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns; a fact without a name is a line of its own."""
    listed = [(name, str(value)) for name, value in facts]
    width = max((len(name) for name, _ in listed if name), default=0)
    for name, value in listed:
        print(f"{name.ljust(width)}  {value}" if name else value)
