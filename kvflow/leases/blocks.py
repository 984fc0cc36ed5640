"""Count the users of each block: a block is free, lent to readers, or the target of one pull.

Peers may read a lent block at any time, so no pull may write into it. A block that receives is not complete, so it
cannot be lent. Several requests may share a prefix, so the account counts the readers of a block.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from itertools import chain
from typing import Any, SupportsIndex

import numpy as np

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, counted, shown
from kvflow.ids import ABSENT, FEW_IDS, Ids, Int64s

RECEIVING = -1
QUIESCED = "Wait for quiesced() of that pull"
NUM_BLOCKS_MAX = 1 << 31  # a ticket's block ids are less
BLOCKS_PER_ID = 64
"""Up to this many blocks of the pool per listed id, marking blocks finds duplicates faster than sorting ids."""

_INTEGERS = {int}
_LISTS = frozenset((list, tuple))


class BlockAccount:
    """The references to all blocks of one cache. A method that raises has changed nothing. Thread: any.

    Block ids are one ``Ids`` per group; ``ABSENT`` is not counted. Groups of one alias class share bytes, and counts.
    """

    def __init__(
        self, aliases: Sequence[int], num_blocks: int, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.aliases = tuple(aliases)
        self._lock = lock or nullcontext()
        self._classes = [_Uses(num_blocks) for _ in range(max(self.aliases) + 1)]
        self._uses = [self._classes[alias] for alias in self.aliases]
        self._only = self._uses[0] if len(self._uses) == 1 else None

    def lend(self, ids: Sequence[Ids]) -> None:
        """Count one more reader of each block; raise ``BlockIdsInvalid`` if one is receiving, or still quarantined."""
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                if uses.least(blocks) < 0:
                    self._refuse(ids, _receives, "cannot be offered: it is still the target of a pull", QUIESCED)
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.add(blocks, 1)

    def end_loan(self, ids: Sequence[Ids]) -> None:
        """Count one reader less of each block."""
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.add(blocks, -1)

    def receive(self, ids: Sequence[Ids]) -> None:
        """Reserve each block as a target of one pull.

        Raises:
            BlockIdsInvalid: a block is receiving for another pull, still quarantined, or lent.
        """
        with self._lock:
            if self._only is not None and type(ids[0]) is tuple:  # usually
                if any(map(self._only.number_of, ids[0])):
                    self._refuse_targets(ids)
                self._only.put_few(ids[0], RECEIVING)
                return
            for uses, blocks in zip(self._uses, ids, strict=True):
                few = isinstance(blocks, tuple)
                if any(map(uses.number_of, blocks)) if few else np.count_nonzero(uses.array[blocks]):
                    self._refuse_targets(ids)
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.put(blocks, RECEIVING)

    def end_receipt(self, ids: Sequence[Ids]) -> None:
        """Record that no pull writes into these blocks now."""
        with self._lock:
            if self._only is not None and type(ids[0]) is tuple:  # usually
                present = len(ids[0]) - ids[0].count(ABSENT)
                assert sum(map(self._only.number_of, ids[0])) == RECEIVING * present, "a block was given back twice"
                self._only.put_few(ids[0], 0)
                return
            for uses, blocks in zip(self._uses, ids, strict=True):
                # No entry is less than RECEIVING, so the sum shows whether all entries are RECEIVING. Absent blocks are
                # 0.
                if isinstance(blocks, tuple):
                    right = sum(map(uses.number_of, blocks)) == RECEIVING * (len(blocks) - blocks.count(ABSENT))
                else:
                    others = np.count_nonzero(uses.array[blocks] - RECEIVING)
                    right = not others or others == np.count_nonzero(blocks < 0)
                assert right, "a block was given back twice"
                uses.put(blocks, 0)

    def check(
        self,
        *,
        lent: Iterable[Sequence[Ids]] | None = None,
        receiving: Iterable[Sequence[Ids]] | None = None,
    ) -> None:
        """Check the conservation law: the counts equal the references of these leases or destinations."""
        lost = "references were lost or given back twice"
        with self._lock:
            counted = [uses.array.copy() for uses in self._classes]
        if lent is not None:
            for numbers, readers in zip(counted, self._sum(lent), strict=True):
                if (readers != np.maximum(numbers, 0)).any():
                    receives = readers[numbers == RECEIVING].any()
                    raise AssertionError("a block is lent and receives" if receives else lost)
        if receiving is not None:
            for numbers, writers in zip(counted, self._sum(receiving), strict=True):
                assert (writers == (numbers == RECEIVING)).all(), lost

    def _sum(self, held: Iterable[Sequence[Ids]]) -> list[Int64s]:
        listed: list[list[int]] = [[] for _ in self._classes]
        for ids in held:
            for alias, blocks in zip(self.aliases, present_of(ids), strict=True):
                listed[alias] += list(blocks) if isinstance(blocks, tuple) else blocks.tolist()
        return [
            np.bincount(np.array(blocks, np.int64), minlength=len(uses.array))
            for blocks, uses in zip(listed, self._classes, strict=True)
        ]

    def _refuse_targets(self, ids: Sequence[Ids]) -> None:
        self._refuse(ids, _receives, "is still the target of another pull", QUIESCED)
        self._refuse(ids, _is_lent, "is on offer, and peers may be reading it", "Wait until its leases have ended")

    def _refuse(self, ids: Sequence[Ids], is_busy: Callable[[int], bool], reason: str, remedy: str) -> None:
        for group, (uses, blocks) in enumerate(zip(self._uses, ids, strict=True)):
            for block in blocks:
                if is_busy(uses.numbers[block]):
                    raise BlockIdsInvalid(
                        f"group {group}: block {block} {reason}",
                        group=group,
                        remedy=f"{remedy} before reusing its blocks.",
                    )


class _Uses:
    """The readers of each block of one class, or ``RECEIVING``. The last entry, of absent blocks, stays 0."""

    def __init__(self, num_blocks: int) -> None:
        self.numbers = array("q", bytes(8 * (num_blocks + 1)))
        self.number_of = self.numbers.__getitem__
        self.array: Int64s = np.frombuffer(self.numbers, np.int64)  # a ``longlong`` adds slowly

    def least(self, blocks: Ids) -> int:
        """Return the smallest entry of these blocks, or 0."""
        if isinstance(blocks, tuple):
            return min(map(self.number_of, blocks), default=0)
        return int(self.array[blocks].min(initial=0))

    def add(self, blocks: Ids, readers: int) -> None:
        numbers = self.numbers
        if isinstance(blocks, tuple):
            for block in blocks:
                if block >= 0:
                    left = numbers[block] + readers
                    assert left >= 0, "a loan ended twice"
                    numbers[block] = left
        else:
            np.add.at(self.array, blocks, readers)
            numbers[ABSENT] = 0
            assert self.least(blocks) >= 0, "a loan ended twice"

    def put(self, blocks: Ids, number: int) -> None:
        if isinstance(blocks, tuple):
            self.put_few(blocks, number)
        else:
            self.array[blocks] = number
            self.numbers[ABSENT] = 0

    def put_few(self, blocks: tuple[int, ...], number: int) -> None:
        numbers = self.numbers
        for block in blocks:
            numbers[block] = number
        numbers[ABSENT] = 0


def _receives(number: int) -> bool:
    return number < 0


def _is_lent(number: int) -> bool:
    return number > 0


def present_of(ids: Sequence[Ids]) -> list[Ids]:
    """Return the blocks of each group that are not absent."""
    return [
        (tuple([block for block in each if block >= 0]) if ABSENT in each else each)
        if isinstance(each, tuple)
        else each[each >= 0]
        for each in ids
    ]


def join_loans(loans: Sequence[tuple[Ids, ...]]) -> Sequence[Ids]:
    """Return the blocks of many loans, group by group. A block is listed once for each loan that has it."""
    if len(loans) == 1:
        return loans[0]
    joined: list[Ids] = []
    for lists in zip(*loans, strict=True):
        few = tuple(chain.from_iterable(ids for ids in lists if isinstance(ids, tuple)))
        many = [ids for ids in lists if not isinstance(ids, tuple)]
        joined.append(np.concatenate([np.array(few, np.int64), *many]) if many or len(few) > FEW_IDS else few)
    return joined


def as_ids(lists: tuple[tuple[int, ...], ...]) -> tuple[Ids, ...]:
    """Return checked lists in the form in which many ids are counted fast."""
    return tuple([np.array(ids, np.int64) if len(ids) > FEW_IDS else ids for ids in lists])


def block_lists(block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Check the lists of an offer before any cache is known, and return them as a ticket holds them."""
    groups = range(len(block_ids)) if hasattr(block_ids, "__len__") else ()
    checked = check_block_ids(block_ids, num_blocks=NUM_BLOCKS_MAX, aliases=groups, unique=False)
    return tuple([ids if isinstance(ids, tuple) else tuple(ids.tolist()) for ids in checked])


