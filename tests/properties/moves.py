"""A request of one target rank, carried out and compared with what a copy by coordinates makes of it."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from kvflow.errors import BlockRangeMismatch
from kvflow.leases.blocks import check_block_ids
from kvflow.planning.assignment import assign_sources
from kvflow.planning.bind import bind_plan
from kvflow.planning.pairs import pair_units
from tests.fakes.staging import plan_at

from .caches import places
from .oracle import ABSENT, Shared, tokens_by_block, write
from .pools import open_pool
from .staged import copy_staged

SLICED_BYTES_MIN = 1024
"""Longer descriptors are copied one by one, because an index for each of their bytes costs more."""


def require_right_bytes(case, **terms):
    """Pull a request: every wanted byte arrives once and is right, and nothing else is written.

    ``terms`` are what plans are made on; return those plans.
    """
    plans = []
    rng = np.random.default_rng(case.seed)
    sources = open_sources(case, rng)
    for number, (stage, rank) in enumerate(case.targets):
        target = open_pool(stage, rank, case.model, rng, thinning=(case.seed, 99 + number))
        plans += require_pulled(case, sources, target, **terms)
    return plans


def open_sources(case, rng):
    """Open the pools of all source ranks, with the model's bytes in them; the ranks of a stage leave out the same."""
    stages = list(dict.fromkeys(id(stage) for stage, _ in case.sources))
    pools = []
    for stage, rank in case.sources:
        pool = open_pool(stage, rank, case.model, rng, thinning=(case.seed, stages.index(id(stage))))
        write(pool, case.model, Shared(lambda _, total, pool=pool: pool.held(total)))
        pools.append(pool)
    return pools


def require_pulled(case, sources, target, **terms):
    """Check one target rank against what the sources have; return the plans."""
    plans = planned(case, sources, target, **terms)
    shared = shared_with(case, sources, target)
    require_true_certificates([(source, plan.certificate) for source, plan in plans], target, shared)
    kept, lacking = without_uncovered(case, sources, target, shared)
    noise = target.memory.copy()
    if lacking:
        with pytest.raises(BlockRangeMismatch):
            carry_out(case, plans, target)
        target.memory[:] = noise
    target = replace(target, block_ids=kept)
    before = [source.memory.copy() for source, _ in plans]
    writes = carry_out(case, plans, target)
    for (source, _), memory in zip(plans, before, strict=True):
        assert np.array_equal(source.memory, memory), "a source was written"
    require_arrived(case.model, target, noise, writes, shared)
    return [plan for _, plan in plans]


def planned(case, sources, target, **terms):
    """Return (source, plan) for each source that gives something."""
    ours, theirs = target.cache.manifest(), [source.cache.manifest() for source in sources]
    if not case.whole:
        return [(sources[0], plan_at(theirs[0], ours, **terms))]
    shares = {} if case.turn is not None else shared_out_anyhow(case, sources, target)
    if not shares:
        shares = {share.source: share.head_ranges for share in assign_sources(ours, theirs, rotation=case.turn or 0)}
    return [
        (sources[index], plan_at(theirs[index], ours, head_ranges=pieces, **terms))
        for index, pieces in sorted(shares.items())
    ]


def shared_out_anyhow(case, sources, target):
    """Divide the target among whoever holds its parts, without any order; return nothing where that leads nowhere."""
    rng = np.random.default_rng(case.seed)
    shares = {}
    for group, _ in target.groups():
        for layer in group.layers:
            for role, total, _ in pieces_of(target.stage.layers[layer], group):
                for among in _by_tokens(sources, target, layer, rng):
                    held = {index: sources[index].held(total) for index in among}
                    given = _divide_heads(target.held(total), held, rng)
                    if not given:
                        return {}
                    for index, piece in given.items():
                        shares.setdefault(index, {})[layer, role] = piece
    return shares


