"""``kvflow demo``: prefill in one process, decode in another, compare with one process alone."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvflow.observability.logs import configure_logging
from kvflow.tools.cli.arguments import add_command, address

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

NUM_PROMPTS = 24

ENGINES = {"prefill": "KVFLOW_DEMO_PREFILL", "decode": "KVFLOW_DEMO_DECODE"}
"""Engines that may run elsewhere -> the variable that can name each, for containers."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``demo`` to the command line."""
    parser = add_command(
        commands,
        "demo",
        summary="run a tiny engine over kvflow and compare its tokens",
        description="Start a prefill and a decode process of a tiny model, send prompts through both, and compare "
        "every token with a process that does both. All parts run on the CPU of this machine.",
        examples="kvflow demo --prompts 8",
    )
    parser.add_argument(
        "--prompts", type=_prompt_count, default=NUM_PROMPTS, help="number of prompts, 2 or more (default: %(default)s)"
    )
    parser.add_argument(
        "--texts",
        type=Path,
        default=Path(),
        help="folder with README.md and docs/, from which the prompts come (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for logs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, and no progress")
    for role, variable in ENGINES.items():
        parser.add_argument(
            f"--{role}",
            type=address,
            default=os.environ.get(variable),
            metavar="HOST:PORT",
            help=f"address of a running {role} engine; give both or none [{variable}]",
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 if every token is equal and nothing was left leased or quarantined."""
    for package in ("rich", "aiohttp"):
        if find_spec(package) is None:
            print(
                f"kvflow demo: {package} is not installed. Install it with pip install 'kvflow[demo]'", file=sys.stderr
            )
            return 2
    if (options.prefill is None) != (options.decode is None):
        print("kvflow demo: give both --prefill and --decode, or neither", file=sys.stderr)
        return 2
    # Loaded here, so that other commands and --help do not wait for it.
    from kvflow.tools.demo.run import Engines, run_and_show  # noqa: PLC0415

    logs: Path = options.out
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (*logs.glob("*.jsonl"), *logs.glob("*.stderr")):
        stale.unlink()
    configure_logging(logs / "driver.jsonl")
    engines = Engines(prefill=options.prefill, decode=options.decode) if options.prefill else None
    return run_and_show(options.texts, options.prompts, logs, engines, as_json=options.json)


def _prompt_count(text: str) -> int:
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"{count} prompts cannot be both short and long: give 2 or more")
    return count
