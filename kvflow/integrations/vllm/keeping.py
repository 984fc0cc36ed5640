"""What ended requests leave in vLLM's prefix cache, and other engines may read until vLLM reuses it.

vLLM gives the blocks of an ended request to others when it needs them, the last ones first. ``Keeping`` pins none. It
learns from vLLM's block pool when a block is handed out, and ends the leases of that block in the same step: every rank
does so before the step writes. A kept lease has whole blocks with a hash only, because vLLM reuses others first.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvflow.contents import DigestLists, Request
from kvflow.errors import KvflowError
from kvflow.integrations.vllm.blocks import ABSENT, NULL_BLOCK, TransferGroup, kept_blocks
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


_Cached = tuple[int, int, Any, Any]  # group of vLLM, number of the block in the request, vLLM's block, and its hash


class Keeping:
    """The kept leases of one engine, at most one for each slot. Thread: the scheduler's."""

    def __init__(self, groups: Sequence[TransferGroup], offering: Offering, tell_reuse: Callable[[Any], None]) -> None:
        """Keep nothing yet. ``tell_reuse`` calls ``on_reuse``, and raises nothing."""
        self.pool: Any = None  # vLLM's block pool, if this engine keeps blocks
        self._groups = tuple(groups)
        self._offering = offering  # which signs grants
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._of_block: dict[int, set[_Entry]] = {}  # the pool calls ``tell_reuse`` for each of these
        self._by_last: dict[int, _Entry] = {}  # by the last block of the first group, the newest
        self._watched: set[int] = set()  # of these blocks the pool tells
        self._prompts: dict[str, Request] = {}  # that are not computed yet
        self._windows: dict[str, list[_Cached]] = {}  # of requests that run, when their prompts were computed
        self._tell_reuse = tell_reuse
        self._signed: deque[tuple[_Entry, KeepBlocks | None]] = deque()
        self._num_signing = 0
        self._revoked: list[str] = []

    @property
    def is_signing(self) -> bool:
        """Whether there will be commands, though no request may come."""
        return self._num_signing > 0

    def expect(self, request: Request) -> None:
        """Take a request of vLLM's, whose prompt is to be computed."""
        if self.pool is not None and any(each.group.window for each in self._groups):
            self._prompts[request.request_id] = request

    def scheduled(self, output: Any) -> None:
        """Note what vLLM has cached of the windows of prompts that this step completes: soon the windows move on.

        ``output``: vLLM's ``SchedulerOutput``.
        """
        counts, known = output.num_scheduled_tokens, output.scheduled_cached_reqs
        names = self._prompts.keys() & counts.keys()
        if not names:
            return
        computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        computed |= {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        for name in names:
            if computed[name] + counts[name] < self._prompts[name].num_prompt_tokens:
                continue
            del self._prompts[name]
            listed, noted = (
                output.kv_connector_block_state.get_block_ids(name) or (),
                self._windows.setdefault(name, []),
            )
            for index in [each.index for each in self._groups if each.group.window and listed]:
                cached = {at: self.pool.blocks[block] for at, block in enumerate(listed[index]) if block != NULL_BLOCK}
                noted += [(index, at, each, each.block_hash) for at, each in cached.items() if each.block_hash]
            self._watch([block for _, _, block, _ in noted])

    def forget(self, request_id: str) -> list[_Cached]:
        """Forget a request that has ended, and return what was noted of its windows."""
        self._prompts.pop(request_id, None)
        return self._windows.pop(request_id, [])

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
        noted, pool = self.forget(request_id), self.pool
        if pool is None or num_tokens <= 0 or not self._offering.slots:
            return
        blocks, lists = pool.blocks, [list(ids) for ids in listed]
        for index, at, block, known in noted:
            is_there = block.block_id in self._watched and block.block_hash == known
            if is_there and at < len(lists[index]) and lists[index][at] == NULL_BLOCK:
                lists[index][at] = block.block_id
        block_ids, end = kept_blocks(self._groups, lists, num_tokens, lambda each: bool(blocks[each].block_hash))
        if not end:
            return
        if any(_has_all(each.block_ids, block_ids) for each in self._of_block.get(block_ids[0][-1], ())):
            return  # it is kept already: all its tokens were in the prefix cache
        ids = _present(block_ids)
        entry = _Entry(PREFIX + request_id, block_ids, self._extended_by(block_ids))
        while len(self._entries) >= self._offering.slots or entry.name in self._entries:
            oldest = self._entries.get(entry.name) or next(iter(self._entries.values()))
            self._revoked.append(oldest.name)
            self._forget(oldest)
        self._watch([blocks[block] for block in ids])
        for block in ids:
            self._of_block.setdefault(block, set()).add(entry)
        self._entries[entry.name] = self._by_last[block_ids[0][-1]] = entry
        self._offering.submit(partial(self._sign, entry, digests, end, step))
        self._num_signing += 1  # behind what may fail: vLLM takes steps until all are signed

    def on_reuse(self, block: Any) -> None:
        """End the leases of a block that vLLM hands out."""
        self._watched.discard(block.block_id)
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
        """Return the leases that the ranks are to hold, since the last call.

        One that another of them extends is not held at all: the ranks end leases before they hold those of a step.
        """
        taken = []
        while self._signed:
            entry, command = self._signed.popleft()
            self._num_signing -= 1
            if self._entries.get(entry.name) is entry:
                if command is None:
                    self._forget(entry)
                else:
                    taken.append((entry, command))
                    self._replace(entry)
        return [command for entry, command in taken if self._entries.get(entry.name) is entry]

    def take_revoked(self) -> tuple[str, ...]:
        """Return the leases that the ranks must end before they write, since the last call."""
        revoked, self._revoked = tuple(self._revoked), []
        return revoked

    def _watch(self, blocks: Iterable[Any]) -> None:
        """Have the pool tell when it hands one of these blocks out, which requests still hold.

        So this moves none of them in the queue of free blocks.
        """
        new = [each for each in blocks if each.block_id not in self._watched]
        self.pool.touch(new)
        self.pool.unpin_blocks(new, self._tell_reuse)
        self._watched.update([each.block_id for each in new])

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
        for block in _present(entry.block_ids):
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


def _present(block_ids: BlocksByGroup) -> list[int]:
    """Return the blocks of all groups together, without those that are absent."""
    return [block for group in block_ids for block in group if block != ABSENT]


def _has_all(block_ids: BlocksByGroup, other: BlocksByGroup) -> bool:
    """Return whether lists end with all that others list."""
    return all(ids[len(ids) - len(more) :] == more for ids, more in zip(block_ids, other, strict=True))
