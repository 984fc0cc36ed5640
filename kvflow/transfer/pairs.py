"""Which unit of which source block fills which unit of which target block.

A list of block ids names consecutive blocks of its group, and its last block holds token ``num_tokens - 1``;
a shorter list therefore means the last blocks. ``-1`` stands for an absent block. Nothing is clipped: a token
range of the target that the source does not cover is refused.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.errors import BlockIdsInvalid, BlockRangeMismatch, CapacityExceeded
from kvflow.transfer.plan import GroupPlan

Int64s = npt.NDArray[np.int64]
ABSENT = -1

UNITS_MAX = 1 << 22
"""Units of one list: 4 M are 64 M tokens of 16; they take 100 MiB while they are paired."""


class UnitPairs(Struct, frozen=True, eq=False):
    """Pairs of units, ascending by source.

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
        aliases: alias class of each group; within one class an id may stand only once, if ``unique``.
        unique: whether duplicates are refused (they are, among targets).

    Raises:
        BlockIdsInvalid: names the group and the offending id.
    """
    if len(block_ids) != len(aliases):
        raise BlockIdsInvalid(f"{len(block_ids)} lists of block ids for {len(aliases)} groups")
    arrays = tuple(_as_ids(ids, group, num_blocks) for group, ids in enumerate(block_ids))
    if unique:
        for alias in sorted(set(aliases)):
            members = [group for group, value in enumerate(aliases) if value == alias]
            ids = np.concatenate([arrays[group] for group in members])
            ids = np.sort(ids[ids != ABSENT])
            twice = ids[1:][ids[1:] == ids[:-1]]
            if twice.size:
                group = next(group for group in members if twice[0] in arrays[group])
                raise BlockIdsInvalid(f"block {twice[0]} is a target twice", group=group)
    return arrays


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
    """Pair every unit of the target that holds a token with the source unit of the same tokens.

    Args:
        group: the pair of groups.
        source_ids: int64, the ticket's blocks of the source group.
        target_ids: int64, our blocks of the target group.
        num_tokens: tokens of the request in the source group.

    Raises:
        BlockRangeMismatch: the target names tokens that the source does not cover, or a list names blocks
            before token 0: its last block then does not hold the last token, and nothing is where it seems.
        CapacityExceeded: the blocks are larger than any engine's by orders of magnitude.
    """
    units_held = -(-num_tokens // group.unit_tokens) if group.unit_tokens else 1  # a state is one unit
    source_first, source_units = _units(source_ids, group.source_units, units_held)
    target_first, target_units = _units(target_ids, group.target_units, units_held)
    for side, index, first, units in (
        ("source", group.source_group, source_first, source_units),
        ("target", group.target_group, target_first, target_units),
    ):
        if first < 0 and np.any(units[:-first] >= 0):
            raise BlockRangeMismatch(
                f"{side} group {index}: its blocks are too many for {num_tokens} tokens and reach before token 0",
                group=group.target_group,
            )
    # Both lists lie on one axis of units from token 0; ``picked`` is the source's as the target sees it.
    picked = np.full(len(target_units), ABSENT, np.int64)
    low, high = max(source_first, target_first), min(source_first + len(source_units), units_held)
    if low < high:
        picked[low - target_first : high - target_first] = source_units[low - source_first : high - source_first]
    wanted = target_units >= 0
    lacking = wanted & (picked < 0)
    if lacking.any():
        token = (target_first + int(lacking.argmax())) * group.unit_tokens
        raise BlockRangeMismatch(
            f"group {group.target_group}: the ticket's {len(source_ids)} blocks of source group "
            f"{group.source_group} do not cover token {token}",
            group=group.target_group,
        )
    if not wanted.all():
        picked, target_units = picked[wanted], target_units[wanted]
    if (picked[1:] > picked[:-1]).all():
        return UnitPairs(picked, target_units)
    order = np.argsort(picked)
    return UnitPairs(picked[order], target_units[order])


def _units(ids: Int64s, units: int, units_held: int) -> tuple[int, Int64s]:
    """Cut blocks into units, without those past the last token, which hold nothing that anyone reads.

    Returns:
        The number of the first unit, counted from token 0, and ``block * units + unit`` of each, or ``ABSENT``.
    """
    first = (-(-units_held // units) - len(ids)) * units
    if units == 1:
        return first, ids
    if len(ids) * units > UNITS_MAX:
        raise CapacityExceeded("units of one request", UNITS_MAX, remedy="Use block sizes that divide.")
    values = (ids[:, None] * units + np.arange(units, dtype=np.int64)).ravel()
    values[np.repeat(ids == ABSENT, units)] = ABSENT
    return first, values[: max(0, units_held - first)]
