"""Which lease vouches for each descriptor of a chunk, against pairs that are bound one by one."""

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.transfer.bind_plan import bind_plan
from kvflow.transfer.costs import Costs
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.plan import plan_transfer
from kvflow.transfer.requests import LeaseShare, join_shares
from kvflow.transfer.staging import STAGING_BUFFERS
from kvflow.transport.base import Program, Read
from kvflow.transport.bounds import check_read, check_rows, check_scatter, check_staged_read
from kvflow.transport.ledger import Chunk, Ledger, lease_numbers
from kvflow.transport.staging import fetching
from tests.unit.kvflow.transfer.helpers import full, manifest_of, sliding

NUM_BLOCKS, BUFFER_BYTES, BATCHES = 24, 1 << 16, 20
STAGED = {
    "costs": Costs(descriptor_s=1e-3, read_byte_s=0.0, copy_s=1e-9, piece_s=0.0, copied_byte_s=0.0),
    "staging_bytes": STAGING_BUFFERS * BUFFER_BYTES,
}
TOKENS_FIRST = {"layout": "LBNHC", "kv": "split"}
HALF = {**TOKENS_FIRST, "tp": (0, 2)}
CASES = {
    "units of a block": ((16, {}), (32, {}), {}),
    "runs of several lengths": ((16, {"layout": "BLNHC"}), (16, {}), {}),
    "staged": ((16, TOKENS_FIRST), (16, HALF), STAGED),
    "staged units of a block": ((32, TOKENS_FIRST), (16, HALF), STAGED),
}


def cache(block_size, how):
    """Two groups of two layers, whose blocks differ."""
    slid = sliding(2 * block_size, num_kv_heads=4, head_size=4)
    whole = full(block_size, num_kv_heads=4)
    return manifest_of({"a": whole, "b": slid, "c": whole, "d": slid}, num_blocks=NUM_BLOCKS, **how)


def bound_read(binding, pairs, leases, **budgets):
    bound = binding.bind(pairs, **{"chunk_bytes": 1 << 40, "chunk_descriptors": 1 << 30} | budgets)
    index = bound.source_index, bound.target_index
    return Read(1, "p", 1, *index, bound.cuts, bound.nbytes, leases=leases)


def posted(binding, read, target):
    """Check a read as the owner does, and return its chunks as a mover gets them."""
    program = Program(1, "p", binding.source.table, binding.target.table, scatter=binding.scatter)
    rows = check_rows(program.source_rows), check_rows(program.target_rows)
    ledger, chunks, checked = Ledger(1), [], None
    if binding.scatter is None:
        check_read(read, *rows)
    else:
        checked = check_scatter(program, *rows, buffer_bytes=BUFFER_BYTES, regions=target.regions)
        check_staged_read(read, checked)
    ledger.open("p")
    ledger.admit(read, staged=checked is not None)
    while (chunk := ledger.take()) is not None:
        chunks.append(chunk if checked is None else fetching(chunk, checked))
        ledger.arrived(chunk, 0.0)
    return chunks


def descriptors(binding, chunk):
    """Name each descriptor of a chunk: by both sides, but in a buffer only the slot decides where it goes."""
    part = slice(chunk.first, chunk.stop)
    source, target = chunk.read.source_index[part].tolist(), chunk.read.target_index[part].tolist()
    return [*zip(source, target, strict=True)] if binding.scatter is None else source


def a_batch(binding, rng):
    """Pairs of several leases, some of which have pairs in two places, as one batch has them."""
    group = binding.group
    sources = rng.permutation(NUM_BLOCKS * group.source_units)
    targets = rng.permutation(NUM_BLOCKS * group.target_units)
    count = int(rng.integers(2, min(len(sources), len(targets)) + 1))
    inner = sorted(rng.choice(np.arange(1, count), rng.integers(1, min(count, 6)), replace=False).tolist())
    sizes = np.diff([0, *inner, count]).tolist()
    slices = [(int(rng.integers(3)), 70, size) for size in sizes]
    source = np.concatenate([np.sort(part) for part in np.split(sources[:count], inner)])
    return UnitPairs(source, targets[:count]), slices


@pytest.mark.parametrize("case", CASES)
def test_each_descriptor_of_a_chunk_has_the_lease_of_its_pair(case):
    source, target, terms = CASES[case]
    source, target = cache(*source), cache(*target)
    plan = plan_transfer(source, target, **terms)
    bindings = bind_plan(plan, source, target)
    assert len(bindings) == 2
    assert all((binding.scatter is not None) == bool(terms) for binding in bindings)
    cuts = 0
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        for binding in bindings:
            pairs, slices = a_batch(binding, rng)
            leases = join_shares(LeaseShare(*each) for each in slices)
            lease_of = {}
            vouching = [(slot, epoch) for slot, epoch, size in slices for _ in range(size)]
            for at, lease in enumerate(vouching):
                one = UnitPairs(pairs.source[at : at + 1], pairs.target[at : at + 1])
                (chunk,) = posted(binding, bound_read(binding, one, ()), target)
                lease_of |= dict.fromkeys(descriptors(binding, chunk), lease)
            budgets = {"chunk_descriptors": int(rng.integers(1, 4 * binding.unit_descriptors))}
            read = bound_read(binding, pairs, leases, **budgets)
            seen, chunks = [], posted(binding, read, target)
            for chunk in chunks:
                names, numbers = descriptors(binding, chunk), lease_numbers(chunk)
                if numbers is None:
                    assert len(chunk.read.leases) == 1
                    numbers = np.zeros(len(names), np.uint16)
                assert numbers.dtype == np.uint16
                told = [(share.slot, share.epoch) for share in map(chunk.read.leases.__getitem__, numbers.tolist())]
                assert told == [lease_of[name] for name in names]
                cuts += len(chunks) > 1 and len(set(told)) > 1
                seen += names
            assert sorted(seen) == sorted(lease_of), "each descriptor is in one chunk"
    assert cuts, "no read of several leases was cut"


@pytest.mark.parametrize("leases", [(), (LeaseShare(3, 70, 4),)])
def test_one_lease_needs_no_numbers(leases):
    index = np.arange(8, dtype=np.int32)
    read = Read(1, "p", 1, index, index, np.array([0, 8]), 8, leases=leases)
    assert lease_numbers(Chunk(read, 2, 7)) is None


def test_a_staged_chunk_has_the_leases_of_its_units_only():
    source, target = cache(16, TOKENS_FIRST), cache(16, HALF)
    binding = bind_plan(plan_transfer(source, target, **STAGED), source, target)[0]
    shares = tuple(LeaseShare(slot, 70, size) for slot, size in enumerate((2, 3, 1, 4)))
    read = bound_read(binding, UnitPairs(np.arange(10), np.arange(10)), shares)
    read = replace(read, cuts=np.array([0, 1, 4, 6, 10]))
    told = [[(share.slot, share.pairs) for share in chunk.read.leases] for chunk in posted(binding, read, target)]
    assert told == [[(0, 1)], [(0, 1), (1, 2)], [(1, 1), (2, 1)], [(3, 4)]]