def runs_of(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return ids with each run as its first id and, below ``ABSENT``, the negative number of its ids; if that pays."""
    if len(ids) <= FEW_IDS:
        return ids
    numbers = np.frombuffer(array("q", ids), np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1]) != 1)
    if 2 * len(starts) > len(ids):
        return ids
    runs = np.stack([numbers[starts], -np.diff(starts, append=len(ids))], axis=1)
    return tuple(runs[np.stack([np.ones(len(starts), bool), runs[:, 1] < ABSENT], axis=1)].tolist())


def count_runs(runs: tuple[int, ...]) -> int:
    """Return how many ids these runs are."""
    if min(runs, default=0) >= ABSENT:
        return len(runs)
    return len(runs) - sum([each + 2 for each in runs if each < ABSENT])


def expand_runs(runs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids of these runs; raise ``ValueError`` if they are none."""
    if min(runs, default=0) >= ABSENT:
        return runs
    ids: list[int] = []
    for each in runs:
        if each >= ABSENT:
            ids.append(each)
        elif not ids or ids[-1] - each > NUM_BLOCKS_MAX:
            raise ValueError("a run has no first block, or ends behind the last block id")
        else:
            ids.extend(range(ids[-1] + 1, ids[-1] - each))
    return tuple(ids)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens; ``block_size`` 0: of a state."""
    return -(-num_tokens // block_size) if block_size else 1


def block_ends(num_blocks: int, block_size: int, num_tokens: int) -> list[int]:
    """Return the ends (one past the last token) of the last blocks of a request; ``block_size`` 0: of a state."""
    if not num_blocks:
        return []
    if not block_size:
        return [num_tokens] * num_blocks
    last = -(-num_tokens // block_size)
    return [*(index * block_size for index in range(last - num_blocks + 1, last)), num_tokens]


def check_block_ids(
    block_ids: Sequence[Sequence[int]],
    *,
    num_blocks: int,
    aliases: Sequence[int],
    unique: bool,
    decoded: bool = False,
) -> tuple[Ids, ...]:
    """Check the caller's lists, one per group. Return up to ``FEW_IDS`` ids as a tuple, more of them as an int64 array.

    Ids are in ``[0, num_blocks)``, or ``ABSENT``. An id is in only one group of an alias class, and with ``unique``
    once in a list. ``decoded``: these are tuples of a decoded ticket, whose integers are at least ``ABSENT``.

    Raises:
        BlockIdsInvalid: names the group and the wrong id.
    """
    if len(aliases) == 1 and type(block_ids) in _LISTS and len(block_ids) == 1:
        few = _as_few(block_ids[0], num_blocks, decoded=decoded)
        if few is not None and not (unique and len(set(few)) < len(few)):
            return (few,)
    try:
        num_lists = len(block_ids)
    except TypeError as error:
        raise BlockIdsInvalid(f"block_ids must be one list per group, not {shown(block_ids)}") from error
    if num_lists != len(aliases):
        if all(isinstance(each, SupportsIndex) for each in block_ids):
            raise BlockIdsInvalid(f"block_ids must be one list per group, not {shown(block_ids)}")
        lists, groups = counted(num_lists, "list"), counted(len(aliases), "group")
        raise BlockIdsInvalid(f"block_ids has {lists} for {groups}")
    checked: list[Ids] = []
    for group, ids in enumerate(block_ids):
        few = _as_few(ids, num_blocks, decoded=decoded)
        checked.append(_as_ids(ids, group, num_blocks) if few is None else few)
    for members in _to_compare(tuple(aliases), unique):
        first = checked[members[0]]
        if len(members) > 1 or not isinstance(first, tuple) or len(set(first)) < len(first):
            _check_class(checked, members, num_blocks, unique=unique)
    return tuple(checked)


def _as_few(ids: Sequence[int], num_blocks: int, *, decoded: bool) -> tuple[int, ...] | None:
    """Return up to ``FEW_IDS`` ids of a group; None if there are more or none, or one may be wrong."""
    if type(ids) not in _LISTS or not 0 < len(ids) <= FEW_IDS:
        return None
    few = tuple(ids)  # not a copy of a tuple
    right = decoded or (set(map(type, few)) == _INTEGERS and min(few) >= ABSENT)
    return few if right and max(few) < num_blocks else None


def complete_digests(
    digests: Any, block_sizes: Sequence[int], num_tokens: Sequence[int]
) -> tuple[tuple[bytes, ...], ...] | None:
    """Return the digests of an open lease as tuples; None while they do not reach its last token.

    They do not depend on the ids of the blocks, so they may be there before. Raises as ``as_digest_lists``.
    """
    most = [range(blocks_for(tokens, size)) for tokens, size in zip(num_tokens, block_sizes, strict=True)]
    lists = as_digest_lists("digests", digests, most, fewer=True)
    reached = [len(found) == len(all_) for found, all_, size in zip(lists, most, block_sizes, strict=True) if size]
    return lists if any(reached) or not reached else None


def as_digest_lists(
    name: str, digests: Any, block_ids: Sequence[Sized], *, fewer: bool = False
) -> tuple[tuple[bytes, ...], ...]:
    """Return a caller's digests as tuples; raise ``ArgumentInvalid`` unless they are lists of bytes, one per group.

    ``fewer``: a list may have fewer digests than blocks.
    """
    remedy = "Pass one list per group, with one digest (bytes) for each of its blocks."
    if not isinstance(digests, Collection) or len(digests) != len(block_ids):
        raise ArgumentInvalid(name, f"{counted(len(block_ids), 'list')}, one per group", digests, remedy=remedy)
    for group, (found, ids) in enumerate(zip(digests, block_ids, strict=True)):
        if (
            not isinstance(found, Collection)
            or isinstance(found, str | bytes)
            or (len(found) > len(ids) if fewer else len(found) != len(ids))
        ):
            raise ArgumentInvalid(
                f"{name}[{group}]", f"{counted(len(ids), 'digest')}, one per block", found, remedy=remedy
            )
        for at, digest in enumerate(found):
            if not isinstance(digest, bytes):
                raise ArgumentInvalid(f"{name}[{group}][{at}]", "bytes", digest, remedy=remedy)
    return tuple(tuple(found) for found in digests)


@lru_cache(maxsize=64)
def _to_compare(aliases: tuple[int, ...], unique: bool) -> tuple[tuple[int, ...], ...]:
    """Return the groups of each alias class. Include classes of one group only if ids must be unique."""
    classes = [[group for group, value in enumerate(aliases) if value == alias] for alias in sorted(set(aliases))]
    return tuple(tuple(members) for members in classes if unique or len(members) > 1)


def _as_ids(ids: Sequence[int], group: int, num_blocks: int) -> Ids:
    """Return a copy of one list, after checking that each id is a block or absent."""
    if type(ids) in _LISTS and not ids:
        return ()
    found = None
    if type(ids) in _LISTS and type(ids[0]) is int:
        # For a list that begins with an integer, NumPy accepts the same values but takes longer. Its error says what is
        # wrong.
        with suppress(TypeError, OverflowError, ValueError):
            found = np.frombuffer(array("q", ids), np.int64)
    if found is None or np.minimum.reduce(found) < ABSENT or np.maximum.reduce(found) >= num_blocks:
        found = _as_array(ids, group, num_blocks)
    return found if len(found) > FEW_IDS else tuple(found.tolist())


def _as_array(ids: Sequence[int], group: int, num_blocks: int) -> Int64s:
    found, cause = None, None
    try:
        found = np.asarray(ids)
    except (OverflowError, ValueError, TypeError) as error:
        cause = error
    if found is None or found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        fault = f"group {group}: block ids must be a flat list of integers, not {shown(ids)}"
        raise BlockIdsInvalid(fault, group=group) from cause
    if found.size and (found.min() < ABSENT or found.max() >= num_blocks):
        outside = found[(found < ABSENT) | (found >= num_blocks)]
        raise BlockIdsInvalid(f"group {group}: block {outside[0]} is not in [0, {num_blocks})", group=group)
    return found.astype(np.int64)  # only now: a huge unsigned id would wrap around to a valid one


def _check_class(checked: Sequence[Ids], members: Sequence[int], num_blocks: int, *, unique: bool) -> None:
    """Check the lists of groups that share bytes: a block belongs to one group at a time."""
    lists = [checked[group] for group in members]
    few: list[int] = []
    for ids in lists:
        if not isinstance(ids, tuple):
            distinct = unique and _are_distinct(lists, num_blocks)
            break
        few += [block for block in (ids if unique else set(ids)) if block >= 0]
    else:
        distinct = len(set(few)) == len(few)
    if not distinct:
        _require_distinct([np.asarray(ids, np.int64) for ids in checked], members, unique=unique)


def _are_distinct(lists: Sequence[Ids], num_blocks: int) -> bool:
    """Return whether no block is listed twice, without sorting; also False if sorting would be faster."""
    count = sum(map(len, lists))
    if num_blocks > BLOCKS_PER_ID * count:
        return False
    listed = np.zeros(num_blocks + 1, bool)  # the last, -1, is for absent blocks
    for ids in lists:
        listed[np.asarray(ids, np.int64)] = True
    if listed.item(ABSENT):
        listed[ABSENT] = False
        count -= sum(int(np.count_nonzero(np.asarray(ids) == ABSENT)) for ids in lists)
    return int(np.count_nonzero(listed)) == count


def _require_distinct(arrays: Sequence[Int64s], members: Sequence[int], *, unique: bool) -> None:
    """Raise for the first block that is listed twice, in lists of any length."""
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
