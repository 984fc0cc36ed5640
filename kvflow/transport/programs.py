"""Check programs, and bind pairs of units to their descriptors, as many at a time as is good. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from kvflow.layout.region import Region
from kvflow.transfer.pairs import UnitPairs
from kvflow.transport.base import CHUNK_BYTES_MAX, CHUNK_DESCRIPTORS_MAX, Program
from kvflow.transport.bounds import (
    CheckedScatter,
    OutOfBounds,
    check_bound,
    check_inside,
    check_rows,
    check_scatter,
    check_staged_bound,
)
from kvflow.transport.mover import Chunk, Portion, Prepared, Share, Staged
from kvflow.transport.post_costs import BYTE_S, DESCRIPTOR_S
from kvflow.transport.staging import StagingMemory

PORTION_BYTES_MAX = 32 << 20
"""Bytes that are read for one portion at most, unless one pair is more: four chunks, so that binding is amortized."""

PORTION_DESCRIPTORS_MAX = 8192
"""Descriptors of one portion before they merge: about 100 us of binding."""


def check_program(program: Program, regions: Sequence[Region], staging: StagingMemory) -> Prepared:
    """Check the rows of a program, and return what reading with it needs.

    Args:
        program: as the caller gave it.
        regions: what targets may lie in.
        staging: buffers for staged programs.

    Raises:
        OutOfBounds: naming what cannot be used, and why.
    """
    source, target, binding = check_rows(program.source_rows), check_rows(program.target_rows), program.binding
    if binding is None:
        raise OutOfBounds("a program without a binding")
    staged = None
    descriptors, nbytes = max(1, binding.unit_descriptors), max(1, binding.read_bytes)
    units = (source.count // descriptors, target.count // descriptors)
    if program.scatter is None:
        check_inside(target, regions, program.target_memory)
    else:
        buffer_bytes = staging.use.buffer_bytes
        checked = check_scatter(program, source, target, buffer_bytes=buffer_bytes, regions=regions)
        target = staging.rows(target)
        staged = Staged(checked, staging.scatterer(checked))
        units = (checked.source_units, math.prod(checked.units))
    return Prepared(
        program,
        source,
        target,
        staged,
        *units,
        pair_bytes=binding.unit_bytes,
        pair_s=descriptors * DESCRIPTOR_S + binding.unit_bytes * BYTE_S,
        portion_pairs=max(1, min(PORTION_BYTES_MAX // nbytes, PORTION_DESCRIPTORS_MAX // descriptors)),
        # What a cancelled read has in a buffer is not copied out of it, so no two reads share a buffer.
        chunk_pairs=0 if staged else min(CHUNK_BYTES_MAX // nbytes, CHUNK_DESCRIPTORS_MAX // descriptors),
    )


def bind_portion(program: Prepared, pairs: UnitPairs, shares: tuple[Share, ...]) -> Portion:
    """Bind pairs of a prepared program.

    Args:
        program: with a binding.
        pairs: checked.
        shares: whose pairs these are.

    Raises:
        OutOfBounds: what the binding has returned does not fit the program.
    """
    binding = program.program.binding
    assert binding is not None
    bound = binding.bind(pairs, chunk_bytes=CHUNK_BYTES_MAX, chunk_descriptors=CHUNK_DESCRIPTORS_MAX)
    if program.staged is None:
        check_bound(bound, len(pairs.source), program.source, program.target)
    else:
        check_staged_bound(bound, len(pairs.source), program.staged.checked)
    peer, program_id = program.program.peer, program.program.program_id
    return Portion(peer, program_id, bound.source_index, bound.target_index, bound.cuts, bound.nbytes, shares)


def fetching(chunk: Chunk, scatter: CheckedScatter) -> Chunk:
    """Return the chunk of descriptors that fetches a chunk of pairs of units into its buffer.

    Its portion has these pairs only: descriptor ``k`` belongs to pair ``first + k % (stop - first)``.
    """
    portion, count = chunk.portion, chunk.stop - chunk.first
    (share,) = portion.shares
    run = np.arange(scatter.fetch_runs, dtype=np.int64)[:, None]
    source = run * scatter.source_units + portion.source_index[chunk.first : chunk.stop]
    target = (chunk.buffer * scatter.fetch_runs + run) * scatter.slots + np.arange(count)
    fetched = Portion(
        peer=portion.peer,
        program_id=portion.program_id,
        source_index=source.astype(np.int32).ravel(),
        target_index=target.astype(np.int32).ravel(),
        cuts=np.array([0, source.size], np.int64),
        nbytes=0,  # it was checked as pairs of units
        shares=(share._replace(pairs=count),),
    )
    return Chunk(fetched, 0, source.size)
