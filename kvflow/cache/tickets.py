"""Tickets: what a producer hands out for one request, and a router carries opaquely.

A ticket is one or more *grants*. A grant is one signed promise of some ranks of one engine; a mint signs one
grant for all ranks, ``worker.offer`` one for its own rank, and ``join_tickets`` puts several together.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvflow.errors import TicketInvalid
from kvflow.ids import PeerId

TICKET_VERSION = 1

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Endpoint = Annotated[str, Meta(min_length=1, max_length=512, pattern="^[a-z]+://")]
# An epoch crosses JSON and msgpack, and JavaScript routers keep 53 bits of a number: it travels as text.
Epoch = Annotated[str, Meta(pattern="^[0-9]{1,19}$")]
BlockId = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
BlockIds = Annotated[tuple[BlockId, ...], Meta(max_length=1 << 20)]
NumTokens = Annotated[int, Meta(ge=1, le=1 << 40)]

WallTime = Annotated[float, Meta(ge=0, le=2**40)]
PublicKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

OVERDUE_S = 1.0
"""How long after its end a ticket is asked about: reading on is cheaper for those that are admitted a little late."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


class RankAddress(Struct, frozen=True):
    """Where one rank of a producer is, and which life of it.

    Attributes:
        rank: of the engine.
        incarnation: drawn at the start of the worker.
        endpoint: its control endpoint, as peers reach it.
        epoch_base: no epoch below this one was used in this incarnation; a mint starts above it.
        slots: slots of its epoch table.
        public_key: that its control endpoint proves to hold; absent from workers that do not say.
    """

    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    incarnation: Incarnation
    endpoint: Endpoint
    epoch_base: Epoch = "0"
    slots: Annotated[int, Meta(ge=1, le=1 << 24)] = 1
    public_key: PublicKey | UnsetType = UNSET


class Member(Struct, frozen=True):
    """One rank that a ticket names, with its lease there."""

    engine_id: str
    address: RankAddress
    grant: "Grant"

    @property
    def peer(self) -> PeerId:
        """Identity of the rank in this life, at this endpoint, with this key."""
        address = self.address
        public_key = "" if isinstance(address.public_key, UnsetType) else address.public_key
        return PeerId(self.engine_id, address.rank, address.incarnation, address.endpoint, public_key)


class Grant(Struct, frozen=True, kw_only=True):
    """One signed promise: these ranks keep these blocks while the slot holds this epoch.

    Attributes:
        version: of the grant's own format.
        engine_id: the producer.
        request_id: the producer's name of the request.
        ranks: every rank that holds a share of the blocks.
        slot: index into each rank's epoch table.
        epoch: what the slot holds while the promise lasts, in decimal.
        block_ids: one list per group, in the producer's order of groups.
        num_tokens: tokens of the request, one number per group.
        lease_s: how long the promise lasts from admission unless renewed: a hint, the fence decides.
        admitted: whether the promise was being kept before the ticket was handed out. If not, a reader looks before it
            reads: bytes that it reads before the admission may be those of another request.
        issued_at: when it was signed, in seconds since 1970 on the clock of whoever signed: only a hint.
        mac: hexadecimal HMAC-SHA256 over all other fields.
    """

    version: Annotated[int, Meta(ge=1, le=255)] = TICKET_VERSION
    engine_id: Name
    request_id: Name
    ranks: Annotated[tuple[RankAddress, ...], Meta(min_length=1, max_length=1024)]
    slot: Annotated[int, Meta(ge=0, le=1 << 24)]
    epoch: Epoch
    block_ids: Annotated[tuple[BlockIds, ...], Meta(min_length=1, max_length=256)]
    num_tokens: Annotated[tuple[NumTokens, ...], Meta(min_length=1, max_length=256)]
    lease_s: Annotated[float, Meta(gt=0, le=86400)]
    admitted: bool
    issued_at: WallTime | UnsetType = UNSET
    mac: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""

    @property
    def epoch_value(self) -> int:
        """The epoch as a number."""
        return int(self.epoch)

    def signed(self, sign: Sign) -> "Grant":
        """Return a copy with its MAC."""
        return msgspec.structs.replace(self, mac=sign(self._payload()).hex())

    def verify(self, verify: Verify) -> None:
        """Check the version, the MAC, and what relates the fields to each other.

        Raises:
            TicketInvalid: the grant is of another version, or was not signed with the cluster's secret.
        """
        if self.version != TICKET_VERSION:
            # Before the MAC: fields that this release does not know are lost by now, and no MAC would fit.
            raise TicketInvalid(
                f"the grant of {self.engine_id!r} has version {self.version}, this release reads {TICKET_VERSION}",
                remedy="Run the same release of kvflow on both sides.",
            )
        try:
            payload = self._payload()
        except UnicodeEncodeError as error:  # JSON can carry half a surrogate pair, which no mint can have signed
            raise TicketInvalid(f"the grant has text that is not Unicode: {error}") from error
        if not self.mac or not verify(payload, bytes.fromhex(self.mac)):
            raise TicketInvalid(f"the grant of {self.engine_id!r} for {self.request_id!r} has a wrong signature")
        if len(self.num_tokens) != len(self.block_ids):
            raise TicketInvalid(f"{len(self.num_tokens)} token counts for {len(self.block_ids)} groups")

    def seems_over(self, wall_s: float, error_s: float) -> bool:
        """Tell whether the promise has run out, if nobody has renewed it and the clocks are right.

        That is worth a question to the producer, and no reason to refuse the ticket: only the producer knows.

        Args:
            wall_s: seconds since 1970 on the producer's clock.
            error_s: by how much that may be wrong.
        """
        if isinstance(self.issued_at, UnsetType):
            return False
        return wall_s - self.issued_at > self.lease_s + error_s + OVERDUE_S

    def _payload(self) -> bytes:
        return _encoder.encode(msgspec.structs.replace(self, mac=""))


