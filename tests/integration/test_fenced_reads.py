"""Producers recycle their blocks at random, with leases of milliseconds, while others read them: no wrong byte arrives.

``KVFLOW_TEST_READS`` says how many reads, in runs of five thousand; ``make test-fence`` makes a hundred thousand.
"""

import os
import sys
from collections import defaultdict
from contextlib import nullcontext

import pytest

from tests.benchmarks.fenceless import without_fence
from tests.helpers.copying import copied_in_small_pieces

from .reading import Tally, read
from .recycling import OVER_TCP, PATHS

ALL_READS = int(os.environ.get("KVFLOW_TEST_READS", "1000"))
READS = min(ALL_READS, 5000)
"""Of one run: 5,000 take half a minute on two cores."""
RUNS = -(-ALL_READS // READS)
FEW = 3
"""Wrong reads that show that the fence is needed."""
ENOUGH = 3000
"""Reads after which a run without the fence must have shown them."""

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("few_words"),
]


@pytest.fixture
def show(capsys):
    """Return a function that prints past pytest's capturing."""

    def write(text):
        with capsys.disabled():
            sys.stdout.write(f"\n{text}")

    return write


@pytest.fixture(scope="module")
def totals():
    """What became of the reads of all runs so far, by path."""
    return defaultdict(Tally)


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("how", [nullcontext, copied_in_small_pieces])
async def test_no_wrong_byte_is_delivered(how, seed, totals, show):
    """Whether the read thread reads alone, or a helper reads pieces of every chunk."""

    def until(tallies):
        each = all(tally.delivered and tally.stale for tally in tallies.values())  # on a busy host some take longer
        return sum(tally.reads for tally in tallies.values()) >= (READS if each else 4 * READS)

    with how():
        tallies = await read(until=until, seed=seed)
        for longer in (4, 16):  # on a slow host, a read of many pieces outlasts every lease of milliseconds
            if late := [path for path, tally in tallies.items() if not tally.delivered]:
                tallies |= await read(until=until, paths=late, seed=seed, longer=longer)
    for path, tally in tallies.items():
        totals[path].add(tally)
        show(f"{path}: {totals[path]}")
    for tally in tallies.values():
        assert tally.wrong == 0, tally.examples
        assert tally.delivered > 0
        assert tally.stale > 0
    for path in ("many chunks", "over TCP, many chunks"):
        chunked = tallies[path]
        assert chunked.chunks >= 2 * chunked.delivered, "a read has two chunks at least, even that of one block"


async def test_without_the_fence_wrong_bytes_are_delivered(show):
    def until(tallies):
        shown = all(tally.misread >= FEW for tally in tallies.values()) and sum(t.torn for t in tallies.values()) > 0
        return shown or sum(tally.reads for tally in tallies.values()) >= ENOUGH

    # An exporter that serves compares leases itself, and tells of bytes that it has not sent.
    one_sided = [name for name, path in PATHS.items() if path.source_settings != OVER_TCP]
    tallies = await read(until=until, paths=one_sided, environment=without_fence())
    for path, tally in tallies.items():
        show(f"{path}, without the fence: {tally}")
    for tally in tallies.values():
        assert tally.misread >= FEW
        assert tally.examples
    assert any(tally.torn for tally in tallies.values())
