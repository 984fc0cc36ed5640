"""Tickets: a producer creates one per request, and a router carries it without reading it.

A ticket is one or more *grants*. A grant is one signed promise of some ranks of one engine. A mint signs one grant for
all ranks, and ``worker.offer`` signs one for its own rank. ``join_tickets`` joins several into one ticket.

The text of a ticket is one ASCII string, which no router changes: ``kvf3``, then for each grant a dot and the base64url
of its MAC, the fingerprint of the cluster secret, and the grant in msgpack. A reader checks the MAC before it decodes
anything.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeGuard, get_args

import msgspec
from msgspec import Meta, Struct

from kvflow.addresses import host_and_port
from kvflow.errors import ReleaseMismatch, TicketInvalid, counted, quoted
from kvflow.ids import ABSENT, FEW_IDS, PeerId
from kvflow.leases.blocks import NUM_BLOCKS_MAX, block_ends, blocks_for, count_runs, expand_runs, runs_of
from kvflow.validation import find_fault

FORMAT = "kvf3"  # changes when an older release must not read a ticket
ANOTHER_FORMAT = re.compile(r"kvf[0-9]{1,4}")
"""Other releases. The first ones used a JSON object with a list of grants instead."""

TICKET_CHARS_MAX = 8 << 20
"""One million tokens in blocks of 16 take at most 440,000 characters per group. Decoding 8 Mi characters and checking
their MAC takes about 33 ms. An engine that knows its longest prompt sets a lower limit."""

BLOCKS_MAX = 1 << 21
"""Blocks of one ticket: as many as 8 Mi characters can list one by one. A run of them takes a few bytes."""

UNSIGNED_BLOCKS_MAX = 1 << 19
"""The same while nobody has checked the signature: decoding them takes no longer than decoding 8 Mi characters."""

RUN_MAX = 1 << 20
GRANTS_MAX = 1024
RANKS_KEPT_BYTES_MAX = 4096  # encodings of ranks that are cached: about two dozen ranks

MAC_BYTES = 32  # HMAC-SHA256
MARK = b"\x03"  # first byte after the MAC
FINGERPRINT_BYTES = 8
HEAD_BYTES = len(MARK) + FINGERPRINT_BYTES
DIGEST_BYTES_MAX = 64

Kind = Literal["offer", "kept", "open"]
ShortName = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
AnyEndpoint = Annotated[str, Meta(min_length=1, max_length=512, pattern="^[a-z]+://")]
EpochNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
BlockId = Annotated[int, Meta(ge=ABSENT, lt=NUM_BLOCKS_MAX)]
BlockIds = Annotated[tuple[BlockId, ...], Meta(max_length=RUN_MAX)]
Runs = Annotated[tuple[Annotated[int, Meta(ge=-RUN_MAX, lt=NUM_BLOCKS_MAX)], ...], Meta(max_length=RUN_MAX)]
NumTokens = Annotated[int, Meta(ge=1, le=1 << 40)]
BlockSize = Annotated[int, Meta(ge=0, le=1 << 30)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
GroupDigests = Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]

TRACEPARENT = "^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\\Z"
"""W3C trace context, version 00: trace id, span id, flags."""

Traceparent = Annotated[str, Meta(pattern=TRACEPARENT, description="a traceparent of W3C trace context, version 00")]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
WallTimeMs = Annotated[int, Meta(ge=0, le=1 << 52)]
RankKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}\\Z")]

OVERDUE_S = 1.0  # a lease that seems over for longer is checked before the read. Earlier, reading is cheaper.

SAME_LIMITS = "Offer fewer blocks at once. With vLLM, give both engines the same max_model_len and block size."
TOO_MANY = f"the ticket has more than {BLOCKS_MAX} blocks, or {UNSIGNED_BLOCKS_MAX} before a check of its signature"
FEWER = "Offer fewer blocks at once, or pass verify to Ticket.from_params."
MALFORMED = "the ticket is malformed: it was cut or changed on its way"
JOIN = "Join one ticket per rank, all from offers of one engine with the same request_id and num_tokens."
UNSIGNED = "the ticket has a wrong signature: it was changed on its way, or signed with another cluster secret"

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


def is_traceparent(value: object) -> TypeGuard[str]:
    """Return whether an offer can carry a value as its ``traceparent``: a header of W3C trace context, version 00."""
    return isinstance(value, str) and re.match(TRACEPARENT, value) is not None


class RankAddress(Struct, frozen=True, cache_hash=True, gc=False, array_like=True):
    """Address and incarnation of one rank of a producer.

    Attributes:
        rank: number of the rank in its engine.
        incarnation: random id, drawn when the worker starts.
        endpoint: its control endpoint, as peers reach it.
        epoch_base: the lowest epoch of this incarnation; a mint starts above it.
        slots: number of slots in its epoch table.
        public_key: the key that its control endpoint proves to hold; None if the worker does not state one.
    """

    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    incarnation: Incarnation
    endpoint: AnyEndpoint
    epoch_base: EpochNumber = 0
    slots: Annotated[int, Meta(ge=1, le=1 << 24)] = 1
    public_key: RankKey | None = None


Ranks = Annotated[tuple[RankAddress, ...], Meta(min_length=1, max_length=1024)]


class Member(Struct, frozen=True, gc=False):
    """One rank that a ticket names, and the lease on that rank."""

    engine_id: str
    address: RankAddress
    grant: "Grant"

    @property
    def peer(self) -> PeerId:
        """Identity of the rank in this incarnation, at this endpoint, with this key."""
        return _peer_of(self.engine_id, self.address)


@lru_cache(maxsize=1024)
def _peer_of(engine_id: str, address: RankAddress) -> PeerId:
    return PeerId(engine_id, address.rank, address.incarnation, address.endpoint, address.public_key or "")


class Content(Struct, frozen=True, gc=False, array_like=True):
    """What the blocks of one group hold. A reader compares it with what it expects.

    Attributes:
        block_size: tokens in one block; 0 for a state.
        digests: those of the last blocks of the grant, in the same order; empty bytes for an absent block. Equal
            digests mean equal blocks: each covers all tokens up to the end of its block, and everything else that
            determines keys and values. kvflow only compares them. If they are chained, only the last one is here.
    """

    block_size: BlockSize
    digests: GroupDigests

    def ends(self, num_tokens: int) -> list[int]:
        """Return the end of each block that has a digest (one past its last token), for so many tokens."""
        return block_ends(len(self.digests), self.block_size, num_tokens)


class LeaseName(Struct, frozen=True, gc=False):
    """One lease of a peer, and the proof that this worker may read under it.

    Attributes:
        slot: its index in the peer's epoch table.
        epoch: value of the slot while the lease is held. A lower value: not admitted yet. A higher value: ended.
        mac: MAC of its ticket, which a producer that serves reads requires.
    """

    slot: Annotated[int, Meta(ge=0, le=1 << 24)]
    epoch: EpochNumber
    mac: Annotated[bytes, Meta(max_length=MAC_BYTES)] = b""


class Grant(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """One signed promise: these ranks keep these blocks while the slot holds this epoch.

    Attributes:
        kind: ``offer``; ``kept``: only the producer ends it; ``open``: blocks settle while it lasts. Others: refused.
        engine_id: the producer.
        request_id: the producer's name of the request.
        ranks: every rank that holds a share of the blocks.
        slot: index into each rank's epoch table.
        epoch: the value of the slot while the promise lasts.
        block_ids: one list per group, in the producer's order of groups; if it is open, those that are told so far.
        num_tokens: tokens of the request, one number per group.
        lease_ms: how long the promise lasts after admission unless renewed. It is a hint; the fence decides.
        admitted: whether the lease was held before the ticket was handed out. If not, a reader checks the epoch before
            it reads, because bytes from before the admission may belong to another request.
        issued_ms: when it was signed, in milliseconds since 1970 on the signer's clock. It is a hint.
        contents: what the blocks hold, one entry per group; None if the offer had no digests.
        traceparent: W3C trace context of the request; None if the offer had none.
    """

    kind: Kind = "offer"
    engine_id: ShortName
    request_id: ShortName
    ranks: Ranks
    slot: Annotated[int, Meta(ge=0, le=1 << 24)]
    epoch: EpochNumber
    block_ids: Annotated[tuple[BlockIds, ...], Meta(min_length=1, max_length=256)]
    num_tokens: Annotated[tuple[NumTokens, ...], Meta(min_length=1, max_length=256)]
    lease_ms: Milliseconds
    admitted: bool
    issued_ms: WallTimeMs | None = None
    contents: Annotated[tuple[Content, ...], Meta(min_length=1, max_length=256)] | None = None
    traceparent: Traceparent | None = None

    def __repr__(self) -> str:
        """Return the engine, the request and the amount."""
        held = f"{counted(len(self.ranks), 'rank')}, {_amount(self)}, slot {self.slot}, {self.lease_s:g} s"
        return f"<Grant {quoted(self.request_id)} of {quoted(self.engine_id)}: {held}>"

    @property
    def ends_by_readers(self) -> bool:
        """Whether the lease ends when its readers have released it, or it runs out; otherwise its producer ends it."""
        return self.kind != "kept"

    @property
    def found_by_all(self) -> bool:
        """Whether all who ask for the content find the lease; otherwise one question at a time may."""
        return self.kind == "kept"

    @property
    def is_open(self) -> bool:
        """Whether its producer tells blocks, and what has settled, while the lease is held."""
        return self.kind == "open"

    @property
    def lease_s(self) -> float:
        """How long the promise lasts from admission, in seconds."""
        return self.lease_ms / 1000

    @property
    def trace(self) -> str:
        """The W3C trace context of the request; empty if the producer did not say."""
        return self.traceparent or ""

    @property
    def issued_at(self) -> float | None:
        """When it was signed, in seconds since 1970 on the signer's clock; None if it does not say."""
        return None if self.issued_ms is None else self.issued_ms / 1000

    def payload(self, fingerprint: bytes) -> bytes:
        """Return what a member signs whose cluster secret has this fingerprint: that, and the grant in msgpack."""
        grant = self
        if max(map(len, self.block_ids), default=0) > FEW_IDS:
            grant = msgspec.structs.replace(self, block_ids=tuple(map(runs_of, self.block_ids)))
        return MARK + fingerprint + _encoder.encode(grant)

    def signed(self, sign: Sign, fingerprint: bytes) -> bytes:
        """Return the grant as a ticket carries it: its MAC and its payload; raise if no reader could decode it."""
        payload = self.payload(fingerprint)
        try:
            _decode_ranks(bytes(_runs_decoder.decode(payload[HEAD_BYTES:]).ranks))
        except msgspec.DecodeError as error:
            fault = find_fault(self) or str(error)
            raise TicketInvalid(fault) from error
        if sum(map(len, self.block_ids)) > BLOCKS_MAX:
            raise TicketInvalid(TOO_MANY, remedy=FEWER)
        self.require_consistent()
        return sign(payload) + payload

    def require_consistent(self) -> None:
        """Check that the fields match each other; raise ``TicketInvalid``."""
        if len(self.num_tokens) != len(self.block_ids):
            raise TicketInvalid(f"{len(self.num_tokens)} token counts for {len(self.block_ids)} groups")
        if self.contents is None:
            return
        if len(self.contents) != len(self.block_ids):
            raise TicketInvalid(f"{len(self.contents)} contents for {len(self.block_ids)} groups")
        for group, (content, ids, tokens) in enumerate(
            zip(self.contents, self.block_ids, self.num_tokens, strict=True)
        ):
            most = blocks_for(tokens, content.block_size)
            if len(content.digests) > (most if self.is_open else len(ids)) or len(ids) > most:
                raise TicketInvalid(
                    f"group {group}: {len(content.digests)} digests and {len(ids)} blocks for {tokens} tokens, "
                    f"which {most} blocks hold"
                )

    def seems_over(self, wall_s: float, error_s: float) -> bool:
        """Return whether an offer has run out unless it was renewed, by the producer's clock of this largest error.

        This is a reason to check the lease before the read, but not to refuse the ticket, because only the check knows.
        """
        issued_ms = self.issued_ms if self.kind == "offer" else None
        return issued_ms is not None and wall_s - error_s - OVERDUE_S > (issued_ms + self.lease_ms) / 1000