_encoder = msgspec.msgpack.Encoder()


class Ticket(Struct, frozen=True, kw_only=True):
    """What a consumer needs to read one request's blocks. Opaque to routers.

    Attributes:
        grants: signed promises; all of one engine and request.
    """

    grants: Annotated[tuple[Grant, ...], Meta(min_length=1, max_length=1024)]

    @property
    def request_id(self) -> str:
        """The producer's name of the request."""
        return self.grants[0].request_id

    @property
    def engine_id(self) -> str:
        """The producer."""
        return self.grants[0].engine_id

    def members(self) -> Iterator[Member]:
        """Yield every rank that the ticket names."""
        for grant in self.grants:
            for address in grant.ranks:
                yield Member(grant.engine_id, address, grant)

    def to_params(self) -> dict[str, Any]:
        """Return a JSON-safe dict for a router (``kv_transfer_params``)."""
        return {"kvflow": msgspec.to_builtins(self)}

    @staticmethod
    def from_params(params: object) -> "Ticket":
        """Read a ticket back. Its signatures are checked by ``worker.pull``, before anything is dialled.

        Raises:
            TicketInvalid: the parameters are truncated or malformed; says where.
        """
        if not isinstance(params, dict) or "kvflow" not in params:
            raise TicketInvalid("the parameters have no 'kvflow' entry")
        try:
            ticket = msgspec.convert(params["kvflow"], type=Ticket)
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
            raise TicketInvalid(f"the ticket is malformed: {error}") from error
        return _checked(ticket)


def join_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """Join the offers of all ranks of one engine into one ticket.

    Raises:
        TicketInvalid: they are of different engines or requests, or name a rank twice.
    """
    if not tickets:
        raise TicketInvalid("there is no ticket to join")
    return _checked(Ticket(grants=tuple(grant for ticket in tickets for grant in ticket.grants)))


def _checked(ticket: Ticket) -> Ticket:
    names = {(grant.engine_id, grant.request_id) for grant in ticket.grants}
    if len(names) != 1:
        raise TicketInvalid(f"the grants are of different engines or requests: {sorted(names)[:4]}")
    tokens = {grant.num_tokens for grant in ticket.grants}
    # A pipeline stage may have fewer groups than another one.
    most = max(tokens, key=len)
    if any(set(each) - set(most) or (len(each) == len(most) and each != most) for each in tokens):
        raise TicketInvalid(f"the grants are of different numbers of tokens: {sorted(tokens)[:4]}")
    ranks = [address.rank for grant in ticket.grants for address in grant.ranks]
    if len(set(ranks)) != len(ranks):
        raise TicketInvalid("a rank is named twice")
    return ticket
