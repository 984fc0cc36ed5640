"""Prompts that an engine computes, preempts and writes over as fast as it can, while another process follows them.

``KVFLOW_TEST_READS`` says how many offers; ``make test-fence`` makes a hundred thousand over each data plane.
"""

import asyncio
import os
import sys
from itertools import count

import pytest

from tests.helpers.waiting import PATIENCE_S
from tests.world.node import hosted
from tests.world.words import digests_of

from .opening import BLOCKS_MAX, WINDOW_BLOCKS, opening
from .reading import Reader, read_all

OFFERS = int(os.environ.get("KVFLOW_TEST_READS", "600"))
READERS = 6
FEW = 3
"""Wrong reads that show that blocks must be written before they settle."""
ENOUGH = 30_000
"""Reads after which a run with early settlements must have shown them."""

pytestmark = [pytest.mark.nixl, pytest.mark.processes, pytest.mark.timeout(3600), pytest.mark.usefixtures("few_words")]


async def follow_all(transport, enough, how="right"):
    """Follow prompts until ``enough(tally)``; return the tally, and what the process has counted."""
    async with hosted(opening, transport, how) as host:
        tally = await read_all(host, Follower, READERS, enough, name=transport, transport=transport, follow_bytes_min=1)
        return tally, await host.counted()


class Follower(Reader):
    """Has one prompt after the other computed, finds and follows it."""

    numbers = count(1)

    async def read(self, host, enough):
        while not enough(self.tally):
            number, num_blocks = next(self.numbers), self.rng.randint(1, BLOCKS_MAX)
            ended = asyncio.wrap_future(host.begin("compute", number, num_blocks))
            finding = self.worker.find(host.endpoint, digests_of(number, num_blocks), PATIENCE_S, at_least=num_blocks)
            finding = asyncio.create_task(finding)
            await asyncio.wait([finding, ended], return_when=asyncio.FIRST_COMPLETED)
            if not finding.done():  # it was preempted before it was found
                finding.cancel()
                self.tally.ends["stale_lease"] += 1
                continue
            ticket, _ = finding.result()
            assert ticket is not None, f"{number} was offered, and not found"
            ids = self.rng.sample(self.blocks, num_blocks + WINDOW_BLOCKS)
            await self.pull(number, ticket, [ids[:num_blocks], ids[num_blocks:]])


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_is_followed_is_right_or_stale(transport, capsys):
    tally, counted = await follow_all(transport, lambda tally: tally.reads >= OFFERS)
    with capsys.disabled():
        sys.stdout.write(f"\n{transport}: {tally}; {counted}")
    assert tally.wrong == 0, tally.examples
    assert min(tally.delivered, tally.stale, counted["preempted"], counted["sealed"]) > 0
    assert counted["found"] >= tally.delivered


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_settles_before_it_is_written_is_read_wrong(transport, capsys):
    tally, counted = await follow_all(
        transport, lambda tally: tally.misread >= FEW or tally.reads >= ENOUGH, how="early"
    )
    with capsys.disabled():
        sys.stdout.write(f"\nsettled early, {transport}: {tally}; {counted}")
    assert tally.misread >= FEW
