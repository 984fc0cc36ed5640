"""Connections that this process dials: to a producer rank, to read from it, or to a worker, to look at it."""

import asyncio
import math
import secrets
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

from msgspec import Struct, UnsetType

from handshake import ClockOffset, ClusterSecurity, HandshakeClient, Identity, Limits, open_client
from handshake.errors import CloseCode, Closed, HandshakeError, LocalProtocolError, WrongServer
from handshake.limits import LEASES_MAX, QUESTIONS_MAX
from handshake.messages import (
    QUESTION_BYTES_MAX,
    Answered,
    Ask,
    ConnectionClosed,
    ConnectionFailed,
    HandshakeEvent,
    LeaseAnswer,
    LeaseRef,
    Release,
    Renew,
    RenewAnswered,
)
from handshake.rates import Bucket
from kvflow.config import WorkerConfig
from kvflow.errors import (
    ArgumentInvalid,
    CapacityExceeded,
    DeadlineExceeded,
    FailureCode,
    PeerLost,
    ProtocolViolation,
    ReleaseMismatch,
    StaleLease,
    TicketInvalid,
    quoted,
)
from kvflow.ids import LeaseKey, PeerId, agent_name
from kvflow.leases.tickets import DIGEST_BYTES_MAX, Grant, LeaseName, Ticket
from kvflow.leases.told import END_BYTES
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import (
    READER,
    ZEROMQ,
    Advertisement,
    LocalEndpoint,
    Network,
    as_kvflow_error,
    decode,
    security_of,
)
from kvflow.rendezvous.issuer import TicketKey
from kvflow.rendezvous.questions import AskHeld, AskKept, AskSettled, Settled, Withdraw
from kvflow.version import __version__

UNREAD_REMEDY = "Recompute the prompt. If routers pass tickets on late, raise unread_s of the producer, or its blocks."


class LeaseEnd(Struct, frozen=True):
    """How a lease has ended, as of ``StaleLease``, and how many seconds ago, if its producer says so."""

    ended_by: str = "unknown"
    ended_s: float | None = None

    @property
    def words(self) -> str:
        """The end of a sentence about the lease."""
        how = _ENDINGS.get(self.ended_by, self.ended_by)
        return how if self.ended_s is None else f"{how} {self.ended_s:.3f} s ago"

    @property
    def remedy(self) -> str:
        """What to do about it; empty if there is nothing but the usual."""
        return UNREAD_REMEDY if self.ended_by == "unread" else ""


_ENDINGS = {
    "expired": "it expired",
    "unread": "it had no reader yet when the producer ran short of blocks, and ended",
    "revoked": "the producer revoked it",
    "used": "it was used before, and released",
    "released": "a reader released it",
    "unknown": "it ended, reason unknown",
}


