"""``python -m tests.world.soaking``: pull for ten minutes, and say what became of it. See docs/contributing/faults.md.

With ``--offers`` nobody is disturbed, and the memory of a producer is watched over so many offers.
"""

import argparse
import asyncio
import logging
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads torch, whose threads spin

import uvloop

from .measuring import MIB
from .processes import PLANES, one_arena, thread_pool
from .report import JUDGED, grown, missed, tell, unbounded
from .soak import offer_and_release, run

THREADS = 8
PROGRESS = 10


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.world.soaking", description=__doc__)
    parser.add_argument("--pulls", type=int, default=100_000)
    parser.add_argument("--round", type=int, default=1000, help="pulls between two looks at everybody at rest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=PLANES, default="auto", help="of all workers")
    parser.add_argument("--offers", type=int, default=0, help="watch a producer over so many offers instead")
    parser.add_argument("--any-memory", action="store_true", help="memory may grow: the run is too short to judge")
    return parser.parse_args()


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main(options):
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # leases run out and are revoked all the time
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))
    began_s = time.monotonic()
    if options.offers:
        bounds = []
        for read, offers in ((False, options.offers), (True, options.offers // 10)):

            def show(done, rss, read=read):
                what = "offers read" if read else "offers released unread"
                say(f"{done:,} {what}, {time.monotonic() - began_s:.0f} s, {rss / MIB:.1f} MiB")

            bounds += unbounded(await offer_and_release(offers, read=read, progress=show))
        return conclude(bounds)

    def progress(soak):
        if len(soak.samples["reader"]) % PROGRESS == 0:
            memory = ", ".join(f"{name} {soak.samples[name][-1].rss / MIB:.1f} MiB" for name in JUDGED)
            say(f"{soak.pulls:,} pulls, {time.monotonic() - began_s:.0f} s, {memory}")

    how = {"of_round": options.round, "seed": options.seed, "transport": options.transport}
    soak = await run(options.pulls, **how, progress=progress)
    say(tell(soak, options.round))
    bounds = missed(soak) + ([] if options.any_memory else grown(soak, options.round))
    return conclude(bounds)


def conclude(bounds):
    """Say which bounds were missed; return the status of the process."""
    for bound in bounds:
        say(f"MISSED: {bound}")
    return len(bounds) > 0


if __name__ == "__main__":
    one_arena()
    sys.exit(uvloop.run(main(arguments())))