def _by_tokens(sources, target, layer, rng):
    """Yield the numbers of the sources of one stage that hold the same tokens of a layer, if the target has any."""
    stages = list({id(source.stage): source.stage for source in sources if layer in source.stage.layers}.values())
    stage = stages[rng.integers(len(stages))]
    among = {}
    for index, source in enumerate(sources):
        alike = source.stage is stage or source.stage.dcp_size == stage.dcp_size == 1
        if alike and layer in source.stage.layers and share_of_tokens(source, target, layer):
            among.setdefault(source.stage.place(source.rank)[1] % source.dcp_size_of(layer), []).append(index)
    return list(among.values())


def _divide_heads(wanted, held, rng):
    """Let each source give what it may of one component, at most once; return nothing where that leads nowhere."""
    given = {}
    while wanted:
        holders = {
            index: [number for number in numbers if number in wanted]
            for index, numbers in held.items()
            if wanted[0] in numbers and index not in given
        }
        if not holders:
            return {}
        index = int(rng.choice(list(holders)))
        count = len(holders[index]) if rng.random() < 0.7 else 1
        given[index] = (wanted[0], count)
        wanted = wanted[count:]
    return given


def shared_with(case, sources, target):
    """Return what the target holds, and some source as well."""
    if case.whole:
        return Shared(lambda _, total: target.held(total))
    (source,) = sources

    def heads(layer, total):
        if layer not in source.stage.layers or not share_of_tokens(source, target, layer):
            return []
        return [number for number in target.held(total) if number in source.held(total)]

    def tokens(layer, numbers):
        return source.has_token(layer, numbers) if layer in source.stage.layers else np.ones(len(numbers), bool)

    return Shared(heads, tokens, lambda layer: share_of_tokens(source, target, layer))


def share_of_tokens(source, target, layer):
    """Return which part of the target's tokens a source holds of a layer."""
    if layer not in source.stage.layers:
        return 0
    tokens = both_periods(source, target)
    ours = target.has_token(layer, tokens)
    return Fraction(int((ours & source.has_token(layer, tokens)).sum()), int(ours.sum()))


def both_periods(source, target):
    """Return tokens from 0 on, until who holds them recurs on both sides."""
    return np.arange(math.lcm(*(pool.stage.dcp_size * pool.stage.interleave for pool in (source, target))))


def require_true_certificates(proven, target, shared):
    """Together they write what is shared, and name the rest; where tokens are divided, bytes are rounded down."""
    certificates = [certificate for _, certificate in proven]
    page, written, lacked = 0, 0, set()
    for group, _ in target.groups():
        for layer in group.layers:
            for role, total, nbytes in pieces_of(target.stage.layers[layer], group):
                ours, both = target.held(total), shared.heads(layer, total)
                page += len(ours) * nbytes
                written += len(both) * nbytes * shared.part(layer) if both else 0
                lacked |= {(layer, role, number) for number in ours if number not in both}
    assert {certificate.page_bytes for certificate in certificates} == {page}
    rounded = written - sum(certificate.written_bytes for certificate in certificates)
    assert 0 <= rounded < 1 + sum(divided_groups(source, target) for source, _ in proven)
    assert set.intersection(*(named_gaps(certificate) for certificate in certificates)) == lacked
    for source, certificate in proven:
        lacking = {gap.layer for gap in certificate.missing if gap.indices == "tokens"}
        named = {layer for layer, _, _ in named_gaps(certificate)}
        partly = {layer for layer in target.stage.layers if share_of_tokens(source, target, layer) < 1}
        assert lacking <= partly <= lacking | named
        assert certificate.complete == (not certificate.missing)


def divided_groups(source, target):
    """Count pairs of groups between which some tokens move, and not all."""
    return len(
        {
            (there.layers, here.layers)
            for there in source.stage.groups
            for here in target.stage.groups
            for layer in set(there.layers) & set(here.layers)
            if 0 < share_of_tokens(source, target, layer) < 1
        }
    )


def pieces_of(kind, group):
    """Yield role, extent of the axis that ranks divide, and bytes of one of its indices in a block."""
    if kind.tokens:
        for _, parts in kind.planes:
            yield from ((role, kind.heads, group.block_size * nbytes) for role, _, nbytes in parts)
        return
    for role, shape, item, axis in kind.states:
        total = 1 if axis is None else shape[axis]
        yield role, total, math.prod(shape) * item // total


