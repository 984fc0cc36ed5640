"""``kvflow keys``: draw a cluster secret or a worker's key pair, and print the public key of a private one."""

import argparse
import sys
from typing import TYPE_CHECKING

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from kvflow.tools.cli.arguments import add_command

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

PRIVATE_KEY_BYTES = 32


def add_parser(commands: "Subparsers") -> None:
    """Add ``keys`` to the command line."""
    parser = add_command(
        commands,
        "keys",
        summary="draw a cluster secret, or a key pair for one worker",
        description="Draw the secret that all workers of a cluster share, or a key pair for one worker beside it.",
        examples="kvflow keys secret >> kvflow.env",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    add_command(
        kinds,
        "secret",
        summary="draw a cluster secret and print it",
        description="Print KVFLOW_CLUSTER_SECRET= and a new secret of 256 bits, for every worker of the cluster.",
        examples="(umask 077; kvflow keys secret >> kvflow.env)",
    ).set_defaults(run=run_secret)
    add_command(
        kinds,
        "pair",
        summary="draw a key pair for one worker and print it",
        description="Print KVFLOW_PRIVATE_KEY= and a new private key for one worker. A comment above it holds the "
        "public key, which the other workers list in allowed_keys.",
        examples="(umask 077; kvflow keys pair >> prefill-0.env)",
    ).set_defaults(run=run_pair)
    add_command(
        kinds,
        "public",
        summary="read a private key from standard input and print its public key",
        description="Read a private key, or the output of kvflow keys pair, from standard input, and print its public "
        "key. A private key is no argument, because every user of the machine sees arguments.",
        examples="kvflow keys public < prefill-0.env",
    ).set_defaults(run=run_public)


def run_secret(_options: argparse.Namespace) -> int:
    """Print a new cluster secret, as a line of an environment file."""
    from kvflow.rendezvous.issuer import draw_secret  # noqa: PLC0415 - the other commands need no ZeroMQ

    print(f"{SECRET_VARIABLE}={draw_secret()}")
    return 0


def run_pair(_options: argparse.Namespace) -> int:
    """Print a new key pair: the private key as a line of an environment file, the public one as a comment."""
    from kvflow.rendezvous.issuer import draw_pair  # noqa: PLC0415 - the other commands need no ZeroMQ

    private, public = draw_pair()
    print(f"# public key, for allowed_keys of the others: {public}")
    print(f"{KEY_VARIABLE}={private}")
    return 0


def run_public(_options: argparse.Namespace) -> int:
    """Print the public key of the private one on standard input, such as a line of ``kvflow keys pair``."""
    from kvflow.rendezvous.issuer import public_key  # noqa: PLC0415 - the other commands need no ZeroMQ

    # Never an argument: every user of the machine sees those.
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    try:
        (text,) = lines
        private = bytes.fromhex(text.removeprefix(f"{KEY_VARIABLE}="))
    except ValueError:
        private = b""
    if len(private) != PRIVATE_KEY_BYTES:
        print(
            "kvflow keys public: standard input holds no private key. Give one line of 64 hexadecimal digits.",
            file=sys.stderr,
        )
        return 2
    print(public_key(private))
    return 0
