"""What a worker serves: all that plans ask for, and no byte of another block, whatever a peer asks for.

The oracle writes the number of each block through the views of an attention backend, and looks where it landed. It
shares no code with the tracks.
"""

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutMismatch
from kvflow.layout.tracks import tracks_of
from kvflow.planning.bind import bind_plan
from kvflow.reads.bounds import OutOfBounds, check_rows, joined, merge
from kvflow.reads.contract import Serving
from kvflow.reads.serving import LeasedBlocks
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.runs import FEW_RUNS, ServedGroup, SourceList
from tests.fakes.staging import plan_at

from .caches import descriptors, thorough
from .engines import generate_case
from .oracle import Pool
from .pools import open_cache
from .staged import TERMS
from .test_byte_copy import all_cells, cases

seeds = st.integers(0, 2**32)


class Owned:
    """Whose each byte of a cache is.

    Attributes:
        manifest: of the cache.
        tracks: of the cache.
        address: of the first byte.
        blocks: uint8, shape (groups, bytes): one more than the block of that group that the byte belongs to; 0: none.
    """

    def __init__(self, stage, rank, num_blocks, rng):
        cache, memory = open_cache(stage, rank, num_blocks, rng)
        pool = Pool(stage, rank, cache, memory, [])
        self.manifest = cache.manifest()
        self.tracks = tracks_of(self.manifest)
        self.address = pool.address
        self.blocks = np.zeros((len(stage.groups), len(memory)), np.uint8)
        for group, owned in zip(stage.groups, self.blocks, strict=True):
            memory[:] = 0
            for cells in all_cells(pool, group):
                cells[:] = np.arange(1, num_blocks + 1, dtype=np.uint8).reshape(-1, *[1] * (cells.ndim - 1))
            owned[:] = memory

    def require_only(self, group, block, address, nbytes):
        """No byte belongs to another block, in whatever group; and all of them lie in the cache."""
        first = address - self.address
        assert 0 <= first <= first + nbytes <= self.blocks.shape[1]
        for other, owned in enumerate(self.blocks[:, first : first + nbytes]):
            related = self.manifest.aliases[other] == self.manifest.aliases[group]
            assert set(np.unique(owned)) <= ({0, block + 1} if related else {0}), (group, block, other)


def opened(case):
    """Yield every cache of a case."""
    rng = np.random.default_rng(case.seed)
    for stage, rank in (*case.sources, *case.targets):
        yield Owned(stage, rank, int(rng.integers(1, 5)), rng)


@thorough
@given(cases())
def test_tracks_have_every_byte_of_a_block_and_no_byte_of_another(case):
    for owned in opened(case):
        for group, tracks in enumerate(owned.tracks):
            served = np.zeros(owned.blocks.shape[1], np.uint8)
            for address, stride, span, count, *_ in tracks:
                assert count == owned.manifest.num_blocks
                for block in range(count):
                    at = address + block * stride
                    owned.require_only(group, block, at, span)
                    served[at - owned.address :][:span] = block + 1
            mine = owned.blocks[group]
            assert np.array_equal(served[mine > 0], mine[mine > 0])


def bound(case, **terms):
    """Yield each source with each of its bindings to a target."""
    rng = np.random.default_rng(case.seed)
    blocks = int(rng.integers(1, 5))
    sources = [Owned(stage, rank, blocks, rng) for stage, rank in case.sources]
    for stage, rank in case.targets:
        target = open_cache(stage, rank, int(rng.integers(1, 5)), rng)[0].manifest()
        for source in sources:
            try:
                plan = plan_at(source.manifest, target, **terms)
            except LayoutMismatch:  # another stage, with nothing in common
                continue
            for binding in bind_plan(plan, source.manifest, target):
                yield source, binding


def require_served(source, binding):
    """The runs of any descriptors of a binding are their bytes, in the blocks that have them."""
    group, table = binding.group.source_group, binding.source.table
    index = np.arange(table[:, 4].sum(), dtype=np.int32)
    np.random.default_rng(0).shuffle(index)
    published = wire.decode_layout(wire.encode_layout(source.tracks))
    listed = SourceList(check_rows(table), published.groups[group], published.num_blocks, binding.source.memory)
    served = ServedGroup(source.tracks[group])
    for some in (
        index[:1],
        index[:FEW_RUNS],
        np.sort(index[:FEW_RUNS]),
        np.sort(index[: 2 * FEW_RUNS]),
        index,
        np.sort(index),
    ):
        require_runs(listed, served, source, binding, some[: wire.RUNS_MAX])
    require_few_runs(listed, binding, source.manifest.num_blocks)


def require_few_runs(listed, binding, num_blocks):
    """A pull of whole blocks has no more runs than it has descriptors over NIXL."""
    units = np.arange(binding.group.source.per_block * num_blocks)
    first = np.arange(binding.unit_descriptors)[:, None] * binding.source.per_run
    index = (first + binding.source.local(units)[None, :]).ravel().astype(np.int32)
    rows = check_rows(binding.source.table)
    assert len(listed.runs(index)) <= len(merge(rows, index, rows, index))


