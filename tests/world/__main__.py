"""``python -m tests.world chaos`` and ``soak``: real processes, and what is done to them; see contributing/faults.md.

``chaos`` harms many at the same time, for some minutes. ``soak`` pulls for ten minutes while one after the other is
restarted, and watches what processes take; with ``--offers`` nobody is disturbed, and a producer's memory is watched.
"""

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads torch, whose threads spin

import uvloop

from .driver import Until
from .driver import run as run_chaos
from .measuring import MIB, PLANES, one_arena, thread_pool
from .network import missing
from .process import LoggedErrors
from .report import JUDGED, grown, missed, tell, unbounded
from .soak import offer_and_release
from .soak import run as run_soak

LOG = Path("out/chaos")
THREADS = 8
PROGRESS = 10


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    programs = parser.add_subparsers(required=True)
    chaos_parser = programs.add_parser("chaos", help="harm many for some minutes")
    chaos_parser.set_defaults(program=chaos)
    chaos_parser.add_argument("--minutes", type=float, default=3.0)
    chaos_parser.add_argument("--seed", type=int, default=None, help="what is done to whom; by chance if not given")
    chaos_parser.add_argument("--only", nargs="*", metavar="VICTIM", help="only these, by their names in the table")
    soak_parser = programs.add_parser("soak", help="pull, restart one after the other, and watch what they take")
    soak_parser.set_defaults(program=soak)
    soak_parser.add_argument("--pulls", type=int, default=100_000)
    soak_parser.add_argument("--round", type=int, default=1000, help="pulls between two looks at everybody at rest")
    soak_parser.add_argument("--seed", type=int, default=0)
    soak_parser.add_argument("--transport", choices=PLANES, default="auto", help="of all workers")
    soak_parser.add_argument("--offers", type=int, default=0, help="watch a producer over so many offers instead")
    soak_parser.add_argument("--any-memory", action="store_true", help="memory may grow: the run is too short to judge")
    return parser.parse_args()


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def chaos(options):
    """Harm everybody, and print what came of it; return the status of the process."""
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    LOG.mkdir(parents=True, exist_ok=True)
    handlers = [LoggedErrors(), logging.FileHandler(LOG / "survivor.txt", mode="w")]
    logging.basicConfig(handlers=handlers, level=logging.WARNING)
    say(f"seed {seed}, {options.minutes:g} minutes; what processes say last goes to {LOG}")
    if reason := missing():
        say(f"NO NETWORK NAMESPACES, SO NO PACKET IS LOST: {reason}")
    record = asyncio.run(run_chaos(seed, Until(seconds=60 * options.minutes), LOG, options.only))
    say(record)
    say(f"seed {seed}: {len(record.complaints)} complaints, {record.ends().total()} disturbed pulls")
    return 1 if record.complaints else 0


def soak(options):
    """Pull, or offer, and print what came of it; return the status of the process."""
    one_arena()
    bounds = uvloop.run(offered(options.offers) if options.offers else soaked(options))
    for bound in bounds:
        say(f"MISSED: {bound}")
    return len(bounds) > 0


def prepare():
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # leases run out and are revoked all the time
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))


async def offered(offers):
    """Offer so often, unread and read; return the bounds that were missed."""
    prepare()
    began_s, bounds = time.monotonic(), []
    for read, count in ((False, offers), (True, offers // 10)):

        def show(done, rss, read=read):
            what = "offers read" if read else "offers released unread"
            say(f"{done:,} {what}, {time.monotonic() - began_s:.0f} s, {rss / MIB:.1f} MiB")

        bounds += unbounded(await offer_and_release(count, read=read, progress=show))
    return bounds


async def soaked(options):
    """Pull so often; return the bounds that were missed."""
    prepare()
    began_s = time.monotonic()

    def progress(world):
        if len(world.samples["reader"]) % PROGRESS == 0:
            memory = ", ".join(f"{name} {world.samples[name][-1].rss / MIB:.1f} MiB" for name in JUDGED)
            say(f"{world.pulls:,} pulls, {time.monotonic() - began_s:.0f} s, {memory}")

    how = {"of_round": options.round, "seed": options.seed, "transport": options.transport}
    world = await run_soak(options.pulls, **how, progress=progress)
    say(tell(world, options.round))
    return missed(world) + ([] if options.any_memory else grown(world, options.round))


def main():
    options = arguments()
    return options.program(options)


if __name__ == "__main__":
    sys.exit(main())
