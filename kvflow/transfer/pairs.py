"""Which unit of which source block fills which unit of which target block.

A list of block ids names consecutive blocks of its group, and its last block holds token ``num_tokens - 1``;
a shorter list therefore means the last blocks. ``-1`` stands for an absent block. Nothing is clipped: a token
range of the target that the source does not cover is refused, but for what a sliding window has passed in the block
where it begins.

Where ranks divide the tokens of a request, a list names blocks of all of them, and a rank's own units are those of
its stripe. Units that the source's stripe lacks are other sources' to give: which these are is ``share_out``'s to say.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.errors import BlockIdsInvalid, BlockRangeMismatch, CapacityExceeded
from kvflow.transfer.plan import GroupPlan
from kvflow.transfer.runs import UNITS_MAX, Bools, Units

Int64s = npt.NDArray[np.int64]
ABSENT = -1


class UnitPairs(Struct, frozen=True, eq=False):
    """Pairs of units; those of one request ascend by source.

    Attributes:
        source: int64, shape (n,): ``block * source_units + unit``.
        target: int64, shape (n,): ``block * target_units + unit``.
    """

    source: Int64s
    target: Int64s


def check_block_ids(
    block_ids: Sequence[Sequence[int]],
    *,
    num_blocks: int,
    aliases: Sequence[int],
    unique: bool,
) -> tuple[Int64s, ...]:
    """Check the caller's lists and return them as arrays.

    Args:
        block_ids: one list per group.
        num_blocks: ids are in ``[0, num_blocks)``, or ``ABSENT``.
        aliases: alias class of each group; within one class an id may stand in one group only, whose bytes it names.
        unique: whether it may stand there only once (it may, among targets).

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
    arrays = tuple(_as_ids(ids, group, num_blocks) for group, ids in enumerate(block_ids))
    for alias in sorted(set(aliases)):
        members = [group for group, value in enumerate(aliases) if value == alias]
        if unique or len(members) > 1:
            _check_class(arrays, members, unique=unique)
    return arrays


def _check_class(arrays: Sequence[Int64s], members: Sequence[int], *, unique: bool) -> None:
    """Check the lists of groups that share their bytes: a block holds those of one group at a time."""
    # One sort, by block and then by group: a pull waits for it.
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


def _as_ids(ids: Sequence[int], group: int, num_blocks: int) -> Int64s:
    try:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise BlockIdsInvalid(f"group {group}: block ids must be a flat list of integers", group=group)
    except (OverflowError, ValueError, TypeError) as error:
        raise BlockIdsInvalid(f"group {group}: block ids must be a flat list of integers", group=group) from error
    if array.size and (array.min() < ABSENT or array.max() >= num_blocks):
        outside = array[(array < ABSENT) | (array >= num_blocks)]
        raise BlockIdsInvalid(f"group {group}: block {outside[0]} is not in [0, {num_blocks})", group=group)
    return array.astype(np.int64)  # only now: a huge unsigned id would wrap around to a valid one


def pair_units(group: GroupPlan, source_ids: Int64s, target_ids: Int64s, *, num_tokens: int) -> UnitPairs:
    """Pair every unit of the target that holds a token, and that both sides hold, with the source unit of its tokens.

    Args:
        group: the pair of groups.
        source_ids: int64, the ticket's blocks of the source group.
        target_ids: int64, our blocks of the target group.
        num_tokens: tokens of the request in the source group.

    Raises:
        BlockRangeMismatch: the target names tokens that the source holds but does not cover, or a list names blocks
            before token 0: its last block then does not hold the last token, and nothing is where it seems.
        CapacityExceeded: the blocks are larger than any engine's by orders of magnitude.
    """
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
    if (picked[1:] > picked[:-1]).all():
        return UnitPairs(picked, units)
    order = np.argsort(picked)
    return UnitPairs(picked[order], units[order])


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