class Awaited:
    """Who waits for which answer: about a lease, or to the question with a nonce. Thread: the event loop."""

    def __init__(self, on_ended: Callable[[str, str], None]) -> None:
        self._waiting: dict[LeaseKey | int, list[asyncio.Future[Any]]] = {}
        self._on_ended = on_ended
        self._lost = ""  # why the connection has ended

    async def wait(self, key: LeaseKey | int, within_s: float) -> Any:
        """Wait for the next answer. Cancellation: safe.

        Raises:
            TimeoutError: it does not come in time.
            Closed: the connection has ended, before or meanwhile.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, [])
        waiting.append(future)
        if self._lost:
            self._resolve(key, None)
        try:
            async with asyncio.timeout(within_s):
                answer = await future
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]
        if answer is None:
            raise Closed(f"the connection has ended: {self._lost}")
        return answer

    def on_event(self, event: HandshakeEvent) -> None:
        """Give an answer to all who wait for it, and the end of the connection to everyone."""
        match event:
            case RenewAnswered(leases=answers):
                for each in answers:
                    if each.outcome != "held":  # which answers a renewal from before the end
                        self._resolve((each.slot, each.epoch), each)
            case Answered(nonce=nonce, answer=answer):
                self._resolve(nonce, answer)
            case ConnectionClosed(reason=reason):
                self._lose(FailureCode.PEER_CLOSED, reason)
            case ConnectionFailed(code=code, reason=reason):
                self._lose(FailureCode.PEER_LOST, f"{code}: {reason}")
            case _:
                pass

    def _resolve(self, key: LeaseKey | int, answer: LeaseAnswer | bytes | None) -> None:
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(answer)

    def _lose(self, code: str, reason: str) -> None:
        self._lost = reason or "no reason was given"
        for key in list(self._waiting):
            self._resolve(key, None)
        self._on_ended(code, reason)


PACE = 0.9
"""Share of the questions that a worker takes in a second: it would refuse an asker that exceeds them."""

PAUSE_S = 0.01  # of an asker that is faster

TOLD_S = 10.0  # that a question for what is kept waits: a silent worker is noticed a little later

WAIT_S_MAX = 86_400.0  # that a question may wait at the worker

DIGEST_SIZES = frozenset(range(1, DIGEST_BYTES_MAX + 1))
DIGESTS_REMEDY = "Pass one flat list, or one list per group, with the digest (1 to 64 bytes) of each block."

DIGESTS_MAX = 128  # of a question
WAITING_DIGESTS_MAX = 2000  # of one that waits, if they have at most 21 bytes
DIGEST_EXTRA_BYTES = 2  # of each, in msgpack
QUESTION_DIGESTS_BYTES = QUESTION_BYTES_MAX - 1024  # the rest of a question is small


class Asker:
    """A connection to a worker that is ready. Thread: the event loop."""

    def __init__(self, client: HandshakeClient, awaited: Awaited, *, endpoint: str, local: LocalEndpoint) -> None:
        self._client = client
        self._awaited = awaited
        self._local = local
        self._nonces = count(1)
        self._now = local.network.now
        self._pace = Bucket(PACE * local.limits.questions_per_s_max, self._now())
        self.endpoint = endpoint
        self.identity: Identity = client.identity
        self.wire_version = client.version
        self.manifest_schema = client.publication.schema
        self._advertisement: Advertisement | None = None

    @property
    def clock_offset(self) -> ClockOffset:
        """How far the worker's wall clock is ahead of ours."""
        return self._client.clock_offset

    async def ask(self, question: bytes, within_s: float) -> bytes:
        """Ask a question, no faster than a worker takes them, and return its answer.

        Cancellation: safe; the worker forgets the question.

        Raises:
            ArgumentInvalid: it has more than 48 KiB.
            CapacityExceeded: 1,024 questions to this worker have no answer.
            DeadlineExceeded: the answer does not come in time.
            PeerLost: the connection has ended.
        """
        if len(question) > QUESTION_BYTES_MAX:
            expected = f"at most {QUESTION_BYTES_MAX} bytes"
            raise ArgumentInvalid("question", expected, f"{len(question)} bytes", remedy="Ask for fewer blocks.")
        nonce = next(self._nonces)
        async with self._within(within_s):
            while not self._pace.take(1, self._now()):  # noqa: ASYNC110 - only time makes room
                await asyncio.sleep(PAUSE_S)
            try:
                self._client.send(Ask(nonce=nonce, question=question))
            except LocalProtocolError as error:
                raise CapacityExceeded(f"questions to {self.endpoint}", QUESTIONS_MAX) from error
            try:
                answer: bytes = await self._awaited.wait(nonce, within_s)
            except (asyncio.CancelledError, TimeoutError):
                self._withdraw(nonce)
                raise
        return answer

    def _withdraw(self, nonce: int) -> None:
        """Have the worker forget a question, unless it takes no more now: it then waits for as long as it said."""
        if self._pace.take(1, self._now()):
            with suppress(LocalProtocolError, Closed):
                self._client.send(Ask(nonce=next(self._nonces), question=questions.encode(Withdraw(nonce=nonce))))

    async def read_manifest(self) -> Advertisement:
        """Return what the worker publishes, checked; the same object each time. Raises as ``decode``."""
        if self._advertisement is None:
            how = {"peer": self.endpoint, "software": self.identity.software}
            self._advertisement = await asyncio.to_thread(decode, self._client.publication, **how)
        return self._advertisement

    async def held(
        self, digests: Sequence[bytes], within_s: float, *, wait_s: float = 0.0, at_least: int = 1
    ) -> tuple[Ticket | None, int]:
        """Ask which lease of the worker holds the longest prefix of this content. Cancellation: safe.

        Args:
            digests: of consecutive blocks of the first group, from the first token on, chained. Each has 1 to 64 bytes.
                Many are asked for in several questions, the last ones between two that the first has found or missed.
            within_s: seconds to wait for an answer that is given at once.
            wait_s: seconds that the worker may wait for such a lease, which may then be of any kind, not only kept. Of
                more than 2,000 digests, the last ones are asked for, and every second before them, or every third, ...
            at_least: fewer digests are of no use.

        Returns:
            The ticket, verified, and how many digests its lease holds; ``(None, 0)`` if none does.

        Raises:
            KvflowError: of ``claim``, and of ``Claim.read``.
            ArgumentInvalid: ``digests`` has something else than digests.
        """
        found, begin, end = None, 0, len(digests)
        while begin < end:
            question = ContentQuestion(digests[begin:end], wait_s=wait_s, at_least=max(1, at_least - begin))
            claim = await self.claim(question, within_s)
            if claim.count:
                found = claim.read(), begin + claim.count
            begin, end = begin + claim.rest.start, begin + claim.rest.stop
        return found or (None, 0)

    async def claim(self, question: "ContentQuestion", within_s: float) -> "Claim":
        """Ask a question once; ``within_s`` as in ``held``. Cancellation: safe.

        Raises:
            KvflowError: of ``ask``.
            CapacityExceeded: too many questions wait at the worker.
            ProtocolViolation: the answer is malformed.
        """
        answer = await self.ask(question.encoded, within_s + question.wait_s)
        held, places = questions.decode_answer(answer, peer=self.endpoint), question.places
        asked = max(1, held.count) if held.ticket else 0  # ``read`` refuses 0
        count = places[min(asked, len(places)) - 1] + 1 if asked else 0
        missed = places[asked] if asked < len(places) else question.num_digests
        rest = range(count, count if question.wait_s else missed)
        return Claim(count, rest, partial(self._read_ticket, question, held))

    def _read_ticket(self, question: "ContentQuestion", held: questions.AnswerHeld) -> Ticket:
        """Return the ticket in an answer, verified.

        Raises:
            ProtocolViolation: it is a bad ticket, that of another engine, or of another kind.
            ReleaseMismatch: it is of a newer kind.
        """
        try:
            ticket = TicketKey(self._local.security).read({"kvflow": held.ticket})
        except TicketInvalid as error:
            raise ProtocolViolation(
                f"the peer answered with a bad ticket: {error.message}", peer=self.endpoint
            ) from error
        engines = {grant.engine_id for grant in ticket.grants}
        may_find = question.wait_s > 0 or all(grant.found_by_all for grant in ticket.grants)
        is_ours = engines == {self.identity.engine_id} and may_find
        if not is_ours or not 0 < held.count <= len(question.places):
            detail = f"{ticket!r}, of which {held.count} digests were asked for"
            raise ProtocolViolation(f"the peer answered another question: {detail}", peer=self.endpoint)
        return ticket

    async def settled(
        self, leases: Sequence[LeaseName], *, known: Sequence[int], above: int, wait_s: float, within_s: float
    ) -> tuple[Settled, ...]:
        """Ask what has settled of each of these leases; the fields are those of ``AskSettled``. Cancellation: safe.

        ``within_s``: seconds to wait for an answer beyond ``wait_s``, for which the worker may wait.

        Raises:
            KvflowError: of ``ask``.
            CapacityExceeded: as ``held``.
            ProtocolViolation: the answer is malformed, or about another number of leases.
        """
        wait_ms = math.ceil(1e3 * wait_s)
        question = AskSettled(leases=tuple(leases), known=tuple(known), above=above, wait_ms=wait_ms)
        answer = await self.ask(questions.encode(question), within_s + wait_s)
        settled = questions.decode_settled(answer, peer=self.endpoint).leases
        if len(settled) != len(leases):
            raise ProtocolViolation(f"the peer answered about {len(settled)} leases", peer=self.endpoint)
        return settled

    async def follow_kept(self, within_s: float) -> "AsyncIterator[Told]":
        """Yield the ends of what the worker keeps, as ``PrefixReader.follow_kept``. Cancellation: safe.

        Raises:
            KvflowError: of ``ask``.
            CapacityExceeded: too many questions wait at the worker.
            ProtocolViolation: an answer is malformed.
        """
        since = begun = 0
        while True:
            question = AskKept(since=since, begun=begun, wait_ms=round(1e3 * TOLD_S))
            encoded = await self.ask(questions.encode(question), TOLD_S + within_s)
            answer = questions.decode_kept(encoded, peer=self.endpoint)
            if answer is None:
                return
            is_anew = not since or answer.begun != begun
            since, begun = answer.until, answer.begun
            yield Told(_split(answer.new), _split(answer.gone), is_anew, answer.is_all)

    async def ping(self, *, report: bool = False) -> tuple[float, bytes]:
        """Return the seconds of one round trip, and what the worker reports about itself if it is asked for that.

        Raises ``DeadlineExceeded`` or ``PeerLost``.
        """
        async with self._within(self._local.limits.handshake_s):
            answer = await self._client.ask(report=report)
        return answer.rtt_s, b"" if isinstance(answer.report, UnsetType) else answer.report

    async def wait_ended(self) -> None:
        """Wait until the connection has ended. Cancellation: safe."""
        await self._client.wait_closed()

    @asynccontextmanager
    async def _within(self, within_s: float) -> AsyncIterator[None]:
        """Wait no longer than that, and say whose answer is missing."""
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError:
            message = f"{self.endpoint} did not answer within {within_s:g} s"
            raise DeadlineExceeded(message, phase="handshake", peer=self.endpoint) from None
        except Closed as error:
            raise PeerLost(f"{self.endpoint}: {error.message}", peer=self.endpoint) from error