class _Received(Grant, frozen=True, kw_only=True, array_like=True):
    """A grant whose ranks are not decoded."""

    ranks: msgspec.Raw  # type: ignore[assignment]


class _InRuns(_Received, frozen=True, kw_only=True, array_like=True):
    """Likewise, with runs among its block ids."""

    block_ids: Annotated[tuple[Runs, ...], Meta(min_length=1, max_length=256)]


def grant_of(signed: bytes, room: int = BLOCKS_MAX) -> Grant:
    """Decode a grant of a ticket, whose MAC the caller checks first. ``room``: blocks that other grants leave.

    Raises:
        TicketInvalid: it is malformed, or exceeds a limit, which the error names.
        ReleaseMismatch: it is of a kind that only newer releases know.
    """
    payload = signed[MAC_BYTES:]
    if not payload.startswith(MARK):
        raise TicketInvalid(MALFORMED)
    try:
        grant = _decode(payload, room)
    except msgspec.ValidationError as error:
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            kind = _kind_decoder.decode(payload[HEAD_BYTES:]).kind
            if kind not in get_args(Kind):
                raise ReleaseMismatch("the ticket", "kind", kind, " or ".join(get_args(Kind))) from error
        remedy = SAME_LIMITS if "length" in str(error) else ""
        raise TicketInvalid(f"{MALFORMED}, or exceeds a limit of this release: {error}", remedy=remedy) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TicketInvalid(MALFORMED) from error
    grant.require_consistent()
    return grant


