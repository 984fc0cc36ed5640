"""What ended requests leave in vLLM's prefix cache, and other engines may read until vLLM reuses it.

vLLM gives the blocks of an ended request to others when it needs them, the last ones first. ``Keeping`` pins none. It
learns from vLLM's block pool when a block is handed out, and ends the leases of that block in the same step: every rank
does so before the step writes. A kept lease has whole blocks with a hash only, because vLLM reuses others first.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

from kvflow.errors import KvflowError
from kvflow.integrations.vllm.blocks import ABSENT, DigestLists, TransferGroup, offered_blocks
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import BlocksByGroup, KeepBlocks
from kvflow.integrations.vllm.offering import Offering

PREFIX = "kept:"  # of the name of a lease, before that of its request: its blocks may be on offer, too


@dataclass(slots=True, eq=False)
class _Entry:
    """A kept lease, until vLLM reuses one of its blocks."""

    name: str
    block_ids: BlocksByGroup
    replaces: "_Entry | None" = None  # it has all that this one has, which ends when this lease is held


class Keeping:
    """The kept leases of one engine, at most one for each slot. Thread: the scheduler's."""

    def __init__(self, groups: Sequence[TransferGroup], offering: Offering, tell_reuse: Callable[[Any], None]) -> None:
        """Keep nothing yet. ``tell_reuse`` calls ``on_reuse``, and raises nothing."""
        self.pool: Any = None  # vLLM's block pool, if this engine keeps blocks
        self._groups = tuple(groups)
        self._whole = lcm(*[each.group.block_size for each in groups])  # tokens that fill whole blocks of every group
        self._offering = offering  # which signs grants
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._of_block: dict[int, set[_Entry]] = {}  # the pool calls ``tell_reuse`` for each of these
        self._by_last: dict[int, _Entry] = {}  # by the last block of the first group, the newest
        self._tell_reuse = tell_reuse
        self._signed: deque[tuple[_Entry, KeepBlocks | None]] = deque()
        self._num_signing = 0
        self._revoked: list[str] = []

    @property
    def is_signing(self) -> bool:
        """Whether there will be commands, though no request may come."""
        return self._num_signing > 0

    def keep(
        self,
        request_id: str,
        listed: Sequence[Sequence[int]],
        digests: Callable[..., DigestLists],
        *,
        num_tokens: int,
        step: int,
    ) -> None:
        """Keep the blocks of an ended request, which still holds them, unless vLLM would reuse some of them first.

        Args:
            request_id: in this engine.
            listed: block ids of each group of vLLM.
            digests: block ids, ``num_tokens`` -> digests of the blocks; called on another thread.
            num_tokens: whose keys and values are in the blocks.
            step: the last one that may write into them.

        Raises:
            BlockIdsInvalid: a list has fewer blocks than the tokens need.
        """
        pool, end = self.pool, num_tokens - num_tokens % self._whole
        if pool is None or end <= 0 or not self._offering.slots:
            return
        block_ids = offered_blocks(self._groups, listed, end)
        ids = [block for group in block_ids for block in group]
        needed = sum([each.blocks_needed(end) for each in self._groups])
        if len(ids) < needed or ABSENT in ids or not all(pool.blocks[each].block_hash for each in ids):
            return
        if any(each.block_ids == block_ids for each in self._of_block.get(ids[-1], ())):
            return  # it is kept already: all its tokens were in the prefix cache
        entry = _Entry(PREFIX + request_id, block_ids, self._extended_by(block_ids))
        while len(self._entries) >= self._offering.slots or entry.name in self._entries:
            oldest = self._entries.get(entry.name) or next(iter(self._entries.values()))
            self._revoked.append(oldest.name)
            self._forget(oldest)
        # While the request holds its blocks, this moves none of them in the queue of free blocks.
        new = [pool.blocks[block] for block in ids if block not in self._of_block]
        pool.touch(new)
        pool.unpin_blocks(new, self._tell_reuse)
        for block in ids:
            self._of_block.setdefault(block, set()).add(entry)
        self._entries[entry.name] = self._by_last[block_ids[0][-1]] = entry
        self._offering.submit(partial(self._sign, entry, digests, end, step))
        self._num_signing += 1  # behind what may fail: vLLM takes steps until all are signed

    def on_reuse(self, block: Any) -> None:
        """End the leases of a block that vLLM hands out."""
        entries = tuple(self._of_block.get(block.block_id, ()))
        self._revoked += [entry.name for entry in entries]  # first, whatever happens next
        for entry in entries:
            self._forget(entry)

    def on_refused(self, names: Iterable[str]) -> None:
        """End leases that a rank does not hold, on all others."""
        for entry in filter(None, map(self._entries.get, names)):
            self._revoked.append(entry.name)
            self._forget(entry)

    def end_all(self) -> list[str]:
        """Forget all kept leases, and return their names: the caller ends them now on the ranks that it reaches."""
        names = list(self._entries)
        self._revoked += names  # the others end them before the next step writes
        self._entries.clear()
        self._of_block.clear()
        self._by_last.clear()
        for name in names:
            self._offering.submit(partial(self._offering.retire, name))
        return names

    def take_commands(self) -> list[KeepBlocks]:
        """Return the leases that the ranks are to hold, since the last call."""
        commands = []
        while self._signed:
            entry, command = self._signed.popleft()
            self._num_signing -= 1
            if self._entries.get(entry.name) is entry:
                if command is None:
                    self._forget(entry)
                else:
                    commands.append(command)
                    self._replace(entry)
        return commands

    def take_revoked(self) -> tuple[str, ...]:
        """Return the leases that the ranks must end before they write, since the last call."""
        revoked, self._revoked = tuple(self._revoked), []
        return revoked

    def _extended_by(self, block_ids: BlocksByGroup) -> _Entry | None:
        """Return the longest lease whose lists these blocks continue, in every group."""
        for block in reversed(block_ids[0][:-1]):
            entry = self._by_last.get(block)
            if entry is not None and all(
                new[: len(old)] == old for old, new in zip(entry.block_ids, block_ids, strict=True)
            ):
                return entry
        return None

    def _replace(self, entry: _Entry) -> None:
        """End the lease that a new one extends, unless it has ended."""
        replaced, entry.replaces = entry.replaces, None
        if replaced is not None and self._entries.get(replaced.name) is replaced:
            self._revoked.append(replaced.name)
            self._forget(replaced)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.name]
        if self._by_last.get(entry.block_ids[0][-1]) is entry:
            del self._by_last[entry.block_ids[0][-1]]
        for group in entry.block_ids:
            for block in group:
                entries = self._of_block[block]
                entries.discard(entry)
                if not entries:
                    del self._of_block[block]
        self._offering.submit(partial(self._offering.retire, entry.name))  # behind the job that signs it

    def _sign(self, entry: _Entry, digests: Callable[..., DigestLists], num_tokens: int, step: int) -> None:
        """Sign the grant of a lease, on the thread of ``Offering``."""
        command = None
        try:
            found = digests(entry.block_ids, num_tokens=num_tokens)
            grant = self._offering.sign_kept(entry.name, entry.block_ids, num_tokens, found)
            command = KeepBlocks(entry.name, grant, found, step)
        except KvflowError as error:
            logger.debug("kvflow: the blocks of %s are not kept: %s", entry.name, error)
        finally:
            self._signed.append((entry, command))
