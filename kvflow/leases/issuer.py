"""The ticket issuer: allots slots and epochs, and signs one grant for all ranks of an engine.

It is pure and needs no NIXL, so it can run in another process than the workers, such as an engine's scheduler.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import index

import numpy as np

from kvflow.errors import (
    ArgumentInvalid,
    BlockIdsInvalid,
    CapacityExceeded,
    ConfigInvalid,
    TicketInvalid,
    counted,
    shown,
)
from kvflow.leases.blocks import as_digest_lists, block_lists, complete_digests
from kvflow.leases.tickets import FINGERPRINT_BYTES, Content, Grant, Kind, RankAddress, Sign, Ticket, is_traceparent
from kvflow.validation import find_fault

EPOCH_STEP = 2  # one while the lease is held, and the next one when it has ended

HEAD_START_BITS = 48
"""A crashed issuer leaves at most 4,096 tickets that no rank admitted: one of their epochs is reused once in 2**36."""


class Issuer:
    """Assign the lease slots of one engine, and sign its tickets."""

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
        draw_trace: Callable[[int], int] | None = None,
        fingerprint: bytes = bytes(FINGERPRINT_BYTES),
    ) -> None:
        """Start with an epoch above all that the ranks have held.

        Args:
            engine_id: the producer.
            ranks: at least one, each as its worker reports it now (``worker.rank_address``).
            sign: makes the MAC of a grant.
            lease_s: how long a lease lasts unless renewed.
            head_start: random, so that a new issuer does not reuse the epochs of tickets that no rank has admitted.
            admitted: whether every lease is held before its ticket is handed out.
            wall_clock: seconds since 1970, for ``Grant.issued_ms``; None leaves it out.
            block_sizes: tokens in one block, group by group, 0 for states. Only offers with digests need them.
            draw_trace: draws bits for a trace context of each offer without one; None leaves it out.
            fingerprint: 8 bytes that name the secret behind ``sign``.

        Raises:
            ArgumentInvalid: a rank is something else than a ``RankAddress``.
            ConfigInvalid: there is no rank, or two have one number.
        """
        remedy = "Pass the rank_address of every worker of the engine."
        if not ranks:
            raise ConfigInvalid("a mint needs the address of at least one rank", remedy=remedy)
        for rank, address in enumerate(ranks):
            if not isinstance(address, RankAddress):
                raise ArgumentInvalid(f"ranks[{rank}]", "a RankAddress", address, remedy=remedy)
        if len({address.rank for address in ranks}) != len(ranks):
            numbers = sorted(address.rank for address in ranks)
            raise ConfigInvalid(f"two ranks have one number: {shown(numbers)}", remedy=remedy)
        self.engine_id = engine_id
        self.ranks = tuple(ranks)
        self._sign = sign
        self._lease_ms = max(1, round(lease_s * 1000))
        self._block_sizes = tuple(block_sizes)
        self._admitted = admitted
        self._wall_clock = wall_clock
        self._draw_trace = draw_trace
        self._fingerprint = fingerprint
        self.slots = min(address.slots for address in ranks)
        self._free = list(range(self.slots - 1, -1, -1))
        self._slots: dict[str, int] = {}  # -1 if it is free again
        self._kept: dict[str, None] = {}  # those that leave their slots to others, the oldest first
        self._epoch = max(address.epoch_base for address in ranks) + 1 + head_start

    def offer(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]] | None = None,
        traceparent: str = "",
        chained: bool = False,
    ) -> tuple[Ticket, Grant]:
        """Sign a ticket. The arguments are those of ``Worker.offer``, and ``chained``.

        ``chained``: each digest covers the one before it, so the ticket has only the last one of each group.

        Returns:
            The ticket for the consumer, and the grant that every rank must admit.

        Raises:
            ArgumentInvalid, BlockIdsInvalid: as in ``Worker.offer``, but the ranks compare the ids with their caches.
            CapacityExceeded: every slot is taken by an offer. What is kept leaves its slot to an offer, as in ``keep``.
        """
        return self.issue(request_id, block_ids, num_tokens, digests, traceparent, chained=chained)

    def keep(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]],
    ) -> tuple[Ticket, Grant]:
        """Sign the ticket of blocks that are kept. The arguments, the result and the errors are those of ``offer``.

        The digests are chained. If no slot is free, the oldest of what is kept is forgotten, and the new grant has its
        slot: a rank that admits the grant ends that lease.
        """
        return self.issue(request_id, block_ids, num_tokens, digests or (), kind="kept")

    def offer_progressive(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]] | None = None,
        traceparent: str = "",
    ) -> tuple[Ticket, Grant]:
        """Sign the ticket of blocks that are still computed. The arguments are those of ``Worker.offer_progressive``.

        The result and the errors are those of ``offer``. Each rank admits the grant, then calls ``Worker.advance`` and
        ``Worker.seal``.
        """
        return self.issue(request_id, block_ids, num_tokens, digests, traceparent, kind="open")

    def sign(self, grant: Grant) -> Ticket:
        """Sign a grant of this engine, and return its ticket. Raises ``TicketInvalid`` if no reader could read it."""
        return Ticket(grants=(grant,), signed=(grant.signed(self._sign, self._fingerprint),))

    def sign_again(self, grant: Grant) -> Ticket:
        """Sign a grant that ``sign`` has signed before: in half of the time, if its block ids are scattered."""
        payload = grant.payload(self._fingerprint)
        return Ticket(grants=(grant,), signed=(self._sign(payload) + payload,))

    def issue(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]] | None,
        traceparent: str = "",
        *,
        kind: Kind = "offer",
        chained: bool = False,
    ) -> tuple[Ticket, Grant]:
        """Sign the ticket of a lease of this kind, as its method says. ``chained``: always, unless it is an offer."""
        # A ticket returns any other type, such as a UUID, as text, which would not find the slot again.
        if not isinstance(request_id, str):
            raise ArgumentInvalid("request_id", "text", request_id, remedy="Pass str(request_id).")
        request_id = str.__str__(request_id)  # a ticket cannot encode a subclass, such as NumPy's
        if request_id in self._slots:
            raise BlockIdsInvalid(f"request {request_id!r} is on offer already", remedy="Revoke it first.")
        if traceparent and not is_traceparent(traceparent):
            remedy = "Pass the header traceparent as it came, or an empty text."
            raise ArgumentInvalid("traceparent", "a W3C trace context of version 00", traceparent, remedy=remedy)
        lists = block_lists(block_ids)
        tokens = _as_tokens(num_tokens, len(lists))
        chained = chained or kind != "offer"
        contents = None if digests is None else self._contents(digests, lists, tokens, kind, chained=chained)
        if not self._free and not self._kept:
            raise CapacityExceeded("leases", self.slots, remedy="Wait for a lease to end, or raise lease_slots.")
        oldest = None if self._free else next(iter(self._kept))
        grant = Grant(
            kind=kind,
            engine_id=self.engine_id,
            request_id=request_id,
            ranks=self.ranks,
            slot=self._free[-1] if oldest is None else self._slots[oldest],
            epoch=self._epoch,
            block_ids=lists,
            num_tokens=tokens,
            lease_ms=self._lease_ms,
            admitted=self._admitted,
            issued_ms=None if self._wall_clock is None else int(self._wall_clock() * 1000),
            contents=contents,
            traceparent=traceparent or (None if self._draw_trace is None else _drawn_trace(self._draw_trace)),
        )
        try:
            ticket = self.sign(grant)
        except TicketInvalid as error:
            raise _unfit(error.message) from error
        except (UnicodeEncodeError, OverflowError) as error:
            fault = find_fault(grant) or "request_id is not Unicode text: it holds half of a surrogate pair"
            raise _unfit(fault) from error
        # Take the slot only after every check: an offer that fails must not cost a slot.
        if oldest is None:
            self._free.pop()
        else:
            del self._kept[oldest], self._slots[oldest]
        self._slots[request_id] = grant.slot
        if kind == "kept":
            self._kept[request_id] = None
        self._epoch += EPOCH_STEP
        return ticket, grant

    def _contents(
        self,
        digests: Sequence[Sequence[bytes]],
        block_ids: tuple[tuple[int, ...], ...],
        tokens: tuple[int, ...],
        kind: Kind,
        *,
        chained: bool,
    ) -> tuple[Content, ...] | None:
        if len(self._block_sizes) != len(block_ids):
            raise ConfigInvalid(
                f"block_sizes of the mint has length {len(self._block_sizes)} for {counted(len(block_ids), 'group')}",
                remedy="Create the mint with block_sizes, one for each group, to offer digests.",
            )
        if kind == "open":
            complete = complete_digests(digests, self._block_sizes, tokens)
            return tuple(map(Content, self._block_sizes, map(_from_last, complete))) if complete else None
        lists = as_digest_lists("digests", digests, block_ids)
        for group, (found, ids) in enumerate(zip(lists, block_ids, strict=True)):
            if all(found):
                continue
            for at, (digest, block_id) in enumerate(zip(found, ids, strict=True)):
                if not digest and block_id >= 0:
                    remedy = "Pass empty bytes for absent blocks (-1) only."
                    raise ArgumentInvalid(f"digests[{group}][{at}]", "1 to 64 bytes", digest, remedy=remedy)
        contents = zip(self._block_sizes, lists, strict=True)
        return tuple(Content(size, _from_last(found) if chained else found) for size, found in contents)

    def vacate(self, request_ids: Iterable[str]) -> None:
        """Free the slots of leases that have ended on every rank. Their request ids stay taken until ``retire``."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)
            slot = self._slots.get(request_id, -1)
            self._slots[request_id] = -1
            if slot >= 0:
                self._free.append(slot)

    def retire(self, request_id: str) -> bool:
        """Free the slot and the request id of a lease that has ended on every rank. Return False if it is unknown."""
        is_known = request_id in self._slots
        self.vacate([request_id])
        del self._slots[request_id]
        return is_known


