"""The ticket mint: allots slots and epochs, and signs one grant for all ranks of an engine.

Pure and free of NIXL: it can live in another process than the workers, as an engine's scheduler does.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import index

import numpy as np
from msgspec import UNSET

from kvflow.cache.tickets import Content, Grant, RankAddress, Sign, Ticket
from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded, ConfigInvalid, TicketInvalid

EPOCH_STEP = 2
"""A held epoch and the ended one after it."""

HEAD_START_BITS = 48
"""A mint that dies leaves at most a table of tickets that nobody admitted; hitting one of 4,096 is 1 in 2**36."""


class Mint:
    """Allot leases of one engine.

    Attributes:
        engine_id: the producer.
        ranks: every rank, as the workers report them (``worker.rank_address``).
        slots: leases that may be held at once.
    """

    def __init__(
        self,
        engine_id: str,
        ranks: Sequence[RankAddress],
        *,
        sign: Sign,
        lease_s: float,
        head_start: int = 0,
        admitted: bool = False,
        wall_clock: Callable[[], float] | None = None,
        block_sizes: Sequence[int] = (),
    ) -> None:
        """Start above everything that the ranks have held.

        Args:
            engine_id: the producer.
            ranks: at least one, each as its worker reports it now.
            sign: makes the MAC of a grant.
            lease_s: how long a lease lasts unless renewed.
            head_start: random, in ``[0, 2**HEAD_START_BITS)``: a mint that replaces another one, whose last
                tickets nobody has admitted, must not sign the same epoch for other blocks.
            admitted: whether every lease is held before its ticket is handed out.
            wall_clock: seconds since 1970, for ``Grant.issued_ms``; None leaves it out.
            block_sizes: tokens in one block, group by group, 0 for states. Only offers with digests need them.

        Raises:
            ConfigInvalid: there is no rank.
        """
        if not ranks:
            raise ConfigInvalid("a mint needs the address of at least one rank")
        self.engine_id = engine_id
        self.ranks = tuple(ranks)
        self._sign = sign
        self._lease_ms = max(1, round(lease_s * 1000))
        self._block_sizes = tuple(block_sizes)
        self._admitted = admitted
        self._wall_clock = wall_clock
        self.slots = min(address.slots for address in ranks)
        self._free = list(range(self.slots - 1, -1, -1))
        self._slots: dict[str, int | None] = {}
        self._epoch = max(int(address.epoch_base) for address in ranks) + 1 + head_start

    def offer(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]] | None = None,
    ) -> tuple[Ticket, Grant]:
        """Sign a ticket.

        Args:
            request_id: text that is not on offer already.
            block_ids: one list per group.
            num_tokens: tokens of the request, or one number per group.
            digests: the content of each block, at most 64 bytes, in lists like those of ``block_ids``; empty for an
                absent block. A consumer that expects other content reads nothing.

        Returns:
            The ticket for the consumer, and the grant that every rank must admit.

        Raises:
            ArgumentInvalid: the request's name is no text, or the digests are not one for each block.
            BlockIdsInvalid: lists and token counts are no integers, do not fit each other or no ticket, or the
                request is on offer already.
            CapacityExceeded: every slot is taken.
        """
        # Whatever else a ticket could carry, such as a UUID, comes back as text, under which no slot would be found.
        if not isinstance(request_id, str):
            raise ArgumentInvalid("request_id", "text", request_id)
        request_id = str.__str__(request_id)  # a subclass, numpy's for one, has no place in a ticket
        if request_id in self._slots:
            raise BlockIdsInvalid(f"request {request_id!r} is on offer already", remedy="Revoke it first.")
        lists, tokens = _as_integers(block_ids, num_tokens)
        contents = UNSET if digests is None else self._contents(digests, lists)
        if not self._free:
            raise CapacityExceeded("leases", self.slots, remedy="Wait for a lease to end, or raise lease_slots.")
        slot = self._free[-1]
        grant = Grant(
            engine_id=self.engine_id,
            request_id=request_id,
            ranks=self.ranks,
            slot=slot,
            epoch=str(self._epoch),
            block_ids=lists,
            num_tokens=tokens,
            lease_ms=self._lease_ms,
            admitted=self._admitted,
            issued_ms=UNSET if self._wall_clock is None else int(self._wall_clock() * 1000),
            contents=contents,
        )
        try:
            sealed = grant.seal(self._sign)
        except (TicketInvalid, UnicodeEncodeError, OverflowError) as error:
            raise BlockIdsInvalid(f"the offer fits no ticket: {error}", remedy="Correct the named field.") from error
        # Nothing is taken before everything is right: an offer that fails must not cost a slot.
        self._free.pop()
        self._slots[request_id] = slot
        self._epoch += EPOCH_STEP
        return Ticket(grants=(grant,), sealed=(sealed,)), grant

    def _contents(
        self, digests: Sequence[Sequence[bytes]], block_ids: tuple[tuple[int, ...], ...]
    ) -> tuple[Content, ...]:
        """Return the digests of an offer, one for each block that is there."""
        if len(self._block_sizes) != len(block_ids):
            raise ConfigInvalid(
                f"the mint has {len(self._block_sizes)} block sizes for {len(block_ids)} groups",
                remedy="Give the mint block_sizes, one for each group, to offer digests.",
            )
        lists = tuple(tuple(each) for each in digests)
        if len(lists) != len(block_ids):
            raise ArgumentInvalid("digests", f"{len(block_ids)} lists, one for each group", digests)
        for group, (found, ids) in enumerate(zip(lists, block_ids, strict=True)):
            if len(found) != len(ids) or not all(map(_is_digest, found, ids)):
                raise ArgumentInvalid(f"digests[{group}]", f"a list of {len(ids)} bytes, one for each block", found)
        return tuple(Content(size, found) for size, found in zip(self._block_sizes, lists, strict=True))

    def vacate(self, request_ids: Iterable[str]) -> None:
        """Free the slots of leases that have ended on every rank, and keep their names taken until ``retire``."""
        slots = self._slots
        for request_id in request_ids:
            slot = slots.get(request_id)
            if slot is not None:
                slots[request_id] = None
                self._free.append(slot)

    def retire(self, request_id: str) -> bool:
        """Free the slot, and the name, of a lease that has ended on every rank; False if it is unknown."""
        slot = self._slots.pop(request_id, -1)
        if slot is not None and slot >= 0:
            self._free.append(slot)
        return slot != -1


_INTEGERS = (int, np.integer)


def _is_digest(value: object, block_id: int) -> bool:
    return isinstance(value, bytes) and (bool(value) or block_id < 0)


def _as_integers(
    block_ids: Sequence[Sequence[int]], num_tokens: int | Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the caller's numbers as Python's own integers; numpy's are welcome, fractions and text are not."""
    try:
        lists = tuple([tuple(map(int, map(index, ids))) for ids in block_ids])
        if isinstance(num_tokens, _INTEGERS):
            tokens = (int(num_tokens),) * len(lists)
        else:
            tokens = tuple(map(int, map(index, num_tokens)))
    except TypeError as error:
        raise BlockIdsInvalid(f"block ids and numbers of tokens must be integers: {error}") from error
    if len(tokens) != len(lists) or min(tokens, default=1) < 1:
        raise BlockIdsInvalid(
            f"num_tokens is {num_tokens!r} for {len(lists)} groups",
            remedy="Give one number of tokens, at least 1, or one per group.",
        )
    return lists, tokens