def fingerprint_of(payload: bytes) -> bytes:
    """Return the fingerprint of the secret that signed a payload, as the payload says."""
    return payload[len(MARK) : HEAD_BYTES]


def _decode(payload: bytes, room: int) -> Grant:
    """Decode a grant. Cache the ranks, which are equal in all grants of an engine and take half of the time."""
    try:
        found = _decoder.decode(payload[HEAD_BYTES:])
    except msgspec.ValidationError:
        found = _runs_decoder.decode(payload[HEAD_BYTES:])
        if sum(map(count_runs, found.block_ids)) > room:
            raise TicketInvalid(TOO_MANY, remedy=FEWER) from None
        found = msgspec.structs.replace(found, block_ids=tuple(map(expand_runs, found.block_ids)))
    decode_ranks = _decode_ranks if len(found.ranks) <= RANKS_KEPT_BYTES_MAX else _ranks_decoder.decode
    return Grant(**msgspec.structs.asdict(found) | {"ranks": decode_ranks(bytes(found.ranks))})


@lru_cache(maxsize=256)
def _decode_ranks(encoded: bytes) -> Ranks:
    return _ranks_decoder.decode(encoded)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Received)
_runs_decoder = msgspec.msgpack.Decoder(_InRuns)
_ranks_decoder = msgspec.msgpack.Decoder(Ranks)
_kind = msgspec.defstruct("_Kind", [("kind", Annotated[str, Meta(max_length=32)])], array_like=True)
_kind_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_kind)


