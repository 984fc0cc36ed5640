"""Which read each descriptor of a chunk belongs to, against pairs that are bound one by one."""

from itertools import pairwise

import numpy as np
import pytest

from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import bind_plan
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.staging import STAGING_BUFFERS
from kvflow.reads.backend import Chunk, Portion, Share, share_numbers
from kvflow.reads.bounds import check_bound, check_rows, check_scatter
from kvflow.reads.contract import PreparedList
from kvflow.reads.prepared import fetching
from tests.fakes.staging import STAGE_ALL, plan_at
from tests.unit.kvflow.planning.helpers import full, manifest_of, sliding

NUM_BLOCKS, BUFFER_BYTES, PORTIONS = 24, 1 << 16, 20
CASES = {
    "units of a block": ((16, {}), (32, {})),
    "runs of several lengths": ((16, {"layout": "BLNHC"}), (16, {})),
}
TOKENS_FIRST = {"layout": "LBNHC", "kv": "split"}
STAGED = {
    "costs": STAGE_ALL,
    "staging_bytes": STAGING_BUFFERS * BUFFER_BYTES,
}


def cache(block_size, how):
    """Two groups of two layers, whose blocks differ."""
    slid = sliding(2 * block_size, num_kv_heads=4, head_size=4)
    whole = full(block_size, num_kv_heads=4)
    return manifest_of({"a": whole, "b": slid, "c": whole, "d": slid}, num_blocks=NUM_BLOCKS, **how)


def portion_of(binding, pairs, sizes, **budgets):
    """Bind pairs of several reads, as the lanes do."""
    bound = binding.bind(pairs, **{"chunk_bytes": 1 << 40, "chunk_descriptors": 1 << 30} | budgets)
    if binding.scatter is None:
        check_bound(bound, len(pairs.source), check_rows(binding.source.table), check_rows(binding.target.table))
    shares = tuple(Share(read_id, LeaseName(read_id % 3, 70), size) for read_id, size in enumerate(sizes))
    return Portion("p", 1, bound.source_index, bound.target_index, bound.cuts, bound.nbytes, shares)


def chunks_of(portion):
    return [Chunk(portion, first, stop) for first, stop in pairwise(portion.cuts.tolist())]


def descriptors(chunk):
    """Name each descriptor of a chunk by both sides."""
    sides = (index[chunk.first : chunk.stop] for index in (chunk.portion.source_index, chunk.portion.target_index))
    return [*zip(*(side.tolist() for side in sides), strict=True)]


def drawn(group, rng):
    """Pairs of several reads."""
    sources = rng.permutation(NUM_BLOCKS * group.source_units)
    targets = rng.permutation(NUM_BLOCKS * group.target_units)
    count = int(rng.integers(2, min(len(sources), len(targets)) + 1))
    inner = sorted(rng.choice(np.arange(1, count), rng.integers(1, min(count, 6)), replace=False).tolist())
    source = np.concatenate([np.sort(part) for part in np.split(sources[:count], inner)])
    return UnitPairs(source, targets[:count]), np.diff([0, *inner, count]).tolist()


@pytest.mark.parametrize("case", CASES)
def test_each_descriptor_of_a_chunk_belongs_to_the_read_of_its_pair(case):
    source, target = (cache(*side) for side in CASES[case])
    bindings = bind_plan(plan_at(source, target), source, target)
    assert len(bindings) == 2
    cuts = 0
    for seed in range(PORTIONS):
        rng = np.random.default_rng(seed)
        for binding in bindings:
            pairs, sizes = drawn(binding.group, rng)
            read_of = {}
            for at, read_id in enumerate(np.repeat(np.arange(len(sizes)), sizes).tolist()):
                one = UnitPairs(pairs.source[at : at + 1], pairs.target[at : at + 1])
                (chunk,) = chunks_of(portion_of(binding, one, [1]))
                read_of |= dict.fromkeys(descriptors(chunk), read_id)
            budget = int(rng.integers(1, 4 * binding.unit_descriptors))
            chunks, seen = chunks_of(portion_of(binding, pairs, sizes, chunk_descriptors=budget)), []
            for chunk in chunks:
                names, numbers = descriptors(chunk), share_numbers(chunk)
                assert numbers.dtype == np.uint16
                assert numbers.tolist() == [read_of[name] for name in names]
                cuts += len(chunks) > 1 and len(set(numbers.tolist())) > 1
                seen += names
            assert sorted(seen) == sorted(read_of), "each descriptor is in one chunk"
    assert cuts, "no portion of several reads was cut"


def test_one_read_needs_no_numbers():
    index = np.arange(8, dtype=np.int32)
    portion = Portion("p", 1, index, index, np.array([0, 8]), 8, (Share(1, LeaseName(3, 70), 4),))
    assert share_numbers(Chunk(portion, 2, 7)) is None


def test_a_staged_chunk_has_the_share_of_its_units():
    source, target = cache(16, TOKENS_FIRST), cache(16, {**TOKENS_FIRST, "tp": (0, 2)})
    binding = bind_plan(plan_at(source, target, **STAGED), source, target)[0]
    prepared_list = PreparedList(1, "p", binding.source.table, binding.target.table, scatter=binding.scatter)
    rows = check_rows(prepared_list.source_rows), check_rows(prepared_list.target_rows)
    checked = check_scatter(prepared_list, *rows, buffer_bytes=BUFFER_BYTES, regions=target.regions)
    portion = portion_of(binding, UnitPairs(np.arange(10), np.arange(10)), [10])
    fetched = [fetching(Chunk(portion, *part, buffer=0), checked) for part in ((0, 1), (1, 4), (4, 10))]
    assert [[share.pairs for share in chunk.portion.shares] for chunk in fetched] == [[1], [3], [6]]
    assert {share.lease for chunk in fetched for share in chunk.portion.shares} == {LeaseName(0, 70)}
    counts = [chunk.stop - chunk.first for chunk in fetched]
    assert counts == [units * binding.unit_descriptors for units in (1, 3, 6)]
