"""Block ids as vLLM's manager lists them -> as a ticket names them.

vLLM lists the blocks of a request from its first token on, with the null block where a window has moved on. kvflow
names the last blocks, up to the one that holds the last token; -1 stands for a block that is not there.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from kvflow import Group, window_blocks
from kvflow.errors import BlockIdsInvalid
from kvflow.integrations.vllm.specs import state_block

NULL_BLOCK = 0
"""vLLM's block that stands for one which is not there. No request is ever given it. Here it also stands for a block
that has its tokens already, from the prefix cache: others may be reading it, so that nothing is to be written there."""

ABSENT = -1

BlockIds = tuple[tuple[int, ...], ...]


class TransferGroup(Struct, frozen=True):
    """One group whose blocks travel.

    Attributes:
        index: of the group among all of vLLM's.
        group: as kvflow names it.
        spec: vLLM's spec of it.
        retained: tokens before a sliding window that are needed as well.
    """

    index: int
    group: Group
    spec: Any
    retained: int = 0

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many of the last blocks of so many tokens the next token still needs."""
        reach = self.group
        if reach.window and self.retained:
            reach = structs.replace(reach, window=reach.window + self.retained)
        return window_blocks(reach, num_tokens)

    @property
    def is_state(self) -> bool:
        """Whether a request has one block, with its running state."""
        return self.group.kind == "mamba"


def offered_blocks(groups: Sequence[TransferGroup], listed: Sequence[Sequence[int]], num_tokens: int) -> BlockIds:
    """Return what a producer gives of a request: for each group, the blocks that the next token needs.

    Args:
        groups: those that travel.
        listed: one list for each of vLLM's groups.
        num_tokens: that are computed.

    Raises:
        BlockIdsInvalid: a list is shorter than the tokens need.
    """
    return tuple(_wanted(each, listed[each.index], num_tokens) for each in groups)


def loaded_blocks(
    groups: Sequence[TransferGroup], listed: Sequence[Sequence[int]], *, end: int, num_tokens: int
) -> BlockIds:
    """Return where a consumer wants the blocks of a ticket.

    Args:
        groups: those that travel.
        listed: one list for each of vLLM's groups, ``NULL_BLOCK`` for what is in our cache already.
        end: one past the last token that is wanted.
        num_tokens: of the ticket, which may go further.

    Raises:
        BlockIdsInvalid: a list is shorter than the tokens need, or has no block for a state.
    """
    found = []
    for each in groups:
        ids = _wanted(each, listed[each.index], end)
        if ids == (ABSENT,) and each.is_state:
            # Nothing would be loaded, nothing would fail, and the tokens would be wrong.
            raise BlockIdsInvalid(f"group {each.index}: there is no block to load the state into", group=each.index)
        if num_tokens > end and not each.is_state:
            size = each.group.block_size
            ids += (ABSENT,) * (-(-num_tokens // size) - -(-end // size))
        found.append(ids)
    return tuple(found)


def _wanted(each: TransferGroup, ids: Sequence[int], end: int) -> tuple[int, ...]:
    if each.is_state:
        block = state_block(list(ids), each.spec)
        return (ABSENT if block in (None, NULL_BLOCK) else block,)
    size = each.group.block_size
    num_blocks = -(-end // size)
    if len(ids) < num_blocks:
        raise BlockIdsInvalid(
            f"group {each.index}: {len(ids)} blocks for {end} tokens, which need {num_blocks}", group=each.index
        )
    named = tuple(ids[num_blocks - each.blocks_needed(end) : num_blocks])
    if NULL_BLOCK not in named:
        return named
    first = next((at for at, block in enumerate(named) if block != NULL_BLOCK), num_blocks)
    return tuple([ABSENT if block == NULL_BLOCK else block for block in named[first:]])