class ContentQuestion:
    """Who holds the longest prefix of some content? It is encoded once, for all workers that are asked.

    ``places``: indices of the digests that are asked for. The arguments are those of ``Asker.held``.
    """

    def __init__(self, digests: Sequence[bytes], *, wait_s: float = 0.0, at_least: int = 1) -> None:
        sizes = {*map(len, digests)} if {*map(type, digests)} <= {bytes} else {0}  # quick, for thousands of them
        if not sizes <= DIGEST_SIZES:
            raise ArgumentInvalid("digests", "lists of bytes", digests, remedy=DIGESTS_REMEDY)
        most = WAITING_DIGESTS_MAX if wait_s else DIGESTS_MAX
        room = min(most, QUESTION_DIGESTS_BYTES // (DIGEST_EXTRA_BYTES + max(sizes, default=0)))
        self.wait_s, self.num_digests = wait_s, len(digests)
        self.places = _places(len(digests), room)
        question = AskHeld(
            digests=tuple([digests[place] for place in self.places]),
            wait_ms=round(1e3 * min(wait_s, WAIT_S_MAX)),
            at_least=bisect_left(self.places, at_least - 1) + 1,
        )
        self.encoded = questions.encode(question)


class Claim(Struct, frozen=True):
    """What a worker says that it holds of some content; nothing of it is verified yet.

    Attributes:
        count: how many of the digests its lease holds at least; 0 if there is none.
        rest: indices of the digests right behind these that the question left out: ask for them to learn whether the
            lease holds them, too.
        read: returns the ticket of the lease, verified, or raises as ``find``.
    """

    count: int
    rest: range
    read: Callable[[], Ticket]


class Told(Struct, frozen=True):
    """Where the leases end that a worker keeps; nothing of it is verified.

    Attributes:
        new: the first 8 bytes of each digest at which a lease ends now, or passes 1,024 tokens or a multiple.
        gone: likewise, where none does now. Others may be among them that were never told.
        is_anew: forget what this worker has told before.
        is_all: whether that is all until the next change.
    """

    new: tuple[bytes, ...]
    gone: tuple[bytes, ...]
    is_anew: bool
    is_all: bool


def _split(ends: bytes) -> tuple[bytes, ...]:
    return tuple([ends[at : at + END_BYTES] for at in range(0, len(ends), END_BYTES)])


def _places(num_digests: int, room: int) -> Sequence[int]:
    """Return the places that are asked for: a quarter of them at the end, where most leases end that hold much."""
    if num_digests <= room:
        return range(num_digests)
    last = num_digests - room // 4
    step = -(-last // (room - room // 4))
    return [*range(step - 1, last, step), *range(last, num_digests)]


class Link(Asker):
    """A connection to a producer rank, to read from it. Thread: the event loop.

    Attributes:
        address: where it answers: its endpoint, with one of the addresses of a name.
        is_only: whether its endpoint has no other address.
        agent: the name that its transport must have. It is derived from the peer's key.
        advertisement: what it published, checked.
        credentials: ours, for its TCP plane.
    """

    def __init__(
        self,
        client: HandshakeClient,
        awaited: Awaited,
        advertisement: Advertisement,
        *,
        peer: PeerId,
        local: LocalEndpoint,
    ) -> None:
        super().__init__(client, awaited, endpoint=peer.endpoint, local=local)
        self._to_ask: list[LeaseKey] = []
        self.peer, self.address, self.is_only = peer, client.address, client.is_only
        self.agent = agent_name(str(peer), local.key_of(peer))
        self.advertisement = advertisement
        self.credentials = local.credentials(peer, client.identity, client.pass_)

    def may_be_over(self, grant: Grant) -> bool:
        """Return whether a ticket seems to have expired, so that its lease is checked before anything is read.

        Only the check decides: another clock may have signed the ticket, and another reader may have renewed the lease.
        """
        offset = self.clock_offset
        return grant.seems_over(self._local.network.wall() + offset.ahead_s, offset.error_s)

    async def ask_end(self, lease: LeaseKey, *, within_s: float) -> LeaseEnd:
        """Ask the producer how a lease has ended, by renewing it. Without an answer in time, the reason is unknown.

        Questions of one loop iteration are sent together. Cancellation: safe.
        """
        if not self._to_ask:
            asyncio.get_running_loop().call_soon(self._send_queries)
        self._to_ask.append(lease)
        try:
            return _end_of(await self._awaited.wait(lease, within_s))
        except (TimeoutError, Closed):
            return LeaseEnd()

    def release(self, leases: Sequence[LeaseKey], *, read: bool) -> None:
        """Release leases for our rank, which has read the blocks or not. Does nothing if the connection has ended."""
        self._send([Release(leases=refs, read=read) for refs in _refs(leases)])

    def renew(self, leases: Sequence[LeaseKey]) -> None:
        """Ask the producer to renew these leases. Does nothing if the connection has ended."""
        self._send([Renew(leases=refs) for refs in _refs(leases)])

    def _send_queries(self) -> None:
        leases, self._to_ask = self._to_ask, []
        self.renew(list(dict.fromkeys(leases)))

    def _send(self, messages: Sequence[Release | Renew]) -> None:
        try:
            for message in messages:
                self._client.send(message)
        except Closed:
            return  # the producer's leases expire


def _refs(leases: Sequence[LeaseKey]) -> list[tuple[LeaseRef, ...]]:
    refs = [LeaseRef(slot=slot, epoch=epoch) for slot, epoch in leases]
    if 0 < len(refs) <= LEASES_MAX:
        return [tuple(refs)]
    return [tuple(refs[first : first + LEASES_MAX]) for first in range(0, len(refs), LEASES_MAX)]


def _end_of(answer: LeaseAnswer) -> LeaseEnd:
    if answer.outcome != "ended" or isinstance(answer.ended_by, UnsetType):
        return LeaseEnd()
    return LeaseEnd(answer.ended_by, None if isinstance(answer.ended_s, UnsetType) else answer.ended_s)


FULL = CloseCode.TOO_MANY_PEERS
"""Why a worker refuses a peer for which it has no place: there may be one later."""


class Restarted(StaleLease):
    """The same rank answers in another incarnation, at the only address."""


@asynccontextmanager
async def _dialed(
    endpoint: str,
    local: LocalEndpoint,
    *,
    server_key: str,
    on_ended: Callable[[str, str], None] = lambda code, detail: None,
    peer: PeerId | None = None,
    first: str = "",
) -> AsyncIterator[tuple[HandshakeClient, Awaited]]:
    """Dial a worker as a reader, and leave with a goodbye; handshake's errors become ours. ``peer``: None for any."""
    awaited = Awaited(on_ended)
    try:
        async with open_client(
            endpoint,
            identity=local.identity,
            publication=READER,
            security=local.security,
            limits=local.limits,
            network=local.network,
            on_event=awaited.on_event,
            server_key=server_key,
            why_not=partial(_who_else, peer),
            first=first,
        ) as client:
            yield client, awaited
    except HandshakeError as error:
        raise _restarted(error, peer) or as_kvflow_error(error, peer=endpoint) from error


def _who_else(peer: PeerId | None, server: Identity) -> str:
    """Return who a server is if it is not this peer; empty if it is."""
    if peer is None:
        return ""
    if (server.engine_id, server.rank) != (peer.engine_id, peer.rank):
        return f"{quoted(server.engine_id)} rank {server.rank} now, not {quoted(peer.engine_id)} rank {peer.rank}"
    if server.incarnation != peer.incarnation:
        return f"another incarnation of {quoted(peer.engine_id)} rank {peer.rank}"
    return ""


def _restarted(error: HandshakeError, peer: PeerId | None) -> Restarted | None:
    """Return that a peer has gone if another incarnation of it answers, and there is no address where it may live."""
    match error:
        case WrongServer(answered=Identity(engine_id=engine_id, rank=rank)):
            if peer is not None and (engine_id, rank) == (peer.engine_id, peer.rank):
                message = f"{quoted(engine_id)} rank {rank} was restarted since it gave this ticket"
                return Restarted(message, ended_by="gone", peer=peer.endpoint)
    return None


@asynccontextmanager
async def open_link(
    peer: PeerId,
    *,
    local: LocalEndpoint,
    on_ended: Callable[[str, str], None],
    first: str = "",
) -> AsyncIterator[Link]:
    """Dial one producer rank and read its manifest. ``on_ended`` gets code and detail of a connection that ended.

    If the endpoint is a name with several addresses, one of which leads to the rank, other workers at the others do
    not matter. ``first``: the ``Link.address`` of an earlier connection, which is tried first.

    Raises:
        AuthenticationFailed: it has another secret or key, or we do not trust its key.
        PeerLost: it cannot be reached, or other workers answer there.
        StaleLease: the same rank answers in another incarnation at the only address, and its leases have ended.
        ProtocolViolation: what it sends is invalid.
        ReleaseMismatch: it writes another version of the manifest. We send it this reason.
        DeadlineExceeded: it is silent.
    """
    dialed = _dialed(peer.endpoint, local, server_key=peer.public_key, on_ended=on_ended, peer=peer, first=first)
    async with dialed as (client, awaited):
        software = client.identity.software
        try:
            advertisement = await asyncio.to_thread(decode, client.publication, peer=str(peer), software=software)
        except ReleaseMismatch as error:
            client.refuse(error.code, error.message, error.remedy)
            raise
        yield Link(client, awaited, advertisement, peer=peer, local=local)


@asynccontextmanager
async def open_asker(
    endpoint: str,
    config: WorkerConfig,
    *,
    server_key: str = "",
    network: Network = ZEROMQ,
    security: ClusterSecurity | None = None,
) -> AsyncIterator[Asker]:
    """Dial a worker as a reader does, and leave with a goodbye. Cancellation: safe.

    ``server_key`` is the public key of a worker that has its own; ``security`` replaces what the settings say.

    Raises:
        ConfigInvalid: there is no usable secret, or the endpoint is malformed.
        AuthenticationFailed, PeerRefused, PeerLost, ProtocolViolation, DeadlineExceeded: it cannot be reached.
    """
    identity = Identity(
        engine_id=config.engine_id,
        rank=0,
        num_ranks=1,
        incarnation=secrets.token_hex(16),
        role="decode",
        software=f"kvflow {__version__}",
    )
    limits = Limits(connect_s=config.tuning.connect_s, handshake_s=config.tuning.handshake_s)
    local = LocalEndpoint(identity, READER, security or security_of(config), limits, network)
    async with _dialed(endpoint, local, server_key=server_key) as (client, awaited):
        yield Asker(client, awaited, endpoint=endpoint, local=local)
