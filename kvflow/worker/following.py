"""What a pull of an open offer knows: what its producer has settled, and which tokens are read next.

The producer computes while the pull reads. Each source rank is asked what is settled, and answers once that is worth a
read. The range up to the end of what all ranks have settled is then an ordinary read with a fence of its own. Only full
attention is read before the seal: its blocks are not written again. Whatever a rank says is checked first.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
from msgspec import Struct

from kvflow.config import Tuning
from kvflow.errors import BlockIdsInvalid, DeadlineExceeded, ProtocolViolation, StaleLease, TicketInvalid
from kvflow.ids import Ids, PeerId
from kvflow.layout.groups import SETTLES
from kvflow.layout.manifest import Manifest
from kvflow.leases.blocks import check_block_ids
from kvflow.leases.held import Blocks, OpenGroups
from kvflow.leases.tickets import Ticket, lease_name
from kvflow.planning.bind import AnyBinding
from kvflow.planning.pairs import UnitPairs, located, pair_units
from kvflow.reads.contract import Part, RankRead
from kvflow.reads.pulls import TokenRange
from kvflow.rendezvous.questions import IDS_MAX, Settled
from kvflow.worker.prepared import TicketRank

WAIT_S_MAX = 30.0  # a question is asked again after so long

NEVER_SEALED = "Look at the producer: it computes too long, or has lost the request. A longer compute_s waits longer."


class _Group(Struct, eq=False, gc=False):
    """One group that settles. Its pairs count source units from token 0, because the blocks are not known yet."""

    list_id: int
    binding: AnyBinding
    size: int  # tokens of a source block
    pairs: UnitPairs

    @property
    def first(self) -> int:
        """The token with which the first block that is read begins."""
        return int(self.pairs.source[0]) // self.binding.group.source.per_block * self.size

    def part(self, begin: int, end: int, told: Sequence[int]) -> Part | None:
        """Return what is read for these tokens, if anything is."""
        per_block, block = self.binding.group.source.per_block, begin // self.size
        cuts = np.searchsorted(self.pairs.source, [block * per_block, -(-end // self.size) * per_block])
        first, last = cuts.tolist()
        if first == last:
            return None
        source = np.asarray(self.pairs.source[first:last], np.int64) - block * per_block
        pairs = located(UnitPairs(source, self.pairs.target[first:last]), told[block:], per_block)
        return Part(self.list_id, pairs, self.binding)


class _Rank:
    """What one source rank of the ticket has said.

    Attributes:
        name: its name.
        settled: tokens that are settled.
        sealed: whether everything is.
        told: the blocks of each group that it has told.
        cut_off: whether its last answer was about as long as one may be, so that the next one has more.
    """

    def __init__(self, ticket: Ticket, rank: TicketRank, ours: Manifest, targets: Sequence[Ids]) -> None:
        self._grant = grant = ticket.grants[rank.grant]
        self._link, self._theirs = rank.peer.link, rank.peer.manifest
        if grant.slot >= rank.peer.num_slots:
            raise TicketInvalid(f"{self._link.peer} has no epoch slot {grant.slot}")
        self.peer = rank.peer.link.peer
        self.name = str(self.peer)
        self.settled, self.sealed, self.cut_off = 0, False, False
        self._settling = OpenGroups.of(self._theirs)
        self.told: Blocks = ((),) * len(self._theirs.groups)
        self._keys: set[int] = set()  # of these blocks, as ``OpenGroups`` compares them
        try:
            self._add(grant.block_ids, 0, sealed=False)
        except ProtocolViolation as error:
            raise TicketInvalid(error.message) from error
        self.lease = lease_name(ticket, rank.grant)
        self._targets = targets
        self.early: list[_Group] = []
        self.late: list[tuple[int, AnyBinding]] = []
        total = grant.num_tokens[0]
        self.tokens: list[int] = []  # in the blocks of these groups, on both sides
        for list_id, binding in rank.groups:
            source, target = binding.group.source_group, binding.group.target_group
            sides = self._theirs.groups[source], ours.groups[target]
            kinds = {layer.kind for side in sides for layer in side.layers}
            if not kinds <= SETTLES or grant.num_tokens[source] != total:
                self.late.append((list_id, binding))
                continue
            size = sides[0].tokens_per_id
            every = np.arange(-(-total // size))
            pairs = pair_units(binding.group, every, targets[target], num_tokens=total)
            self.tokens += [size, sides[1].tokens_per_id]
            if len(pairs.source):
                self.early.append(_Group(list_id, binding, size, pairs))

    async def ask(self, above: int, within_s: float, answer_s: float) -> None:
        """Ask what is settled, once it is more than we know; check and keep the answer. Cancellation: safe.

        Raises:
            StaleLease: the lease has ended.
            ProtocolViolation: the answer contradicts the ticket, or earlier ones.
            KvflowError: of ``Link.ask``.
        """
        (answer,) = await self._link.settled(
            [self.lease],
            known=[*map(len, self.told)],
            above=above,
            wait_s=within_s,
            within_s=answer_s,
        )
        if answer.ended:
            message = "the lease ended before everything was computed"
            raise StaleLease(message, ended_by=answer.ended, peer=self.name)
        self._hear(answer)

    def _hear(self, answer: Settled) -> None:
        total = self._grant.num_tokens[0]
        if not self.settled <= answer.num_tokens <= total or (answer.sealed and answer.num_tokens < total):
            sealed = " and sealed" if answer.sealed else ""
            self._refuse(f"{answer.num_tokens} tokens are settled{sealed}, of {total}, after {self.settled}")
        self._add(answer.block_ids, answer.num_tokens, sealed=answer.sealed)
        self.settled, self.sealed = answer.num_tokens, answer.sealed
        self.cut_off = not answer.sealed and sum(map(len, answer.block_ids)) > IDS_MAX // (2 * len(self.told))

    def _add(self, block_ids: Sequence[Sequence[int]], settled: int, *, sealed: bool) -> None:
        """Add blocks to those that were told, once all of them are checked."""
        theirs = self._theirs
        try:
            check_block_ids(block_ids, num_blocks=theirs.num_blocks, aliases=theirs.aliases, unique=True)
            new = tuple([tuple(map(int, ids)) for ids in block_ids])
            grant, told, keys = self._grant, self.told, self._keys
            self.told, more = self._settling.extend(grant, told, keys, new, settled, sealed=sealed)
        except BlockIdsInvalid as error:
            self._refuse(error.message)
        self._keys |= more

    def _refuse(self, fault: str) -> NoReturn:
        raise ProtocolViolation(f"what {self.name} says of its open offer is wrong: {fault}", peer=self.name)

    def parts(self, begin: int, end: int, *, last: bool) -> tuple[Part, ...]:
        """Return what this rank gives for these tokens; with the last ones, also the groups that settle at the seal."""
        found = [each.part(begin, end, self.told[each.binding.group.source_group]) for each in self.early]
        for list_id, binding in self.late if last else ():
            group, grant = binding.group, self._grant
            source = group.source_group
            ids, num_tokens = tuple(self.told[source]), grant.num_tokens[source]
            pairs = pair_units(group, ids, self._targets[group.target_group], num_tokens=num_tokens)
            found.append(Part(list_id, pairs, binding) if len(pairs.source) else None)
        return tuple([part for part in found if part is not None])


class Following:
    """What is known of an open offer that is read, and what is read next. Thread: the event loop.

    Attributes:
        task: reads on until the call ends.
        nbytes: bytes that are read before the seal.
        arrived: set while nothing is read.

    Raises:
        TicketInvalid: the ticket does not fit the producer's cache, or is only partly of an open offer.
        BlockRangeMismatch: our blocks hold tokens that the offer does not cover.
    """

    task: "asyncio.Task[None]"
    _range: TokenRange

    def __init__(
        self,
        ticket: Ticket,
        sources: Sequence[TicketRank],
        targets: Sequence[Ids],
        ours: Manifest,
        budgets: Tuning,
    ) -> None:
        if not all(grant.is_open for grant in ticket.grants):
            raise TicketInvalid("the ticket joins open offers with others")
        self._total, *others = {grant.num_tokens[0] for grant in ticket.grants}
        if others:
            raise TicketInvalid(f"the ticket joins open offers of {sorted([self._total, *others])[:4]} tokens")
        self._request_id, self._budgets = ticket.grants[0].request_id, budgets
        self._ranks = [_Rank(ticket, rank, ours, targets) for rank in sources]
        self._all_cut = False  # whether nothing is read after what ``cut`` has returned last
        self._unit = math.lcm(*[tokens for rank in self._ranks for tokens in rank.tokens])
        early = [group for rank in self._ranks for group in rank.early]
        self.nbytes = sum(len(each.pairs.source) * each.binding.unit_bytes for each in early)
        first = min([each.first for each in early], default=self._total)
        self._end = first // self._unit * self._unit  # what is before it has been read
        worth = -(-budgets.follow_bytes_min * max(1, self._total - self._end) // max(1, self.nbytes))
        self._worth = -(-worth // self._unit) * self._unit  # tokens
        self.arrived = asyncio.Event()
        self.arrived.set()

    @property
    def sealed(self) -> bool:
        """Whether every rank has settled everything."""
        return all(rank.sealed for rank in self._ranks)

    def needs(self, peer: PeerId) -> bool:
        """Return whether the pull still asks or reads from a peer once what it reads now has arrived."""
        return not self._all_cut and any(rank.peer == peer for rank in self._ranks)

    async def hear(self, waited_s: float) -> None:
        """Ask every rank until enough is settled for a read, or everything is. Cancellation: safe.

        Raises:
            DeadlineExceeded: not everything is settled ``compute_s`` after the start, and no answer was cut off.
            KvflowError: of ``_Rank.ask``.
        """
        left_s = self._budgets.compute_s - waited_s
        above = min(self._end + self._worth, self._total)
        if min(rank.settled for rank in self._ranks) == self._total:
            above = self._total + 1  # only the seal is news
        within_s = max(0.0, min(WAIT_S_MAX, left_s))
        asking = [
            asyncio.ensure_future(rank.ask(above, within_s, self._budgets.handshake_s))
            for rank in self._ranks
            if not rank.sealed
        ]
        try:
            await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
        if left_s <= 0 and not self.sealed and not any(rank.cut_off for rank in self._ranks):
            request_id, compute_s = self._request_id, self._budgets.compute_s
            raise DeadlineExceeded(
                f"request {request_id!r}: the offer was not sealed within {compute_s:g} s",
                phase="compute",
                request_id=request_id,
                peer=next(rank.name for rank in self._ranks if not rank.sealed),
                remedy=NEVER_SEALED,
            )

    def cut(self, pull_id: int, priority: int, read_ids: Iterator[int], now: float) -> TokenRange | None:
        """Return what is read next; None if nothing is worth a read."""
        self._all_cut = last = self.sealed
        readable = min(rank.settled for rank in self._ranks)
        end = self._total if last else readable
        if end < self._total:
            end = end // self._unit * self._unit
            if end < self._end + self._worth:
                return None
        first, self._end = self._end, max(self._end, end)
        reads = [
            RankRead(next(read_ids), rank.peer, rank.lease, parts, priority=priority)
            for rank in self._ranks
            if (parts := rank.parts(first, self._end, last=last))
        ]
        nbytes = sum(
            len(part.pairs.source) * part.binding.unit_bytes
            for read in reads
            for part in read.parts
            if part.binding is not None
        )
        if not reads:
            return None
        self.arrived.clear()
        self._range = TokenRange(pull_id, self._request_id, now, reads, nbytes, first=first, end=self._end)
        return self._range

    def on_arrived(self, now: float) -> None:
        """Note that what ``cut`` has returned last has arrived."""
        self._range.completed_at = now
        self.arrived.set()
