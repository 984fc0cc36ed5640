"""Block ids: which blocks of a request a ticket lists.

vLLM lists the blocks of a request from its first token on, with the null block where a window has moved on. A ticket
lists the last blocks, up to the one that holds the last token, with -1 for a missing block.
"""

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

from msgspec import Struct, structs

from kvflow import Group, whole_tokens, window_blocks
from kvflow.errors import BlockIdsInvalid
from kvflow.integrations.vllm.caches import state_block
from kvflow.integrations.vllm.messages import BlocksByGroup

NULL_BLOCK = 0
"""vLLM's id of a missing block. Here also of a block that the prefix cache has filled: others may read it."""

ABSENT = -1


class TransferGroup(Struct, frozen=True):
    """One group whose blocks are transferred."""

    index: int  # among all groups of vLLM
    group: Group
    spec: Any  # vLLM's
    retained: int = 0  # tokens before a sliding window that are also needed

    @property
    def reach(self) -> Group:
        """The group, with a window that is as much longer."""
        if not (self.group.window and self.retained):
            return self.group
        return structs.replace(self.group, window=self.group.window + self.retained)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many of the last blocks of ``num_tokens`` tokens the next token needs."""
        return window_blocks(self.reach, num_tokens)

    @property
    def is_state(self) -> bool:
        """Whether a request has one block in this group, with its running state."""
        return self.group.kind == "mamba"


def offered_blocks(groups: Sequence[TransferGroup], listed: Sequence[Sequence[int]], num_tokens: int) -> BlocksByGroup:
    """Return the blocks that a producer offers: for each group, those that the token after ``num_tokens`` needs.

    An absent one is named, too, so that a list that lacks blocks by mistake is refused.

    Raises:
        BlockIdsInvalid: a list has fewer blocks than the tokens need.
    """
    return tuple(_wanted(each, listed[each.index], num_tokens, whole=True) for each in groups)


def kept_blocks(
    groups: Sequence[TransferGroup], listed: Sequence[Sequence[int]], num_tokens: int, is_cached: Callable[[int], bool]
) -> tuple[BlocksByGroup, int]:
    """Return the blocks that an engine can keep of a request, and how many tokens they hold; 0 if there is nothing.

    At these tokens all windows are whole. A group with a window lists all blocks before that are in the prefix cache
    and the request still has, with -1 between them for others.

    Raises:
        BlockIdsInvalid: a list has fewer blocks than the tokens need.
    """
    unit = lcm(*[each.group.block_size for each in groups])
    most = num_tokens - num_tokens % unit
    ids = [tuple(listed[each.index][: _num_blocks(each, listed[each.index], most)]) for each in groups]
    for at, each in enumerate(groups):
        if each.group.window:
            ids[at] = tuple([block if block != NULL_BLOCK and is_cached(block) else ABSENT for block in ids[at]])
    end = next(whole_tokens([[each.reach] for each in groups], ids, [most] * len(groups), most), 0)
    cut = [blocks[: end // each.group.block_size] for each, blocks in zip(groups, ids, strict=True)]
    first = [next((at for at, block in enumerate(blocks) if block >= 0), 0) for blocks in cut]
    found = tuple([blocks[at:] for blocks, at in zip(cut, first, strict=True)])
    is_whole = all(each.group.window or all(map(is_cached, blocks)) for each, blocks in zip(groups, found, strict=True))
    return found, end if is_whole else 0


def loaded_blocks(
    groups: Sequence[TransferGroup], listed: Sequence[Sequence[int]], *, end: int, num_tokens: int
) -> BlocksByGroup:
    """Return the blocks into which a consumer reads those of a ticket of ``num_tokens`` tokens.

    ``listed`` are the block ids of each group of vLLM, with ``NULL_BLOCK`` for a block that is filled already, and
    ``end`` is the index after the last token to load.

    Raises:
        BlockIdsInvalid: a list has fewer blocks than the tokens need, or no block for a state.
    """
    found = []
    for each in groups:
        ids = _wanted(each, listed[each.index], end)
        if ids == (ABSENT,) and each.is_state:
            # Without this check nothing would be loaded, nothing would fail, and the tokens would be wrong.
            raise BlockIdsInvalid(f"group {each.index}: no block is allocated for the state", group=each.index)
        if num_tokens > end and not each.is_state:
            size = each.group.block_size
            ids += (ABSENT,) * (-(-num_tokens // size) - -(-end // size))
        found.append(ids)
    return tuple(found)


def _num_blocks(each: TransferGroup, ids: Sequence[int], end: int) -> int:
    """Return how many blocks of a list hold so many tokens."""
    num_blocks = -(-end // each.group.block_size)
    if len(ids) < num_blocks:
        raise BlockIdsInvalid(
            f"group {each.index}: {end} tokens need {num_blocks} blocks, but the list has {len(ids)}", group=each.index
        )
    return num_blocks


def _wanted(each: TransferGroup, ids: Sequence[int], end: int, *, whole: bool = False) -> tuple[int, ...]:
    if each.is_state:
        block = state_block(list(ids), each.spec)
        return (ABSENT if block in (None, NULL_BLOCK) else block,)
    num_blocks = _num_blocks(each, ids, end)
    named = tuple(ids[num_blocks - each.blocks_needed(end) : num_blocks])
    if NULL_BLOCK not in named:
        return named
    first = 0 if whole else next((at for at, block in enumerate(named) if block != NULL_BLOCK), num_blocks)
    return tuple([ABSENT if block == NULL_BLOCK else block for block in named[first:]])
