"""Conversations that an engine keeps, and reuses as fast as it can, while another process finds and fetches them.

``KVFLOW_TEST_READS`` says how many fetches; ``make test-fence`` makes a hundred thousand over each data plane.
"""

import asyncio
import hashlib
import os
import sys
import time

import pytest

import kvflow
from kvflow.worker.environment import PRODUCTION
from tests.benchmarks.fenceless import without_fence
from tests.world.node import hosted
from tests.world.words import digests_of

from .keeping import BLOCKS_MAX, CONVERSATIONS, keeping
from .producing import configured
from .reading import Reader, read_all
from .recycling import TARGET

FETCHES = int(os.environ.get("KVFLOW_TEST_READS", "600"))
READERS = 4
PAUSE_S = 0.003
"""After an answer that nothing is kept: a member may ask 2,000 times a second."""
GUESSES = 500
FEW = 3
"""Wrong fetches that show that the fence is needed."""
ENOUGH = 30_000
"""Fetches after which a run without the fence must have shown them."""

pytestmark = [pytest.mark.nixl, pytest.mark.processes, pytest.mark.timeout(7200), pytest.mark.usefixtures("few_words")]


async def fetch_all(transport, enough, environment=PRODUCTION):
    """Fetch until ``enough(tally)``; return the tally, and what the process has counted."""
    async with hosted(keeping, transport) as host:
        how = {"name": transport, "transport": transport, "environment": environment}
        return await read_all(host, Fetcher, READERS, enough, **how), await host.counted()


class Fetcher(Reader):
    """Finds one conversation after the other, and fetches what is there."""

    async def read(self, host, enough):
        while not enough(self.tally):
            conversation = self.rng.randrange(CONVERSATIONS)
            digests = digests_of(conversation, self.rng.randint(1, BLOCKS_MAX))
            ticket, count = await self.worker.find(host.endpoint, digests)
            if ticket is None:
                await asyncio.sleep(PAUSE_S)
                continue
            assert 0 < count <= len(digests)
            held = len(ticket.grants[0].block_ids[0])
            ids = self.rng.sample(self.blocks, 2 * count)
            await self.pull(conversation, ticket, [ids[:count], ids[count:]], absent=held - count)


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_is_fetched_is_right_or_stale(transport, capsys):
    tally, counted = await fetch_all(transport, lambda tally: tally.reads >= FETCHES)
    with capsys.disabled():
        sys.stdout.write(f"\n{transport}: {tally}; {counted}")
    assert tally.wrong == 0, tally.examples
    assert min(tally.delivered, tally.stale, counted["recycled"], counted["not_held"]) > 0
    assert counted["found"] >= tally.reads


async def test_without_the_fence_wrong_bytes_are_fetched(capsys):
    tally, counted = await fetch_all(
        "nixl", lambda tally: tally.misread >= FEW or tally.reads >= ENOUGH, environment=without_fence()
    )
    with capsys.disabled():
        sys.stdout.write(f"\nwithout the fence: {tally}; {counted}")
    assert tally.misread >= FEW


async def test_a_member_learns_who_has_a_prompt_that_it_guesses_with_its_salt(capsys):
    async with (
        hosted(keeping, "tcp") as host,
        kvflow.open_worker(configured("guesser", transport="tcp"), TARGET.build()) as worker,
    ):
        known, begun_s = {"held": 0, "held with a salt": 0}, time.monotonic()
        for number in range(GUESSES):
            guessed = digests_of(number % CONVERSATIONS, BLOCKS_MAX)
            without_salt = [hashlib.sha256(b"salt" + digest).digest() for digest in guessed]
            for what, digests in zip(known, (guessed, without_salt), strict=True):
                ticket, _ = await worker.find(host.endpoint, digests)
                known[what] += ticket is not None
        rate = 2 * GUESSES / (time.monotonic() - begun_s)
    with capsys.disabled():
        sys.stdout.write(f"\nof {GUESSES} guesses {known}; {rate:.0f} in a second; load {os.getloadavg()[0]:.1f}")
    assert known["held"] > 0
    assert known["held with a salt"] == 0
