"""A reader in a process of its own, which is killed now and then.

``{"op": "open", "seed": 1, "transport": "tcp"}`` opens it. ``{"op": "pull", "offers": [[number, params, num_blocks],
...]}`` pulls all at once and is answered with how each ended, and how many words were wrong or late. The end of the
input ends it.
"""

import asyncio
import json
import logging
import random
import sys

import uvloop

from tests.integration.recycling import NUM_BLOCKS

from .processes import one_arena, thread_pool
from .reader import Lane, Station, Tally

AT_ONCE_MAX = 16
THREADS = 2


async def main():
    one_arena()
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))
    tally, share = Tally(), NUM_BLOCKS // AT_ONCE_MAX
    station, lanes = None, []
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        match command["op"]:
            case "open":
                station = Station("decode-1", command["transport"], seeks=False)
                lanes = [
                    Lane(station, range(n * share, (n + 1) * share), random.Random(f"{n} {command['seed']}"), tally)
                    for n in range(AT_ONCE_MAX)
                ]
                answer = await station.open()
            case "pull":
                offers = zip(lanes, command["offers"], strict=False)
                ends = await asyncio.gather(*(lane.pull(*offer) for lane, offer in offers))
                station.worker.check()
                answer = {"ends": ends, "wrong": tally.wrong, "late": tally.late, "examples": tally.examples}
                tally.wrong = tally.late = 0
                tally.examples.clear()
            case "stop":
                break
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    if station is not None:
        await station.close()


if __name__ == "__main__":
    uvloop.run(main())
