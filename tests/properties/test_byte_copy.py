"""Any layout to any layout: what a plan moves is what a copy by coordinates moves, byte for byte.

The oracle writes tags through the source's views, and reads them through the target's. Every wanted byte must
be right, and nothing else of the target's allocation may have changed.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvflow.errors import BlockRangeMismatch
from kvflow.transfer.certificate import Missing
from kvflow.transfer.plan import plan_transfer

from .caches import (
    ABSENT,
    ROLES,
    Side,
    covered_tokens,
    execute,
    fill_with_noise,
    mark_free,
    models,
    sides,
    spans,
    thorough,
    write_tags,
)


@dataclass(frozen=True)
class Case:
    """Two caches and one request; ``spare`` blocks of each pool belong to nobody."""

    source: Side
    target: Side
    num_tokens: int
    spare: int
    seed: int


@st.composite
def cases(draw):
    """Every kind of pair: stages, shards, layouts, block sizes, groups in any order."""
    sharded = draw(st.booleans())
    model = draw(models(mixed_heads=not sharded))
    tp_sizes = (1, 2, 3, 4) if sharded else (1,)
    stage = st.lists(st.sampled_from(model.layers), min_size=1, unique=True)
    layers = st.none() | stage
    source = draw(sides(model, layers=draw(layers), tp_sizes=tp_sizes))
    target = draw(sides(model, layers=draw(layers), tp_sizes=tp_sizes))
    assume(source.specs.keys() & target.specs.keys())
    longest = 2 * max(spec.block_size for side in (source, target) for spec in side.specs.values())
    return Case(source, target, draw(st.integers(1, longest + 1)), draw(st.integers(0, 2)), draw(st.integers(0, 2**32)))


def shared_heads(case, layer):
    """Global heads of a layer that both sides hold."""
    if not (layer in case.source.specs and layer in case.target.specs):
        return []
    return sorted({*case.source.heads(layer)} & {*case.target.heads(layer)})


def opened(side, num_tokens, spare, rng):
    """Allocate a pool with room for one request in every group, and list blocks at random places of it."""
    groups = side.cache(1).groups
    counts = [-(-num_tokens // group.block_size) for group in groups]
    cache = side.cache(sum(counts) + spare)
    order = rng.permutation(cache.num_blocks)
    if rng.random() < 0.3:
        order = np.sort(order)
    ids = [order[sum(counts[:index]) :][:count].tolist() for index, count in enumerate(counts)]
    return cache, [thinned(blocks, rng) for blocks in ids]


def thinned(blocks, rng):
    """Keep all, or the last few, and let some be absent."""
    if rng.random() < 0.4:
        blocks = blocks[rng.integers(0, len(blocks) + 1) :]
    if rng.random() < 0.3:
        blocks = [ABSENT if rng.random() < 0.3 else block for block in blocks]
    return blocks


def without_uncovered(case, target, target_ids, covered):
    """Let those target blocks be absent that the source lacks a token of; tell whether there were any."""
    kept, lacking = [], False
    for group, ids in zip(target.groups, target_ids, strict=True):
        needed = [covered[layer] for layer in group.layers if shared_heads(case, layer)]
        there = {
            block
            for block, first, count in spans(ids, group.block_size, case.num_tokens)
            if all(held.issuperset(range(first, first + count)) for held in needed)
        }
        lacking |= any(block not in there for block in ids if block != ABSENT)
        kept.append([block if block in there else ABSENT for block in ids])
    return kept, lacking


def bytes_of(tensor):
    return tensor.numpy().copy()


@thorough
@given(cases())
def test_every_wanted_byte_is_right_and_nothing_else_changes(case):
    rng = np.random.default_rng(case.seed)
    source, source_ids = opened(case.source, case.num_tokens, case.spare, rng)
    target, wanted_ids = opened(case.target, case.num_tokens, case.spare, rng)
    fill_with_noise(source, case.seed)
    fill_with_noise(target, case.seed + 1)
    write_tags(case.source, source, source_ids, case.num_tokens, case.source.heads)
    read_only = bytes_of(source.backing)
    covered = covered_tokens(source, source_ids, case.num_tokens)
    target_ids, lacking = without_uncovered(case, target, wanted_ids, covered)

    expected, free = (case.target.cache(target.num_blocks) for _ in range(2))
    expected.backing.copy_(target.backing)
    write_tags(case.target, expected, target_ids, case.num_tokens, lambda layer: shared_heads(case, layer))
    mark_free(case.target, free, target_ids, case.num_tokens)

    plan = plan_transfer(source.manifest(), target.manifest())
    run = partial(execute, plan, source, target, source_ids=source_ids, num_tokens=case.num_tokens)
    if lacking:
        before = bytes_of(target.backing)
        with pytest.raises(BlockRangeMismatch):
            run(target_ids=wanted_ids)
        target.backing.copy_(torch.from_numpy(before))
    run(target_ids=target_ids)

    meaningful = bytes_of(free.backing) == 0
    assert np.array_equal(bytes_of(target.backing)[meaningful], bytes_of(expected.backing)[meaningful])
    assert np.array_equal(bytes_of(source.backing), read_only)


@thorough
@given(cases())
def test_the_certificate_names_what_the_source_lacks(case):
    source, target = case.source.cache(1), case.target.cache(1)
    certificate = plan_transfer(source.manifest(), target.manifest()).certificate
    missing, page, written = set(), 0, 0
    for layer, spec in case.target.specs.items():
        shared, held = shared_heads(case, layer), case.target.heads(layer)
        per_head = len(ROLES) * spec.block_size * spec.head_size * target.views[layer].element_size()
        page += len(held) * per_head
        written += len(shared) * per_head
        missing |= {(layer, role, head) for role in ROLES for head in held if head not in shared}
    assert heads_in(certificate.missing) == missing
    assert (certificate.page_bytes, certificate.written_bytes) == (page, written)
    assert certificate.complete == (not missing)


def heads_in(gaps: tuple[Missing, ...]):
    named = [(gap.layer, gap.role, head) for gap in gaps for head in range(gap.first, gap.first + gap.count)]
    assert len(set(named)) == len(named)
    return set(named)


@thorough
@given(models(), st.data())
def test_the_views_of_one_cache_do_not_overlap_within_a_group(model, data):
    """The oracle itself stands on this: layers of a group, roles and blocks have bytes of their own."""
    side = data.draw(sides(model, tp_sizes=(1,)))
    cache = side.cache(2)
    for group in cache.groups:
        cache.backing.zero_()
        for layer in group.layers:
            for role in ROLES:
                for block in range(2):
                    side.cells(cache, layer, role, block).add_(1)
        assert int(cache.backing.max()) == 1
        written = sum(side.cells(cache, layer, role, 0).numel() for layer in group.layers for role in ROLES)
        assert int(cache.backing.sum()) == 2 * written
        assert written <= cache.bytes_per_block