def _from_last(digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the digests from the last one that is not empty."""
    return next((digests[at:] for at in range(len(digests) - 1, -1, -1) if digests[at]), ())


def _drawn_trace(draw_bits: Callable[[int], int]) -> str:
    """Return a drawn trace context that is marked as sampled. An id of zeros would be invalid."""
    return f"00-{draw_bits(128) or 1:032x}-{draw_bits(64) or 1:016x}-01"


TOKENS_REMEDY = "Give one number of tokens, at least 1, or one per group."

_REMEDIES = {
    "num_tokens": TOKENS_REMEDY,
    "request_id": "Choose a request_id that is Unicode text of 1 to 256 characters.",
    "contents": "Pass shorter digests, such as those of SHA-256.",
}
"""By the field of a grant that a fault names first."""


def _unfit(fault: str) -> BlockIdsInvalid:
    remedy = next((told for field, told in _REMEDIES.items() if fault.startswith(field)), "")
    return BlockIdsInvalid(f"a ticket cannot hold the offer: {fault}", remedy=remedy)


def _as_tokens(num_tokens: int | Sequence[int], num_groups: int) -> tuple[int, ...]:
    """Return one number of tokens per group as Python's integers. Accept those of NumPy; refuse fractions and text."""
    try:
        if isinstance(num_tokens, int | np.integer):
            tokens = (int(num_tokens),) * num_groups
        else:
            tokens = tuple(map(int, map(index, num_tokens)))
    except TypeError as error:
        fault = f"num_tokens must be an integer, not {shown(num_tokens)}"
        raise BlockIdsInvalid(fault, remedy=TOKENS_REMEDY) from error
    if min(tokens, default=1) < 1:
        raise BlockIdsInvalid(f"num_tokens must be at least 1, not {num_tokens!r}", remedy=TOKENS_REMEDY)
    if len(tokens) != num_groups:
        fault = f"num_tokens has {len(tokens)} numbers for {counted(num_groups, 'group')}"
        raise BlockIdsInvalid(fault, remedy=TOKENS_REMEDY)
    return tokens