def require_runs(listed, served, source, binding, index):
    """What the producer finds for the runs of some descriptors are the bytes of these, in order."""
    found = served.resolve(wire.encode_read(0, 0, 0, listed.runs(index))[wire.REQUEST.size :])
    address, nbytes = descriptors(binding.source.table, index.astype(np.int64))
    assert found.nbytes == nbytes.sum()
    starts, lengths = joined(address, nbytes)
    assert [*found.starts] == [*starts]
    assert [*found.lengths] == [*lengths]
    assert found.devices == {-1}
    mine = source.blocks[binding.group.source_group]
    owners = [mine[at - source.address] - 1 for at in address]
    assert {*found.blocks} == {*owners}
    for at, length, block in zip(address - source.address, nbytes, owners, strict=True):
        assert (mine[at : at + length] == block + 1).all()


@thorough
@given(cases(), st.sampled_from(({}, TERMS)))
def test_what_a_plan_reads_is_served_with_the_block_that_has_it(case, terms):
    for source, binding in bound(case, **terms):
        require_served(source, binding)


def test_the_plans_above_are_staged_and_direct_and_of_many_units():
    choose, seen = random.Random(0), Counter()
    for seed in range(30):
        case = generate_case(choose.choice, seed)
        for terms in ({}, TERMS):
            for source, binding in bound(case, **terms):
                require_served(source, binding)
                units = binding.group.source
                seen["staged"] += binding.group.staged is not None
                seen["direct"] += binding.group.staged is None
                seen["kernel blocks"] += units.kernel_blocks > 1
                seen["units"] += units.per_kernel_block > 1
                seen["one row for all units"] += len(binding.source.table) < units.per_block
                seen["one block"] += source.manifest.num_blocks == 1
                seen["several tracks"] += len(source.tracks[binding.group.source_group]) > 1
                seen["packed"] += any(track.span < track.stride for track in source.tracks[binding.group.source_group])
    assert min(seen.values()) > 10, seen
    assert len(seen) == 8


def random_run(choose, tracks):
    """A run that a peer may ask for: near the bounds of a stretch, or any numbers."""
    stretch = choose.randrange(len(tracks))
    track = tracks[stretch]
    times = choose.choice((1, 1, 2, 3, 50))
    stride = choose.choice((0, 1, track.span // times, track.span, track.stride))
    offset = choose.choice((0, 0, 1, track.span // 2, track.span))
    nbytes = choose.choice((1, track.span // times, track.span - offset, track.span))
    first = choose.choice((0, 0, track.count - 1, track.count))
    run = [stretch, first, choose.choice((1, track.count, track.count - first)), offset, nbytes, stride, times]
    if not choose.randrange(4):
        run[choose.randrange(7)] += choose.choice((-1, 1, 2 ** choose.randrange(63), -(2 ** choose.randrange(63))))
    return [max(-(2**63), min(each, 2**63 - 1)) for each in run]


def test_runs_that_are_served_have_bytes_of_their_blocks_only():
    tries = Counter()

    @thorough
    @given(cases(), seeds)
    def ask(case, seed):
        choose = random.Random(seed)
        owned = Owned(*case.sources[0], choose.choice((1, 2, 3, 5)), np.random.default_rng(seed))
        for _ in range(12):
            group = choose.randrange(len(owned.tracks))
            # Few runs are looked up one by one, and many by arrays.
            runs = [random_run(choose, owned.tracks[group])] * choose.choice((1, FEW_RUNS + 1))
            try:
                found = ServedGroup(owned.tracks[group]).resolve(wire.encode_read(0, 0, 0, runs)[wire.REQUEST.size :])
            except OutOfBounds:
                tries["refused", len(runs)] += 1
                continue
            tries["served", len(runs)] += 1
            _, first, count, _, nbytes, _, times = runs[0]
            assert {*found.blocks} == {*range(first, first + count)}
            assert found.nbytes == sum(found.lengths) == nbytes * count * times * len(runs)
            starts = np.array(found.starts) - owned.address
            ends = starts + np.array(found.lengths)
            assert (starts >= 0).all()
            assert (starts <= ends).all()
            assert (ends <= owned.blocks.shape[1]).all()
            foreign = ~np.isin(owned.blocks[group], [0, *(block + 1 for block in found.blocks)])
            before = np.concatenate(([0], np.cumsum(foreign)))
            assert (before[starts] == before[ends]).all(), "a byte of another block"

    ask()
    least = min(tries[each, count] for each in ("served", "refused") for count in (1, FEW_RUNS + 1))
    assert least > settings.default.max_examples // 4, tries


@thorough
@given(st.data())
def test_what_a_lease_holds_is_served_and_nothing_else(data):
    """Leases come and go, more than are kept; groups and slots that no one has are asked for as well."""
    leases = {}
    serving = Serving((), lambda slot, epoch: leases.get((slot, epoch)), lambda key: False, b"")
    leased = LeasedBlocks(serving, leases_max=2, ids_max=12)
    ids = st.lists(st.lists(st.integers(-1, 9), max_size=9), max_size=3)
    names = st.tuples(st.integers(0, 2), st.integers(7, 8))
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(names)
        match data.draw(st.sampled_from(("admit", "end", "look", "look"))):
            case "admit":
                leases[name] = data.draw(ids)
            case "end":
                leases.pop(name, None)
            case _:
                group, block = data.draw(st.integers(0, 3)), data.draw(st.lists(st.integers(0, 10)))
                held = leased.held(*name, group, np.array(block, np.int64))
                few = leased.ids(*name, group)
                if name not in leases:
                    assert held is few is None
                else:
                    blocks = leases[name][group] if group < len(leases[name]) else []
                    assert held.tolist() == [each in blocks for each in block]
                    assert held.tolist() == [each in few for each in block]
