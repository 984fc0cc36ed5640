"""``kvflow keys``: draw a cluster secret or a worker's key pair, and tell the public key of a private one."""

import argparse
import sys
from typing import TYPE_CHECKING

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE

if TYPE_CHECKING:
    # What argparse calls the object is private; this is its only use.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

PRIVATE_KEY_BYTES = 32


def add_parser(commands: "Subparsers") -> None:
    """Add ``keys`` to the command line."""
    parser = commands.add_parser("keys", help="draw a cluster secret, or a key pair for one worker")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, run, text in (
        ("secret", run_secret, "draw a cluster secret and print it"),
        ("pair", run_pair, "draw a key pair for one worker and print it"),
        ("public", run_public, "read a private key from standard input and print its public key"),
    ):
        kinds.add_parser(name, help=text).set_defaults(run=run)


def run_secret(_options: argparse.Namespace) -> int:
    """Print a new cluster secret, as a line of an environment file."""
    from kvflow.rendezvous.keys import draw_secret  # noqa: PLC0415 - the other commands need no ZeroMQ

    print(f"{SECRET_VARIABLE}={draw_secret()}")
    return 0


def run_pair(_options: argparse.Namespace) -> int:
    """Print a new key pair: the private key as a line of an environment file, the public one as a remark."""
    from kvflow.rendezvous.keys import draw_pair  # noqa: PLC0415 - the other commands need no ZeroMQ

    private, public = draw_pair()
    print(f"# public key, for allowed_keys of the others: {public}")
    print(f"{KEY_VARIABLE}={private}")
    return 0


def run_public(_options: argparse.Namespace) -> int:
    """Print the public key of the private one on standard input; a line of ``kvflow keys pair`` will do."""
    from kvflow.rendezvous.keys import public_key  # noqa: PLC0415 - the other commands need no ZeroMQ

    # Never an argument: every user of the machine sees those.
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    try:
        (text,) = lines
        private = bytes.fromhex(text.removeprefix(f"{KEY_VARIABLE}="))
    except ValueError:
        private = b""
    if len(private) != PRIVATE_KEY_BYTES:
        print("standard input is no private key: give one line of 64 hexadecimal digits", file=sys.stderr)
        return 2
    print(public_key(private))
    return 0
