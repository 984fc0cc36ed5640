"""Pair units of source blocks with the units of target blocks that they fill.

A list of block ids names consecutive blocks of its group, and its last block holds token ``num_tokens - 1``;
a shorter list therefore means the last blocks. ``-1`` stands for an absent block. Nothing is clipped: if the source
does not cover a token range of the target, the pull is refused. The only exception is the part before a sliding window,
in the block where the window begins.

If ranks divide the tokens of a request, a list names blocks of all tokens, and a rank has the units of its stripe.
Other sources give the units that the source's stripe does not have; see ``assign_sources``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kvflow.errors import BlockRangeMismatch, CapacityExceeded, counted
from kvflow.ids import ABSENT, FEW_IDS, Ids, Int64s
from kvflow.planning.plan import GroupPlan
from kvflow.planning.runs import UNITS_MAX, Bools, Units


class UnitPairs(Struct, frozen=True, eq=False, gc=False):
    """Pairs of units, as ``block * units per block + unit`` on each side; those of each request ascend by source."""

    source: Ids
    target: Ids


def joined(several: Sequence[UnitPairs]) -> UnitPairs:
    """Return the pairs of several reads as one object, in their order."""
    source: list[int] = []
    target: list[int] = []
    for pairs in several:
        if not isinstance(pairs.source, tuple) or not isinstance(pairs.target, tuple):
            return UnitPairs(
                np.concatenate([each.source for each in several]), np.concatenate([each.target for each in several])
            )
        source += pairs.source
        target += pairs.target
    return UnitPairs(tuple(source), tuple(target))


def merged_pairs(pairs: UnitPairs) -> list[tuple[int, int, int]]:
    """Return the pairs as runs that ascend by one on both sides: first source unit, first target unit, and count."""
    source, target = np.asarray(pairs.source, np.int64), np.asarray(pairs.target, np.int64)
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [len(source)]]))
    return list(zip(source[starts].tolist(), target[starts].tolist(), counts.tolist(), strict=True))


def located(pairs: UnitPairs, blocks: Sequence[int], per_block: int) -> UnitPairs:
    """Give pairs whose source units count from the first of some blocks the units of these blocks.

    Raises:
        BlockRangeMismatch: one of the blocks that are read is absent.
    """
    units = np.asarray(pairs.source, np.int64)
    found = np.asarray(blocks, np.int64)[units // per_block]
    if found.min(initial=0) < 0:
        raise BlockRangeMismatch("the producer does not have a block of these tokens")
    return _ascending(found * per_block + units % per_block, np.asarray(pairs.target, np.int64))


def pair_units(group: GroupPlan, source_ids: Ids, target_ids: Ids, *, num_tokens: int) -> UnitPairs:
    """Pair every target unit that has a token and that both sides hold with the source unit of its tokens.

    The lists are checked. ``num_tokens`` are those of the request in the source group.

    Raises:
        BlockRangeMismatch: the ticket does not cover tokens of the target that the source holds; or a list has blocks
            before token 0, so its last block cannot hold the last token.
        CapacityExceeded: the blocks are far larger than those of any engine.
    """
    # In the most common case each block is a unit, none is absent, and both sides list equally many.
    alike = group.whole and 0 < len(source_ids) == len(target_ids) <= -(-num_tokens // group.target.tokens)
    if isinstance(source_ids, tuple) and isinstance(target_ids, tuple):
        if alike and min(source_ids) >= 0 and min(target_ids) >= 0:
            return _ascending_few(source_ids, target_ids)
        pairs = _pair_few(group, source_ids, target_ids, num_tokens) if group.aligned else None
        if pairs is not None:
            return pairs
    source, target = np.asarray(source_ids, np.int64), np.asarray(target_ids, np.int64)
    if alike and np.minimum.reduce(source) >= 0 and np.minimum.reduce(target) >= 0:
        return _ascending(source, target)
    return _pair_many(group, source, target, num_tokens)


def _ascending_few(source: tuple[int, ...], target: tuple[int, ...]) -> UnitPairs:
    """Order pairs by source if needed."""
    ascending = sorted(source)
    if source == (*ascending,):
        return UnitPairs(source, target)
    order = sorted(range(len(source)), key=source.__getitem__)
    return UnitPairs(tuple(ascending), tuple(map(target.__getitem__, order)))


def _ascending(source: Int64s, target: Int64s) -> UnitPairs:
    """Order pairs by source if needed; return few pairs as tuples."""
    if np.count_nonzero(source[1:] < source[:-1]):
        order = np.argsort(source, kind="stable")  # takes half as long
        source, target = source[order], target[order]
    return (
        UnitPairs(source, target)
        if len(source) > FEW_IDS
        else UnitPairs(tuple(source.tolist()), tuple(target.tolist()))
    )


def _pair_few(
    group: GroupPlan, source_ids: tuple[int, ...], target_ids: tuple[int, ...], num_tokens: int
) -> UnitPairs | None:
    """Pair few units of sides that hold the same tokens; None if a unit is missing, so ``_pair_many`` must decide."""
    source = _list_few(source_ids, group.source, num_tokens)
    target = _list_few(target_ids, group.target, num_tokens)
    if source is None or target is None:
        return None
    # Both lists end with the last unit that has a token. If the target's list is longer, the extra units must be
    # absent.
    ahead = len(target) - len(source)
    if ahead > 0:
        if max(target[:ahead]) >= 0:
            return None
        target = target[ahead:]
    elif ahead < 0:
        source = source[-ahead:]
    if ABSENT in target:
        kept = [at for at, unit in enumerate(target) if unit >= 0]
        source, target = tuple([source[at] for at in kept]), tuple([target[at] for at in kept])
    return None if ABSENT in source else _ascending_few(source, target)


def _list_few(ids: tuple[int, ...], units: Units, num_tokens: int) -> tuple[int, ...] | None:
    """Cut blocks into units as ``_listed`` does. Return None if there are many, or too many for the tokens."""
    tokens, per_block, stripe = units.tokens, units.per_block, units.stripe
    if not tokens:
        return ids if len(ids) <= 1 else None
    blocks_held = -(-num_tokens // (tokens * per_block * stripe.size))
    if len(ids) > blocks_held or len(ids) * per_block > FEW_IDS:
        return None
    if per_block == stripe.size == 1:
        return ids
    units_held = -(-stripe.count(num_tokens) // tokens)
    spare = blocks_held * per_block - units_held  # units after the last token
    if per_block > 1:
        units_of = range(per_block)
        ids = tuple([block * per_block + unit if block >= 0 else ABSENT for block in ids for unit in units_of])
    return ids[:-spare] if spare else ids


def _pair_many(group: GroupPlan, source_ids: Int64s, target_ids: Int64s, num_tokens: int) -> UnitPairs:
    source, target = (
        _listed(ids, units, num_tokens) for ids, units in ((source_ids, group.source), (target_ids, group.target))
    )
    for side, index, ids, listed in (
        ("source", group.source_group, source_ids, source),
        ("target", group.target_group, target_ids, target),
    ):
        if listed.first < 0 and np.any(listed.units[: -listed.first] >= 0):
            raise BlockRangeMismatch(
                f"{side} group {index}: {counted(len(ids), 'block')} exceed {counted(num_tokens, 'token')}: "
                "the list starts before token 0",
                group=group.target_group,
            )
    wanted = target.units >= 0
    if group.aligned:
        picked = _side_by_side(source, target)
    else:
        picked, here = _by_token(group, source, target)
        wanted &= here
    wanted &= (picked >= 0) | ~_outside_window(group, target, num_tokens)
    lacking = wanted & (picked < 0)
    if lacking.any():
        position = (target.first + int(lacking.argmax())) * group.unit_tokens
        raise BlockRangeMismatch(
            f"group {group.target_group}: the ticket's {len(source_ids)} blocks of source group "
            f"{group.source_group} do not cover token {group.target.stripe.token(position)}",
            group=group.target_group,
        )
    units = target.units
    if not wanted.all():
        picked, units = picked[wanted], units[wanted]
    return _ascending(picked, units)


class _Listed(NamedTuple):
    """A list of blocks, cut into units; ``first`` is the number of its first unit, counted from token 0."""

    first: int
    units: Int64s


def _listed(ids: Int64s, units: Units, num_tokens: int) -> _Listed:
    """Cut blocks into units. Leave out units after the last token, which nothing reads."""
    per_block = units.per_block
    if not units.tokens:  # a request has one state, which is one unit
        return _Listed(1 - len(ids), ids)
    blocks_held = -(-num_tokens // (units.tokens * per_block * units.stripe.size))
    units_held = -(-units.stripe.count(num_tokens) // units.tokens)
    first = (blocks_held - len(ids)) * per_block
    if per_block == 1:
        return _Listed(first, ids[: max(0, units_held - first)])
    if len(ids) * per_block > UNITS_MAX:
        raise CapacityExceeded("units of one request", UNITS_MAX, remedy="Use block sizes that divide.")
    values = (ids[:, None] * per_block + np.arange(per_block, dtype=np.int64)).ravel()
    values[np.repeat(ids == ABSENT, per_block)] = ABSENT
    return _Listed(first, values[: max(0, units_held - first)])


def _outside_window(group: GroupPlan, target: _Listed, num_tokens: int) -> Bools:
    """Return which units lie before a window, in the block where it begins: a source may have freed them.

    The window is that of the token behind the last unit that the target names.
    """
    named = np.flatnonzero(target.units >= 0)
    if not group.window or not len(named):
        return np.zeros(len(target.units), bool)
    num_tokens = min(num_tokens, (target.first + int(named[-1]) + 1) * group.unit_tokens)
    first_token = max(0, num_tokens - (group.window - 1))
    first_unit = first_token // (group.unit_tokens * group.target.per_block) * group.target.per_block
    numbers = np.arange(target.first, target.first + len(target.units))
    return (numbers >= first_unit) & ((numbers + 1) * group.unit_tokens <= first_token)


def _side_by_side(source: _Listed, target: _Listed) -> Int64s:
    """Return the source unit of each target unit, or ``ABSENT``, for sides with the same tokens."""
    picked = np.full(len(target.units), ABSENT, np.int64)
    low = max(source.first, target.first)
    high = min(source.first + len(source.units), target.first + len(target.units))
    if low < high:
        picked[low - target.first : high - target.first] = source.units[low - source.first : high - source.first]
    return picked


def _by_token(group: GroupPlan, source: _Listed, target: _Listed) -> tuple[Int64s, Bools]:
    """Return the source unit of each target unit, or ``ABSENT``, and whether the source's stripe has it."""
    picked = np.full(len(target.units), ABSENT, np.int64)
    here, numbers = group.shared_units(target.first, len(target.units))
    at = numbers - source.first
    found = np.flatnonzero(here & (at >= 0) & (at < len(source.units)))
    picked[found] = source.units[at[found]]
    return picked, here
