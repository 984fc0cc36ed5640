# ruff: noqa: T201 - a script prints what it finds
"""``make chaos``: harm many processes for some minutes, and print what came of it."""

import argparse
import asyncio
import logging
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads torch, whose threads spin

from .driver import Until, run
from .engine import LoggedErrors
from .network import missing

LOG = Path("out/chaos")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="what is done to whom; by chance if not given")
    parser.add_argument("--only", nargs="*", metavar="VICTIM", help="only these, by their names in the table")
    args = parser.parse_args()
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    LOG.mkdir(parents=True, exist_ok=True)
    handlers = [LoggedErrors(), logging.FileHandler(LOG / "survivor.txt", mode="w")]
    logging.basicConfig(handlers=handlers, level=logging.WARNING)
    print(f"seed {seed}, {args.minutes:g} minutes; what processes say last goes to {LOG}", flush=True)
    if reason := missing():
        print(f"NO NETWORK NAMESPACES, SO NO PACKET IS LOST: {reason}", flush=True)
    record = asyncio.run(run(seed, Until(seconds=60 * args.minutes), LOG, args.only))
    print(record)
    print(f"seed {seed}: {len(record.complaints)} complaints, {record.ends().total()} disturbed pulls")
    return 1 if record.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
