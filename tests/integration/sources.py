"""The prefill engine of a combination, all its ranks."""

from contextlib import asynccontextmanager

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

    async def addresses(self):
        """Return what a mint needs to know of the ranks."""
        return [worker.rank_address for worker in self._workers]

    async def admit(self, grant: Grant):
        for worker in self._workers:
            worker.admit(grant)

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


@asynccontextmanager
async def sources(name, *, salted, **settings):
    """Open the source of a combination with its request in memory."""
    ranks, lists = written(name, salted=salted)
    async with opened(flat_config(**settings), ranks) as workers:
        yield Sources(workers, lists, COMBINATIONS[name].num_tokens)