def _amount(grant: Grant) -> str:
    blocks, tokens = sum(map(len, grant.block_ids)), max(grant.num_tokens)
    return f"{counted(blocks, 'block')} in {counted(len(grant.block_ids), 'group')}, {counted(tokens, 'token')}"


class Ticket(Struct, frozen=True, kw_only=True, weakref=True):
    """What a consumer needs to read one request's blocks. Opaque to routers.

    Attributes:
        grants: signed promises; all of one engine and request.
        signed: the same grants as a router carries them, each with its MAC.
    """

    grants: tuple[Grant, ...]
    signed: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not self.grants or len(self.grants) != len(self.signed):
            raise TicketInvalid(f"a ticket has {len(self.grants)} grants, of which {len(self.signed)} are signed")

    def __repr__(self) -> str:
        """Return the request, the engine and the amount, without the signatures."""
        ranks = counted(sum(len(grant.ranks) for grant in self.grants), "rank")
        return f"<Ticket {quoted(self.request_id)} of {quoted(self.engine_id)}: {ranks}, {_amount(self.grants[0])}>"

    @property
    def request_id(self) -> str:
        """The producer's name of the request."""
        return self.grants[0].request_id

    @property
    def engine_id(self) -> str:
        """The producer."""
        return self.grants[0].engine_id

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """The fingerprint of the secret that signed each grant."""
        return tuple([fingerprint_of(signed[MAC_BYTES:]) for signed in self.signed])

    def members(self) -> Iterator[Member]:
        """Yield every rank that the ticket names."""
        for grant in self.grants:
            for address in grant.ranks:
                yield Member(grant.engine_id, address, grant)

    def verify(self, verify: Verify) -> None:
        """Check every MAC.

        Raises:
            TicketInvalid: a grant was not signed with the cluster's secret, or differs from what was signed.
        """
        for grant, signed in zip(self.grants, self.signed, strict=True):
            payload = signed[MAC_BYTES:]
            if not verify(payload, signed[:MAC_BYTES]):
                raise TicketInvalid(UNSIGNED)
            # Use what was signed, even if the ticket was made in this process. A newer release may have signed more
            # fields than the grant has.
            if (
                _encoder.encode(grant) != payload[HEAD_BYTES:]
                and grant_of(signed) != grant  # before runs are made again, which takes longer
                and grant.payload(fingerprint_of(payload)) != payload
            ):
                raise TicketInvalid("the ticket was changed after it was signed")

    def to_params(self) -> dict[str, str]:
        """Return a JSON-safe dict for a router (``kv_transfer_params``)."""
        texts = (base64.urlsafe_b64encode(signed).rstrip(b"=").decode("ascii") for signed in self.signed)
        return {"kvflow": ".".join((FORMAT, *texts))}

    def router_facts(self) -> dict[str, Any]:
        """Return what routers know of a ticket, under their names; TicketInvalid if its endpoint is malformed."""
        grant = self.grants[0]
        endpoint = grant.ranks[0].endpoint
        try:
            host, port = host_and_port(endpoint)
        except ValueError as error:
            raise TicketInvalid(f"the endpoint in the ticket must be tcp://HOST:PORT, not {endpoint!r}") from error
        return {
            "remote_engine_id": grant.engine_id,
            "remote_request_id": grant.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": sum([len(each.ranks) for each in self.grants]),
            "remote_num_tokens": max(grant.num_tokens),
        }

    def to_router_params(self) -> dict[str, Any]:
        """Return ``to_params`` with all that routers of vLLM's engines read: ``kv_transfer_params`` of an answer.

        ``kvflow.routing.read_params`` reads it, and needs ``do_remote_prefill`` and the ticket alone.

        Raises:
            TicketInvalid: its endpoint is malformed.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **self.router_facts(),
            "remote_block_ids": [list(ids[-1:]) for ids in self.grants[0].block_ids],  # routers see that there are some
            "dcp_size": 1,
            "pp_size": 1,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            **self.to_params(),
        }

    @staticmethod
    def from_params(params: object, *, verify: Verify | None = None, chars_max: int = TICKET_CHARS_MAX) -> "Ticket":
        """Read a ticket back.

        Args:
            params: the dict of ``to_params``; other entries are ignored.
            verify: checks a MAC, before anything is decoded. Without it, do not trust the contents of the ticket;
                ``worker.pull`` checks the MAC before it connects to a peer.
            chars_max: longest ticket that is read; ``TICKET_CHARS_MAX`` at most.

        Raises:
            TicketInvalid: the parameters are too long, truncated, malformed, or not signed; says which.
            ReleaseMismatch: the ticket has the format of another release, or is of a kind that only others know.
        """
        if not isinstance(params, dict) or "kvflow" not in params:
            raise TicketInvalid("kv_transfer_params is not an object with a 'kvflow' entry")
        signed = _read_text(params["kvflow"], min(chars_max, TICKET_CHARS_MAX))
        if verify is not None and not all(verify(each[MAC_BYTES:], each[:MAC_BYTES]) for each in signed):
            raise TicketInvalid(UNSIGNED)
        grants: list[Grant] = []
        room = UNSIGNED_BLOCKS_MAX if verify is None else BLOCKS_MAX
        for each in signed:
            grants.append(grant_of(each, room))
            room -= sum(map(len, grants[-1].block_ids))
        return _checked(tuple(grants), signed)


def lease_name(ticket: Ticket, index: int) -> LeaseName:
    """Return how reads and questions name the lease of a grant, by the index of the grant in its ticket."""
    grant = ticket.grants[index]
    return LeaseName(grant.slot, grant.epoch, ticket.signed[index][:MAC_BYTES])


def join_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """Join the offers of all ranks of one engine into one ticket.

    Raises:
        TicketInvalid: they are of different engines or requests, or name a rank twice.
    """
    if not tickets:
        raise TicketInvalid("there is no ticket to join", remedy=JOIN)
    grants = tuple(grant for ticket in tickets for grant in ticket.grants)
    return _checked(grants, tuple(signed for ticket in tickets for signed in ticket.signed))


def _read_text(text: object, chars_max: int) -> tuple[bytes, ...]:
    if not isinstance(text, str):
        raise TicketInvalid(f"the 'kvflow' entry of the parameters must be text, not {type(text).__name__}")
    if len(text) > chars_max:
        raise TicketInvalid(
            f"the ticket has {len(text)} characters: at most {chars_max} are allowed", remedy=SAME_LIMITS
        )
    head, *parts = text.split(".", GRANTS_MAX + 1)
    if head != FORMAT:
        if ANOTHER_FORMAT.fullmatch(head):
            raise ReleaseMismatch("the ticket", "ticket format", head, FORMAT)
        raise TicketInvalid(f"the ticket begins with {head[:16]!r}: expected {FORMAT!r}")
    if not parts:
        raise TicketInvalid("the ticket has no grants")
    if len(parts) > GRANTS_MAX:
        raise TicketInvalid(f"the ticket has too many grants: at most {GRANTS_MAX} are allowed", remedy=JOIN)
    return tuple([_read_part(part) for part in parts])


def _read_part(part: str) -> bytes:
    try:
        padded = part.replace("-", "+").replace("_", "/") + "=" * (-len(part) % 4)
        signed = binascii.a2b_base64(padded, strict_mode=True)
    except (binascii.Error, ValueError) as error:  # the latter for text that is not ASCII
        raise TicketInvalid(MALFORMED) from error
    if len(signed) <= MAC_BYTES + HEAD_BYTES:
        raise TicketInvalid("the ticket is malformed: a grant is truncated")
    return signed


def _checked(grants: tuple[Grant, ...], signed: tuple[bytes, ...]) -> Ticket:
    if len(grants) == len(grants[0].ranks) == 1:
        return Ticket(grants=grants, signed=signed)
    names = {(grant.engine_id, grant.request_id, grant.kind) for grant in grants}
    if len(names) != 1:
        raise TicketInvalid(f"the tickets are of different engines or requests: {sorted(names)[:4]}", remedy=JOIN)
    tokens = {grant.num_tokens for grant in grants}
    # A pipeline stage may have fewer groups than another one.
    most = max(tokens, key=len)
    if any(set(each) - set(most) or (len(each) == len(most) and each != most) for each in tokens):
        raise TicketInvalid(f"the tickets are for different numbers of tokens: {sorted(tokens)[:4]}", remedy=JOIN)
    ranks = sorted(address.rank for grant in grants for address in grant.ranks)
    twice = [rank for rank, after in pairwise(ranks) if rank == after]
    if twice:
        raise TicketInvalid(f"rank {twice[0]} is in two of the tickets", remedy=JOIN)
    return Ticket(grants=grants, signed=signed)
