"""A staged plan carried out by hand: fetch descriptor by descriptor, and scatter by the numbers of the boxes."""

import numpy as np

from kvflow.planning.staging import COLUMNS, FIXED
from kvflow.reads.bounds import check_rows, check_scatter
from kvflow.reads.contract import PreparedList
from kvflow.reads.staging import Scatterer
from tests.fakes.staging import STAGE_ALL

from .caches import descriptors, require_inside

BUFFER_BYTES = 1 << 14
"""Small, so that chunks end at the last slot of a buffer."""

TERMS = {"costs": STAGE_ALL, "staging_bytes": 8 * BUFFER_BYTES}


def fetched(binding, bound, source):
    """Yield the buffer of each chunk, and the target units of its slots."""
    scatter, staged = binding.scatter, binding.group.staged
    runs, per_run = len(staged.fetch), binding.source.per_run
    for first, stop in zip(bound.cuts[:-1], bound.cuts[1:], strict=True):
        units = bound.source_index[first:stop].astype(np.int64)
        assert 0 < len(units) <= scatter.places
        content = np.random.default_rng(0).integers(0, 256, staged.buffer_bytes, np.uint8)
        source_index = (np.arange(runs)[:, None] * per_run + units).ravel()
        target_index = (np.arange(runs)[:, None] * scatter.places + np.arange(len(units))).ravel()
        source_at, lengths = descriptors(binding.source.table, source_index)
        target_at, target_lengths = descriptors(binding.target.table, target_index)
        assert np.array_equal(lengths, target_lengths)
        require_inside(source_at, lengths, source.cache.manifest().regions)
        assert np.all(target_at >= 0)
        assert np.all(target_at + lengths <= staged.buffer_bytes)
        for at, to, nbytes in zip(source_at - source.address, target_at, lengths, strict=True):
            content[to : to + nbytes] = source.memory[at : at + nbytes]
        yield content, bound.target_index[first:stop].tolist()


def pieces(table, units, slot, unit):
    """Give the pieces that each box copies from a slot to a unit: bytes, offsets in the buffer, addresses."""
    _, kernel_blocks, per_kernel_block = units
    block, rest = divmod(unit, kernel_blocks * per_kernel_block)
    where = np.array([block, *divmod(rest, per_kernel_block)])
    for row in table:
        axes = row[FIXED:COLUMNS].reshape(-1, 3)
        index = np.array(list(np.ndindex(*axes[:, 0])))
        yield row[0], row[1] + slot * row[2] + index @ axes[:, 1], row[3] + where @ row[4:FIXED] + index @ axes[:, 2]


def scatterer_of(binding, regions):
    """What the transport carries out, after its own checks."""
    prepared_list = PreparedList(1, "p", binding.source.table, binding.target.table, scatter=binding.scatter)
    rows = check_rows(prepared_list.source_rows), check_rows(prepared_list.target_rows)
    return Scatterer(
        check_scatter(prepared_list, *rows, buffer_bytes=binding.group.staged.buffer_bytes, regions=regions)
    )


def copy_staged(binding, pairs, source, target, writes):
    """Do what ``moves`` does for direct bindings."""
    bound = binding.bind(pairs, chunk_bytes=1 << 23, chunk_descriptors=256)
    assert bound.source_index.dtype == bound.target_index.dtype == np.int32
    regions, moved = target.cache.manifest().regions, 0
    scatterer = scatterer_of(binding, regions)
    for content, units in fetched(binding, bound, source):
        before = target.memory.copy()
        for slot, unit in enumerate(units):
            for nbytes, at, to in pieces(binding.scatter.table, binding.scatter.units, slot, unit):
                assert at.min() >= 0
                assert at.max() <= len(content) - nbytes
                require_inside(to, nbytes, regions)
                steps = np.arange(nbytes)
                there = (to - target.address)[:, None] + steps
                target.memory[there] = content[at[:, None] + steps]
                np.add.at(writes, there, 1)
                moved += nbytes * len(at)
        after = target.memory.copy()
        target.memory[:] = before
        scatterer.start(content, np.array(units, np.int32))
        assert np.array_equal(target.memory, after), "the strided copies differ from the pieces one by one"
    assert moved == bound.nbytes