def named_gaps(certificate):
    gaps = [
        (gap.layer, gap.role, number)
        for gap in certificate.missing
        if gap.indices != "tokens"
        for number in range(gap.first, gap.first + gap.count)
    ]
    assert len(set(gaps)) == len(gaps)
    return set(gaps)


def without_uncovered(case, sources, target, shared):
    """Let those target blocks be absent of which some holder lacks a token; tell whether all lack one of some block."""
    lists, lacking = [], False
    for group, ids in target.groups():
        kept = list(ids)
        for layer in group.layers:
            pieces = pieces_of(target.stage.layers[layer], group)
            if not any(shared.heads(layer, total) for _, total, _ in pieces):
                continue
            holders = [
                (pool, set().union(*tokens_by_block(pool, case.model, layer).values()))
                for pool in sources
                if layer in pool.stage.layers
            ]
            for block, needed in tokens_by_block(target, case.model, layer).items():
                for token in needed:
                    listed = [token in tokens for pool, tokens in holders if pool.has_token(layer, token)]
                    lacking |= bool(listed) and not any(listed)
                    if not all(listed):
                        kept[ids.index(block)] = ABSENT
        lists.append(kept)
    return lists, lacking


def carry_out(case, plans, target):
    """Copy what each plan says, descriptor by descriptor; return how often each byte of the target was written."""
    writes = np.zeros(target.memory.shape, np.uint8)
    ours = target.cache.manifest()
    wanted = check_block_ids(target.block_ids, num_blocks=ours.num_blocks, aliases=range(len(ours.groups)), unique=True)
    for source, plan in plans:
        theirs = source.cache.manifest()
        offered = check_block_ids(
            source.block_ids, num_blocks=theirs.num_blocks, aliases=range(len(theirs.groups)), unique=False
        )
        for group, binding in zip(plan.groups, bind_plan(plan, theirs, ours), strict=True):
            pairs = pair_units(
                group,
                offered[group.source_group],
                wanted[group.target_group],
                num_tokens=_num_tokens(case.model, target, group.target_group),
            )
            if len(pairs.source):
                copy = _copy if group.staged is None else copy_staged
                copy(binding, pairs, source, target, writes)
    return writes


def _num_tokens(model, pool, group):
    return model.tokens_of(pool.stage.groups[group].layers[0])


def _copy(binding, pairs, source, target, writes):
    source_at, target_at, lengths = places(binding, pairs, source.cache.manifest(), target.cache.manifest())
    for nbytes in np.unique(lengths):
        chosen = lengths == nbytes
        both = source_at[chosen] - source.address, target_at[chosen] - target.address
        if nbytes >= SLICED_BYTES_MIN:
            for at, to in zip(*both, strict=True):
                target.memory[to : to + nbytes] = source.memory[at : at + nbytes]
                writes[to : to + nbytes] += 1
            continue
        at, to = (place[:, None] + np.arange(nbytes) for place in both)
        target.memory[to] = source.memory[at]
        np.add.at(writes, to, 1)


def require_arrived(model, target, noise, writes, shared):
    """Compare all memory with what a copy by coordinates makes of the noise that was there."""
    after = target.memory.copy()
    target.memory[:] = noise
    write(target, model, shared)
    expected = target.memory.copy()
    wanted, free = marked(target, model, shared), marked(target, model, shared, past_the_end=True)
    assert np.array_equal(after[~free], expected[~free]), "a byte is wrong"
    assert np.all(writes[wanted] == 1), "a wanted byte is not written once"
    assert not np.any(writes[~wanted & ~free]), "a byte outside is written"
    assert np.all(writes <= 1), "a byte is written twice"


def marked(pool, model, shared, **where):
    """Tell of every byte of a pool whether ``write`` reaches it."""
    pool.memory[:] = 0
    write(pool, model, shared, value=1, **where)
    return pool.memory == 1
