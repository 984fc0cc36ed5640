"""What several commands need: parsers, checked values of flags, settings of a member, and how results are printed."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import msgspec

import kvflow
from kvflow.addresses import AddressMalformed, host_and_port
from kvflow.config import KEY_VARIABLE, WorkerConfig

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
"""argparse gives this class no public name, and at run time no parameter."""

CHECKOUT = Path(kvflow.__file__).parents[1]
"""The root of kvflow's repository, if this runs from a checkout."""


def add_command(
    commands: "Subparsers", name: str, *, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command whose ``--help`` shows its description, and examples of one line each."""
    lines = [f"  {line}" for line in examples.strip().splitlines()]
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="\n".join([f"example{'s' if len(lines) > 1 else ''}:", *lines]),
        formatter_class=_Formatter,
    )
    parser.set_defaults(prog=parser.prog)
    return parser


def with_default(parser: argparse.ArgumentParser, flag: str, default: object, meaning: str, **how: Any) -> None:
    """Add an option whose help ends with its default."""
    parser.add_argument(flag, default=default, help=f"{meaning} (default: %(default)s)", **how)


class CommandFailed(Exception):
    """Why a command cannot do what it was told, as one line for standard error; 2 stands for a wrong command line."""

    def __init__(self, message: str, *, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class _Formatter(argparse.HelpFormatter):
    """Fills the description, and keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)


def address(text: str, *, port_min: int = 1) -> str:
    """Check ``HOST:PORT`` and return it."""
    try:
        host_and_port(text, port_min=port_min)
    except AddressMalformed as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def bound_address(text: str) -> str:
    """Check ``HOST:PORT`` to listen on, where port 0 takes a free one, and return it."""
    return address(text, port_min=0)


def number_from(
    kind: type[float] | type[int], low: float, wrong: str, *, high: float = math.inf
) -> Callable[[str], Any]:
    """Return a function that reads numbers from ``low`` to ``high``, and says of another one that it is ``wrong``."""

    def read(text: str) -> float:
        found = kind(text)
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text} is {wrong}")
        return found

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that reads integers from a minimum on."""
    return number_from(int, minimum, f"below {minimum}")


def above_0(kind: type[float] | type[int]) -> Callable[[str], float]:
    """Return a function that reads numbers above 0."""
    return number_from(kind, math.ulp(0.0), "not a number above 0", high=sys.float_info.max)


def server(text: str) -> str:
    """Check ``http://HOST:PORT`` and return it, without a slash at its end."""
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT")
    return text.rstrip("/")


def keeper(text: str) -> tuple[str, str]:
    """Check ``http://HOST:PORT=tcp://HOST:PORT`` and return both parts."""
    url, _, endpoint = text.partition("=")
    try:
        host_and_port(endpoint, port_min=1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT=tcp://HOST:PORT") from error
    return server(url), endpoint


def member_config(*given: str | None) -> WorkerConfig:
    """Return the settings of the environment, for a command that dials workers with the public keys that are given."""
    keys = tuple(key for key in given if key)
    return WorkerConfig(engine_id="kvflow", allowed_keys=keys if keys or os.environ.get(KEY_VARIABLE) else None)


def missing_checkout(module: str, command: str) -> str:
    """Return why a command cannot run whose module is in kvflow's repository alone; empty if it can."""
    if module.startswith("kvflow.") or CHECKOUT.joinpath(*module.split(".")).with_suffix(".py").exists():
        return ""
    return f"{command} needs a checkout of kvflow's repository: kvflow was imported from {CHECKOUT}"


def require_extra(**extras: str) -> None:
    """Refuse a command if a module is missing. ``extras``: of kvflow, by the modules that they install."""
    for module, extra in extras.items():
        if find_spec(module) is None:
            package = module.replace("_", "-")
            raise CommandFailed(f"{package} is not installed. Install it with pip install 'kvflow[{extra}]'")


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return the bytes of a file, and at most one byte more than is allowed."""
    try:
        with path.open("rb") as file:
            return file.read(bytes_max + 1)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error


def control_endpoint(text: str) -> str:
    """Return an address with ``tcp://``; the handshake checks the rest."""
    return text if "://" in text else f"tcp://{text}"


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


class ProgressLine:
    """One line on standard error that replaces itself: on a terminal, and for people who read no JSON.

    As a context manager it clears the line at the end.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.is_shown = not as_json and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show a text; an empty one clears the line."""
        if self.is_shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self("")


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns; a fact without a name is a line of its own."""
    listed = [(name, str(value)) for name, value in facts]
    width = max((len(name) for name, _ in listed if name), default=0)
    for name, value in listed:
        print(f"{name.ljust(width)}  {value}" if name else value)
