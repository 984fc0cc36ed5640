# ruff: noqa: T201 - a benchmark prints its table
"""What a second thread gains for large reads: bare NIXL, one thread and two, in one process, in turns.

python -m tests.benchmarks.copy_threads [--rounds 15] [--pages huge]
"""

import argparse
import asyncio
import os
import secrets
import statistics
import time
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np

from kvflow import WorkerConfig, open_worker
from kvflow.config import SECRET_VARIABLE
from kvflow.reads.nixl.copying import Helpers
from kvflow.tools.bench.ceilings import BareNixl
from tests.benchmarks.hot_path import KIB, MIB, PAGES, packed
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.hot_path_sides import PullReader, open_source

SIZES = (16, 64, 256)
WAYS = ("bare", "one thread", "two threads")


async def measure(rounds: int, pages: str) -> None:
    """Print the medians of the rounds' own ratios to bare NIXL."""
    geometry = msgspec.structs.replace(packed(4_097, 64 * KIB), huge_pages=PAGES[pages])
    with_helpers, shared = [True], Helpers.post

    def post(helpers, peer, chunk):
        return shared(helpers, peer, chunk) if with_helpers[0] else peer.reader.post(peer, chunk)

    Helpers.post = post
    with ExitStack() as stack:
        stack.callback(setattr, Helpers, "post", shared)
        opened = [partial(open_source, bare=bare) for bare in (False, True)]
        source, other = (stack.enter_context(Child(each, geometry)) for each in opened)
        cache = geometry.build()
        bare = BareNixl(other.ask("opened"), cache)
        config = WorkerConfig.read({"engine_id": "reader", "copy_threads": 2})
        async with open_worker(config, cache) as worker:
            reader = PullReader(geometry, geometry, source, cache, worker=worker, way="pull")
            for scattered in (True, False):
                for size in SIZES:
                    walls, cpus = ({way: [] for way in WAYS} for _ in range(2))
                    for turn in range(rounds + 2):
                        order = WAYS[:: 1 if turn % 2 else -1]
                        for way in order:
                            with_helpers[0] = way == "two threads"
                            pairs = reader.pairs(turn, 1, size * MIB // (64 * KIB), scattered=scattered)
                            work = bare.bind(*pairs[0]) if way == "bare" else (await reader.prepare(pairs))[0]
                            used, started = time.process_time(), time.perf_counter()
                            if way == "bare":
                                bare.read(work)
                            else:
                                await reader.read(work)
                            if turn > 1:
                                walls[way].append(time.perf_counter() - started)
                                cpus[way].append(time.process_time() - used)
                            reader.compare(pairs)
                    kind = "random" if scattered else "consecutive"
                    rates = [ratio(walls["bare"], walls[way]) for way in WAYS[1:]]
                    spent = [ratio(cpus[way], cpus["bare"]) for way in WAYS[1:]]
                    print(
                        f"{pages} pages, {size} MiB {kind}: bare {statistics.median(walls['bare']) * 1e3:.2f} ms; rate "
                        f"of bare's {rates[0]:.2f} -> {rates[1]:.2f}; CPU of bare's {spent[0]:.2f} -> {spent[1]:.2f}",
                        flush=True,
                    )
        bare.close()


def ratio(above, below) -> float:
    """Return the median of the rounds' own ratios."""
    return float(np.median([one / other for one, other in zip(above, below, strict=True)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pages", choices=PAGES, action="append")
    options = parser.parse_args()
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    for each in options.pages or PAGES:
        asyncio.run(measure(options.rounds, each))
