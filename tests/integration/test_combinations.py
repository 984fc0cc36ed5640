"""Every combination of engines between processes: every byte that is asked for, and no other byte.

They go over shared memory and over TCP by turns; ``KVFLOW_TEST_PLANE`` says ``nixl`` or ``tcp`` for all of them.
"""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
import torch

import kvflow
from kvflow.leases.tickets import RankAddress
from kvflow.planning.plan import dense_runs
from tests.helpers.settings import flat_config
from tests.world.node import Node

from .combinations import COMBINATIONS
from .engines import opened
from .producing import SECRET
from .sources import sources

# A machine with fewer cores than ranks takes its time: nothing here is about deadlines.
SETTINGS = {"cluster_secret": SECRET, "connect_s": 30.0, "handshake_s": 30.0}
CARRIERS = {"nixl": "cma", "tcp": "tcp"}


def plane_of(name):
    """Return the data plane of a combination."""
    return os.environ.get("KVFLOW_TEST_PLANE") or ("nixl", "tcp")[list(COMBINATIONS).index(name) % 2]


def settings_of(name):
    # Direct: descriptors of direct reads are counted. tests/properties/test_staged.py compares staged ones.
    return {"transport": plane_of(name), "staging_bytes": 0, **SETTINGS}


class Targets:
    """All ranks of one decode engine: what they have, and what they should have."""

    def __init__(self, name, ranks, expected, workers):
        self.combination = COMBINATIONS[name]
        self.lists = self.combination.target_lists(ranks)
        self.name = name
        self._sources = self.combination.source.ranks()
        self.offered = self.combination.source_lists(self._sources)
        self._ranks = ranks
        self._expected = expected
        self._workers = workers
        for number, (rank, twin) in enumerate(zip(ranks, expected, strict=True)):
            for side in (rank, twin):
                side.fill(f"the target of {name}, rank {number}")

    async def pull(self, ticket):
        """Let every rank pull what a router brought."""
        pulls = [worker.pull(ticket, ids) for worker, ids in zip(self._workers, self.lists, strict=True)]
        return await asyncio.gather(*pulls)

    def wrong(self, *, salts=None):
        """List the ranks that hold another byte than they should, wherever it may be."""
        ranks = []
        for number, (rank, twin) in enumerate(zip(self._ranks, self._expected, strict=True)):
            request = self.combination.request(self.name, salts[number] if salts else 0)
            twin.write(request, self.lists[number])
            rank.forget_past(request, self.lists[number])
            if not all(map(torch.equal, rank.memory, twin.memory)):
                ranks.append(number)
        return ranks

    def at_rest(self):
        """Tell whether no pull has left anything behind."""
        return {(each.pulls, each.quarantined) for each in (worker.snapshot() for worker in self._workers)} == {(0, ())}

    def descriptors(self):
        """Count what the plans say of every rank's pull."""
        return [
            sum(
                merged_descriptors(plan, self.offered[source], self.lists[number], self.combination.num_tokens)
                for source, plan in self.combination.plans(self._sources, rank, number).items()
            )
            for number, rank in enumerate(self._ranks)
        ]


def merged_descriptors(plan, source_ids, target_ids, num_tokens):
    """Count the runs of a plan for these blocks: one that is dense counts once for units that follow each other."""
    total = 0
    for group in plan.groups:
        there = units_of(source_ids[group.source_group], group.source, num_tokens)
        here = units_of(target_ids[group.target_group], group.target, num_tokens)
        pairs = sorted((there[token], unit) for token, unit in here.items() if token in there)
        follow = sum(pair == (before[0] + 1, before[1] + 1) for before, pair in pairwise(pairs))
        dense = dense_runs(group.runs, group.source, group.target)
        total += len(group.runs) * len(pairs) - dense * follow
    return total


def units_of(block_ids, units, num_tokens):
    """Return the number of the unit that holds each first token; of a state, of token 0."""
    if not units.tokens:
        return {0: block_ids[-1]}
    block_size, stripe = units.tokens * units.per_block, units.stripe
    in_all = -(-num_tokens // (block_size * stripe.size))
    every = range(in_all * block_size * stripe.size)
    here = [token for token in every if token // stripe.width % stripe.size == stripe.rank]
    firsts = here[(in_all - len(block_ids)) * block_size :: units.tokens]
    numbers = [block * units.per_block + unit for block in block_ids for unit in range(units.per_block)]
    return {token: number for token, number in zip(firsts, numbers, strict=True) if number >= 0 and token < num_tokens}


@pytest.fixture(scope="module")
def prefill():
    """A process for the source engines of all combinations."""
    node = Node()
    yield node
    node.go()


async def offered(node, targets):
    """Put the request of a combination on offer; return its ticket as a router brings it."""
    name, combination = targets.name, targets.combination
    if combination.joined:
        tickets = [kvflow.Ticket.from_params(params) for params in await node.offer(name)]
        ticket = kvflow.join_tickets(tickets)
    else:
        ranks = msgspec.convert(await node.addresses(), list[RankAddress])
        mint = kvflow.TicketMint("prefill-0", ranks, cluster_secret=SECRET)
        ticket, grant = mint.offer(name, block_ids=targets.offered[0], num_tokens=combination.num_tokens)
        await node.admit(grant)
    return kvflow.Ticket.from_params(json.loads(json.dumps(ticket.to_params())))


@asynccontextmanager
async def opened_here(name):
    """Open the target engine of a combination in this process."""
    config = flat_config(engine_id="decode-0", **settings_of(name))
    ranks, expected = COMBINATIONS[name].target.ranks(), COMBINATIONS[name].target.ranks()
    async with opened(config, ranks) as workers:
        yield Targets(name, ranks, expected, workers)


@asynccontextmanager
async def pulled(node, name, *, salted=False):
    """Open both engines at the same time, and let every rank pull.

    The source stays open until the next one is opened: whoever reads leaves first, as engines of a cluster do.
    """
    settings = {"engine_id": "prefill-0", **settings_of(name)}
    opening = asyncio.create_task(node.open(sources, name, salted=salted, **settings))
    async with opened_here(name) as targets:
        await opening
        ticket = await offered(node, targets)
        yield targets, await targets.pull(ticket)


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.nixl
@pytest.mark.processes
async def test_every_byte_that_is_asked_for_and_no_other(prefill, name):
    async with pulled(prefill, name) as (targets, reports):
        assert targets.wrong() == []
        assert [report.descriptors for report in reports] == targets.descriptors()
        assert {report.transport for report in reports} == {CARRIERS[plane_of(name)]}
        assert all(report.nbytes for report in reports), "a rank asked for nothing"
        assert set(await prefill.outcomes(name)) == {"released"}
        assert set(await prefill.leases()) == {0}
        assert targets.at_rest()


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("name", ["latents, TP 2 to 2", "latents, TP 3 to 2"])
async def test_replicas_are_read_in_turns(prefill, name):
    """Each source rank holds other bytes here, so that the target tells whom it has read."""
    async with pulled(prefill, name, salted=True) as (targets, _):
        assert targets.wrong(salts=[0, 1]) == []
