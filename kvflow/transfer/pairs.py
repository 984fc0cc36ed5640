"""Which unit of which source block fills which unit of which target block.

A list of block ids names consecutive blocks of its group, and its last block holds token ``num_tokens - 1``;
a shorter list therefore means the last blocks. ``-1`` stands for an absent block. Nothing is clipped: a token
range of the target that the source does not cover is refused, but for what a sliding window has passed in the block
where it begins.

Where ranks divide the tokens of a request, a list names blocks of all of them, and a rank's own units are those of
its stripe. Units that the source's stripe lacks are other sources' to give: which these are is ``share_out``'s to say.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.cache.blocks import ABSENT, Ids
from kvflow.errors import BlockIdsInvalid, BlockRangeMismatch, CapacityExceeded
from kvflow.transfer.plan import GroupPlan
from kvflow.transfer.runs import UNITS_MAX, Bools, Units

Int64s = npt.NDArray[np.int64]

FEW = 64
"""Up to so many block ids, or units of a list, Python is faster than NumPy, of which each call takes a microsecond."""

BLOCKS_PER_ID = 64
"""Up to so many blocks of a pool per id, a mark for each tells faster than sorting whether ids are distinct."""

_INTEGERS = {int}
_LISTS = frozenset((list, tuple))


class UnitPairs(Struct, frozen=True, eq=False, gc=False):
    """Pairs of units; those of one request ascend by source.

    Attributes:
        source: n numbers, ``block * source_units + unit``.
        target: n numbers, ``block * target_units + unit``.
    """

    source: Ids
    target: Ids


def joined(several: Sequence[UnitPairs]) -> UnitPairs:
    """Return the pairs of several reads as one, in their order."""
    source, target = [], []
    for pairs in several:
        if not isinstance(pairs.source, list) or not isinstance(pairs.target, list):
            return UnitPairs(
                np.concatenate([each.source for each in several]), np.concatenate([each.target for each in several])
            )
        source += pairs.source
        target += pairs.target
    return UnitPairs(source, target)


def check_block_ids(
    block_ids: Sequence[Sequence[int]],
    *,
    num_blocks: int,
    aliases: Sequence[int],
    unique: bool,
    decoded: bool = False,
) -> tuple[Ids, ...]:
    """Check the caller's lists and return copies: those of up to ``FEW`` ids as lists, longer ones as int64 arrays.

    Args:
        block_ids: one list per group.
        num_blocks: ids are in ``[0, num_blocks)``, or ``ABSENT``.
        aliases: alias class of each group; within one class an id may stand in one group only, whose bytes it names.
        unique: whether it may stand there only once (it may, among targets).
        decoded: whether these are the tuples of a decoded ticket: integers, none of them below ``ABSENT``.

    Raises:
        BlockIdsInvalid: names the group and the offending id.
    """
    try:
        num_lists = len(block_ids)
    except TypeError as error:
        found = type(block_ids).__name__
        raise BlockIdsInvalid(f"block ids must be one list per group, not {found}") from error
    if num_lists != len(aliases):
        raise BlockIdsInvalid(f"{num_lists} lists of block ids for {len(aliases)} groups")
    checked: list[Ids] = []
    for group, ids in enumerate(block_ids):
        if type(ids) in _LISTS and 0 < len(ids) <= FEW:
            few = list(ids)
            integers = decoded or (set(map(type, few)) == _INTEGERS and min(few) >= ABSENT)
            if integers and max(few) < num_blocks:
                checked.append(few)
                continue
        checked.append(_as_ids(ids, group, num_blocks))
    for members in _to_compare(tuple(aliases), unique):
        first = checked[members[0]]
        if len(members) > 1 or not isinstance(first, list) or len(set(first)) < len(first):
            _check_class(checked, members, num_blocks, unique=unique)
    return tuple(checked)


@lru_cache(maxsize=64)
def _to_compare(aliases: tuple[int, ...], unique: bool) -> tuple[tuple[int, ...], ...]:
    """Return the groups of each alias class; classes of one group only if its ids are to be unique."""
    classes = [[group for group, value in enumerate(aliases) if value == alias] for alias in sorted(set(aliases))]
    return tuple(tuple(members) for members in classes if unique or len(members) > 1)


def _as_ids(ids: Sequence[int], group: int, num_blocks: int) -> Ids:
    """Return a copy of one list, each of whose ids is a block or absent."""
    if type(ids) in _LISTS and not ids:
        return []
    found = None
    if type(ids) in _LISTS and type(ids[0]) is int:
        # Of a list that begins with an integer NumPy accepts the same, but takes longer. It says what is wrong.
        with suppress(TypeError, OverflowError, ValueError):
            found = np.frombuffer(array("q", ids), np.int64)
    if found is None or np.minimum.reduce(found) < ABSENT or np.maximum.reduce(found) >= num_blocks:
        found = _as_array(ids, group, num_blocks)
    return found if len(found) > FEW else found.tolist()


def _as_array(ids: Sequence[int], group: int, num_blocks: int) -> Int64s:
    try:
        found = np.asarray(ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise BlockIdsInvalid(f"group {group}: block ids must be a flat list of integers", group=group)
    except (OverflowError, ValueError, TypeError) as error:
        raise BlockIdsInvalid(f"group {group}: block ids must be a flat list of integers", group=group) from error
    if found.size and (found.min() < ABSENT or found.max() >= num_blocks):
        outside = found[(found < ABSENT) | (found >= num_blocks)]
        raise BlockIdsInvalid(f"group {group}: block {outside[0]} is not in [0, {num_blocks})", group=group)
    return found.astype(np.int64)  # only now: a huge unsigned id would wrap around to a valid one


def _check_class(checked: Sequence[Ids], members: Sequence[int], num_blocks: int, *, unique: bool) -> None:
    """Check the lists of groups that share their bytes: a block holds those of one group at a time."""
    lists = [checked[group] for group in members]
    few: list[int] = []
    for ids in lists:
        if not isinstance(ids, list):
            distinct = unique and _are_distinct(lists, num_blocks)
            break
        few += [block for block in (ids if unique else set(ids)) if block >= 0]
    else:
        distinct = len(set(few)) == len(few)
    if not distinct:
        _require_distinct([np.asarray(ids, np.int64) for ids in checked], members, unique=unique)


def _are_distinct(lists: Sequence[Ids], num_blocks: int) -> bool:
    """Tell whether no block is listed twice, without sorting; False also if sorting is faster. A pull waits for it."""
    count = sum(map(len, lists))
    if num_blocks > BLOCKS_PER_ID * count:
        return False
    listed = np.zeros(num_blocks + 1, bool)  # the last, -1, is for absent blocks
    for ids in lists:
        listed[ids] = True
    if listed.item(ABSENT):
        listed[ABSENT] = False
        count -= sum(int(np.count_nonzero(np.asarray(ids) == ABSENT)) for ids in lists)
    return int(np.count_nonzero(listed)) == count


def _require_distinct(arrays: Sequence[Int64s], members: Sequence[int], *, unique: bool) -> None:
    """Check the same of lists of any length, and say which block is in two places."""
    # One sort, by block and then by group.
    keys = np.concatenate([arrays[group] * len(arrays) + group for group in members])
    keys.sort()
    keys = keys[np.searchsorted(keys, 0) :]  # without those that are absent
    blocks = keys // len(arrays)
    again = blocks[1:] == blocks[:-1]
    if not unique:
        again &= keys[1:] != keys[:-1]
    if not again.any():
        return
    at = int(again.argmax())
    block, (group, other) = blocks[at], (keys[at : at + 2] % len(arrays)).tolist()
    if group == other:
        raise BlockIdsInvalid(f"block {block} is a target twice", group=group)
    raise BlockIdsInvalid(
        f"block {block} is in groups {group} and {other}, whose pages share their bytes",
        group=group,
        remedy="List a block in the one group whose pages it holds.",
    )


def pair_units(group: GroupPlan, source_ids: Ids, target_ids: Ids, *, num_tokens: int) -> UnitPairs:
    """Pair every unit of the target that holds a token, and that both sides hold, with the source unit of its tokens.

    Args:
        group: the pair of groups.
        source_ids: checked, the ticket's blocks of the source group.
        target_ids: checked, our blocks of the target group.
        num_tokens: tokens of the request in the source group.

    Raises:
        BlockRangeMismatch: the target names tokens that the source holds but does not cover, or a list names blocks
            before token 0: its last block then does not hold the last token, and nothing is where it seems.
        CapacityExceeded: the blocks are larger than any engine's by orders of magnitude.
    """
    # Most often each block is a unit, none is absent, and both sides list as many.
    alike = group.whole and 0 < len(source_ids) == len(target_ids) <= -(-num_tokens // group.target.tokens)
    if isinstance(source_ids, list) and isinstance(target_ids, list):
        if alike and min(source_ids) >= 0 and min(target_ids) >= 0:
            if source_ids == sorted(source_ids):
                return UnitPairs(source_ids, target_ids)
            return _ascending_few(source_ids, target_ids)
        pairs = _pair_few(group, source_ids, target_ids, num_tokens) if group.aligned else None
        if pairs is not None:
            return pairs
    source, target = np.asarray(source_ids, np.int64), np.asarray(target_ids, np.int64)
    if alike and np.minimum.reduce(source) >= 0 and np.minimum.reduce(target) >= 0:
        return _ascending(source, target)
    return _pair_many(group, source, target, num_tokens)


def _ascending_few(source: list[int], target: list[int]) -> UnitPairs:
    """Order pairs by source."""
    order = sorted(range(len(source)), key=source.__getitem__)
    return UnitPairs([*map(source.__getitem__, order)], [*map(target.__getitem__, order)])


def _ascending(source: Int64s, target: Int64s) -> UnitPairs:
    """Order pairs by source if they are not; few become lists."""
    if np.count_nonzero(source[1:] < source[:-1]):
        order = np.argsort(source, kind="stable")  # which takes half as long
        source, target = source[order], target[order]
    return UnitPairs(source, target) if len(source) > FEW else UnitPairs(source.tolist(), target.tolist())


def _pair_few(group: GroupPlan, source_ids: list[int], target_ids: list[int], num_tokens: int) -> UnitPairs | None:
    """Pair few units of sides that hold the same tokens; None if ``_pair_many`` must judge, because one is lacking."""
    source = _list_few(source_ids, group.source, num_tokens)
    target = _list_few(target_ids, group.target, num_tokens)
    if source is None or target is None:
        return None
    # Both lists end with the last unit that holds a token. What the target has before the source may only be absent.
    ahead = len(target) - len(source)
    if ahead > 0:
        if max(target[:ahead]) >= 0:
            return None
        target = target[ahead:]
    elif ahead < 0:
        source = source[-ahead:]
    if ABSENT in target:
        kept = [at for at, unit in enumerate(target) if unit >= 0]
        source, target = [source[at] for at in kept], [target[at] for at in kept]
    return None if ABSENT in source else _ascending_few(source, target)


def _list_few(ids: list[int], units: Units, num_tokens: int) -> list[int] | None:
    """Cut blocks into units as ``_listed`` does; None if they are many, or too many for the tokens."""
    tokens, per_block, stripe = units.tokens, units.per_block, units.stripe
    if not tokens:
        return ids if len(ids) <= 1 else None
    blocks_held = -(-num_tokens // (tokens * per_block * stripe.size))
    if len(ids) > blocks_held or len(ids) * per_block > FEW:
        return None
    if per_block == stripe.size == 1:
        return ids
    units_held = -(-stripe.count(num_tokens) // tokens)
    spare = blocks_held * per_block - units_held  # at the end of the last block
    if per_block > 1:
        ids = [block * per_block + unit if block >= 0 else ABSENT for block in ids for unit in range(per_block)]
    return ids[:-spare] if spare else ids


def _pair_many(group: GroupPlan, source_ids: Int64s, target_ids: Int64s, num_tokens: int) -> UnitPairs:
    source, target = (
        _listed(ids, units, num_tokens) for ids, units in ((source_ids, group.source), (target_ids, group.target))
    )
    for side, index, listed in (("source", group.source_group, source), ("target", group.target_group, target)):
        if listed.first < 0 and np.any(listed.units[: -listed.first] >= 0):
            raise BlockRangeMismatch(
                f"{side} group {index}: its blocks are too many for {num_tokens} tokens and reach before token 0",
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
    """A list of blocks, cut into units.

    Attributes:
        first: number of the first unit, of those that this side holds, counted from token 0.
        units: ``block * units per block + unit`` of each, or ``ABSENT``.
    """

    first: int
    units: Int64s


def _listed(ids: Int64s, units: Units, num_tokens: int) -> _Listed:
    """Cut blocks into units, without those past the last token, which hold nothing that anyone reads."""
    per_block = units.per_block
    if not units.tokens:  # a state is one unit, and a request has one
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
    """Tell which units of the block in which a sliding window begins lie before it.

    The source may have let go of them, if its blocks are smaller: nobody will look at them any more. Blocks that lie
    before the window as a whole are not for us to leave out.
    """
    if not group.window:
        return np.zeros(len(target.units), bool)
    first_token = max(0, num_tokens - (group.window - 1))
    first_unit = first_token // (group.unit_tokens * group.target.per_block) * group.target.per_block
    numbers = np.arange(target.first, target.first + len(target.units))
    return (numbers >= first_unit) & ((numbers + 1) * group.unit_tokens <= first_token)


def _side_by_side(source: _Listed, target: _Listed) -> Int64s:
    """Return the source unit of each target unit, or ``ABSENT``: both lists lie on one axis of units."""
    picked = np.full(len(target.units), ABSENT, np.int64)
    low = max(source.first, target.first)
    high = min(source.first + len(source.units), target.first + len(target.units))
    if low < high:
        picked[low - target.first : high - target.first] = source.units[low - source.first : high - source.first]
    return picked


def _by_token(group: GroupPlan, source: _Listed, target: _Listed) -> tuple[Int64s, Bools]:
    """Return the source unit of each target unit, or ``ABSENT``, and whether the source's stripe has it at all."""
    picked = np.full(len(target.units), ABSENT, np.int64)
    here, numbers = group.shared_units(target.first, len(target.units))
    at = numbers - source.first
    found = np.flatnonzero(here & (at >= 0) & (at < len(source.units)))
    picked[found] = source.units[at[found]]
    return picked, here
