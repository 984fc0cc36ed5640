"""The ticket mint: allots slots and epochs, and signs one grant for all ranks of an engine.

Pure and free of NIXL: it can live in another process than the workers, as an engine's scheduler does.
"""

from collections.abc import Callable, Sequence
from operator import index

import msgspec
import numpy as np
from msgspec import UNSET

from kvflow.cache.tickets import Grant, RankAddress, Sign, Ticket
from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded, ConfigInvalid

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
            wall_clock: seconds since 1970, for ``Grant.issued_at``; None leaves it out.

        Raises:
            ConfigInvalid: there is no rank.
        """
        if not ranks:
            raise ConfigInvalid("a mint needs the address of at least one rank")
        self.engine_id = engine_id
        self.ranks = tuple(ranks)
        self._sign = sign
        self._lease_s = lease_s
        self._admitted = admitted
        self._wall_clock = wall_clock
        self.slots = min(address.slots for address in ranks)
        self._free = list(range(self.slots - 1, -1, -1))
        self._slots: dict[str, int | None] = {}
        self._epoch = max(int(address.epoch_base) for address in ranks) + 1 + head_start

    def offer(
        self, request_id: str, *, block_ids: Sequence[Sequence[int]], num_tokens: int | Sequence[int]
    ) -> tuple[Ticket, Grant]:
        """Sign a ticket.

        Args:
            request_id: text that is not on offer already.
            block_ids: one list per group.
            num_tokens: tokens of the request, or one number per group.

        Returns:
            The ticket for the consumer, and the grant that every rank must admit.

        Raises:
            ArgumentInvalid: the request's name is no text.
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
            lease_s=self._lease_s,
            admitted=self._admitted,
            issued_at=UNSET if self._wall_clock is None else self._wall_clock(),
        )
        try:
            grant = msgspec.convert(msgspec.to_builtins(grant), type=Grant).signed(self._sign)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise BlockIdsInvalid(f"the offer fits no ticket: {error}", remedy="Correct the named field.") from error
        # Nothing is taken before everything is right: an offer that fails must not cost a slot.
        self._free.pop()
        self._slots[request_id] = slot
        self._epoch += EPOCH_STEP
        return Ticket(grants=(grant,)), grant

    def vacate(self, request_id: str) -> None:
        """Free the slot of a lease that has ended on every rank, and keep its name taken until ``retire``."""
        slot = self._slots.get(request_id)
        if slot is not None:
            self._slots[request_id] = None
            self._free.append(slot)

    def retire(self, request_id: str) -> bool:
        """Free the slot, and the name, of a lease that has ended on every rank; False if it is unknown."""
        self.vacate(request_id)
        return self._slots.pop(request_id, -1) != -1


def _as_integers(
    block_ids: Sequence[Sequence[int]], num_tokens: int | Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the caller's numbers as Python's own integers; numpy's are welcome, fractions and text are not."""
    try:
        lists = tuple(tuple(int(index(block)) for block in ids) for ids in block_ids)
        counts = [num_tokens] * len(lists) if isinstance(num_tokens, int | np.integer) else num_tokens
        tokens = tuple(int(index(count)) for count in counts)
    except TypeError as error:
        raise BlockIdsInvalid(f"block ids and numbers of tokens must be integers: {error}") from error
    if len(tokens) != len(lists) or any(count < 1 for count in tokens):
        raise BlockIdsInvalid(
            f"num_tokens is {num_tokens!r} for {len(lists)} groups",
            remedy="Give one number of tokens, at least 1, or one per group.",
        )
    return lists, tokens
