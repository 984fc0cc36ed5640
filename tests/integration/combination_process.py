"""The prefill engines of the combinations in a process of their own, told what to do by lines of JSON.

``{"op": "open", "name": "TP 1 to 2", ...}`` closes the engine that is open, opens the source of that combination with
its request in memory, and tells what a mint needs to know of its ranks. Every other ``op`` is a method of ``Sources``.
Each line is answered by one. ``stop``, or the end of the input, ends it.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop

from kvflow.leases.tickets import Grant
from tests.helpers.settings import flat_config

from .combinations import COMBINATIONS
from .engines import opened


class Sources:
    """All ranks of one prefill engine, and what they have on offer."""

    def __init__(self, workers, lists, num_tokens):
        self._workers = workers
        self._lists = lists
        self._num_tokens = num_tokens

    async def admit(self, grant):
        for worker in self._workers:
            worker.admit(msgspec.convert(grant, Grant))

    async def offer(self, request):
        """Let every rank offer for itself; return what a router carries of each."""
        return [
            worker.offer(request, block_ids, self._num_tokens).to_params()
            for worker, block_ids in zip(self._workers, self._lists, strict=True)
        ]

    async def outcomes(self, request):
        """Wait until the lease has ended on every rank, and say how."""
        return [await worker.wait_offer(request) for worker in self._workers]

    async def leases(self):
        return [worker.snapshot().leases for worker in self._workers]


def written(name, *, salted):
    """Build the ranks of a source, all noise but for the blocks of its request; one salt per rank, if they have one."""
    combination = COMBINATIONS[name]
    ranks = combination.source.ranks()
    lists = combination.source_lists(ranks)
    for number, (rank, block_ids) in enumerate(zip(ranks, lists, strict=True)):
        rank.fill(f"the source of {name}, rank {number}")
        rank.write(combination.request(name, number if salted else 0), block_ids)
    return ranks, lists


async def main():
    async with AsyncExitStack() as life:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            answer = None
            match command.pop("op"):
                case "open":
                    await life.aclose()
                    config = flat_config(**command.pop("settings"))
                    ranks, lists = written(**command)
                    workers = await life.enter_async_context(opened(config, ranks))
                    sources = Sources(workers, lists, COMBINATIONS[command["name"]].num_tokens)
                    answer = [msgspec.to_builtins(worker.rank_address) for worker in workers]
                case "stop":
                    return
                case op:
                    answer = await getattr(sources, op)(**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
