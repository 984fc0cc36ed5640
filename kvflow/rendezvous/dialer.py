"""Connections that this process dials: to a producer rank, to read from it, or to a worker, to look at it."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct, UnsetType

from handshake import ClockOffset, HandshakeClient, Identity, Limits, open_client
from handshake.errors import Closed, HandshakeError
from handshake.limits import LEASES_MAX
from handshake.messages import (
    ConnectionClosed,
    ConnectionFailed,
    Event,
    LeaseAnswer,
    LeaseRef,
    Release,
    Renew,
    RenewAnswered,
)
from kvflow.config import WorkerConfig
from kvflow.errors import DeadlineExceeded, FailureCode, PeerLost, ReleaseMismatch, StaleLease
from kvflow.ids import Credentials, LeaseKey, PeerId, agent_name
from kvflow.leases.tickets import Grant
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
from kvflow.version import __version__


class LeaseEnd(Struct, frozen=True):
    """How a lease has ended, as of ``StaleLease``, and how many seconds ago, if its producer says so."""

    ended_by: str = "unknown"
    ended_s: float | None = None

    @property
    def words(self) -> str:
        """The end of a sentence about the lease."""
        how = _ENDINGS.get(self.ended_by, self.ended_by)
        return how if self.ended_s is None else f"{how} {self.ended_s:.3f} s ago"


_ENDINGS = {
    "expired": "it expired",
    "revoked": "the producer revoked it",
    "used": "it was used before, and released",
    "released": "a reader released it",
    "unknown": "it ended, reason unknown",
}


class PendingQueries:
    """Leases that the producer was asked about, and the futures that wait for its answers. Thread: the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[LeaseKey, list[asyncio.Future[LeaseEnd]]] = {}
        self._lost = False

    def add(self, lease: LeaseKey) -> asyncio.Future[LeaseEnd]:
        """Return a future for how a lease has ended."""
        future: asyncio.Future[LeaseEnd] = asyncio.get_running_loop().create_future()
        if self._lost:
            future.set_result(LeaseEnd())
        else:
            self._waiting.setdefault(lease, []).append(future)
        return future

    def withdraw(self, lease: LeaseKey, future: asyncio.Future[LeaseEnd]) -> None:
        """Drop a future that is no longer awaited."""
        waiting = self._waiting.get(lease, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._waiting.pop(lease, None)

    def lose(self) -> None:
        """Resolve every future, now and later, with an unknown end: the connection has ended."""
        self._lost = True
        for lease in list(self._waiting):
            self._resolve(lease, None)

    def answer(self, answers: Sequence[LeaseAnswer]) -> None:
        """Resolve the futures of these leases; most renewals have none."""
        for each in answers:
            self._resolve((each.slot, each.epoch), each)

    def _resolve(self, lease: LeaseKey, answer: LeaseAnswer | None) -> None:
        for future in self._waiting.pop(lease, ()):
            if not future.done():
                future.set_result(_end_of(answer))


class Link:
    """A connection that is ready. Thread: the event loop.

    Attributes:
        agent: the name that its transport must have. It is derived from the peer's key.
        advertisement: what it published, checked.
        credentials: ours, for its TCP plane.
    """

    def __init__(
        self,
        client: HandshakeClient,
        peer: PeerId,
        agent: str,
        advertisement: Advertisement,
        *,
        queries: PendingQueries,
        credentials: Credentials,
        network: Network = ZEROMQ,
    ) -> None:
        self._client = client
        self._queries = queries
        self._network = network
        self._to_ask: list[LeaseKey] = []
        self.peer = peer
        self.agent = agent
        self.advertisement = advertisement
        self.credentials = credentials

    @property
    def software(self) -> str:
        """The release that the producer runs."""
        return self._client.identity.software

    @property
    def clock_offset(self) -> ClockOffset | None:
        """How far the producer's wall clock is ahead of ours; None if it is unknown."""
        return self._client.clock_offset

    def may_be_over(self, grant: Grant) -> bool:
        """Return whether a ticket seems to have expired, so that its lease is checked before anything is read.

        Only the check decides: another clock may have signed the ticket, and another reader may have renewed the lease.
        """
        offset = self.clock_offset
        return offset is not None and grant.seems_over(self._network.wall() + offset.ahead_s, offset.error_s)

    async def ask_end(self, lease: LeaseKey, *, within_s: float) -> LeaseEnd:
        """Ask the producer how a lease has ended, by renewing it. Without an answer in time, the reason is unknown.

        Questions of one loop iteration are sent together. Cancellation: safe.
        """
        answered = self._queries.add(lease)
        if not self._to_ask:
            asyncio.get_running_loop().call_soon(self._send_queries)
        self._to_ask.append(lease)
        try:
            async with asyncio.timeout(within_s):
                return await answered
        except TimeoutError:
            return LeaseEnd()
        finally:
            self._queries.withdraw(lease, answered)

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


def _end_of(answer: LeaseAnswer | None) -> LeaseEnd:
    if answer is None or answer.outcome != "ended" or isinstance(answer.ended_by, UnsetType):
        return LeaseEnd()
    return LeaseEnd(answer.ended_by, None if isinstance(answer.ended_s, UnsetType) else answer.ended_s)


class Replaced(PeerLost):
    """Another engine or rank answers at the address."""


class Restarted(StaleLease):
    """The same rank answers in another incarnation."""


@asynccontextmanager
async def open_link(
    peer: PeerId,
    *,
    local: LocalEndpoint,
    on_ended: Callable[[str, str], None],
) -> AsyncIterator[Link]:
    """Dial one producer rank and read its manifest. ``on_ended`` gets code and detail of a connection that ended.

    Raises:
        AuthenticationFailed: it has another secret or key, or we do not trust its key.
        PeerLost: it cannot be reached, or another worker answers there.
        StaleLease: the same rank answers in another incarnation, and its leases have ended.
        ProtocolViolation: what it sends is invalid.
        ReleaseMismatch: it writes another version of the manifest. We send it this reason.
        DeadlineExceeded: it is silent.
    """
    queries = PendingQueries()

    def on_event(event: Event) -> None:
        match event:
            case RenewAnswered(leases=answers):
                queries.answer(answers)
            case ConnectionClosed(reason=reason):
                queries.lose()
                on_ended(FailureCode.PEER_CLOSED, reason)
            case ConnectionFailed(code=code, reason=reason):
                queries.lose()
                on_ended(FailureCode.PEER_LOST, f"{code}: {reason}")
            case _:
                pass

    try:
        server_key = local.key_of(peer)
        async with open_client(
            peer.endpoint,
            identity=local.identity,
            publication=READER,
            security=local.security,
            limits=local.limits,
            network=local.network,
            on_event=on_event,
            server_key=server_key,
        ) as client:
            _require_peer(client.identity, peer)
            software = client.identity.software
            try:
                advertisement = await asyncio.to_thread(decode, client.publication, peer=str(peer), software=software)
            except ReleaseMismatch as error:
                client.refuse(error.code, error.message, error.remedy)
                raise
            agent = agent_name(str(peer), server_key)
            credentials = local.credentials(peer, client.identity, client.pass_)
            yield Link(
                client,
                peer,
                agent,
                advertisement,
                queries=queries,
                credentials=credentials,
                network=local.network,
            )
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=peer.endpoint) from error


def _require_peer(identity: Identity, peer: PeerId) -> None:
    if (identity.engine_id, identity.rank) != (peer.engine_id, peer.rank):
        raise Replaced(
            f"{peer.endpoint} is {identity.engine_id!r} rank {identity.rank} now, not {peer.engine_id!r} "
            f"rank {peer.rank}",
            peer=peer.endpoint,
        )
    if identity.incarnation != peer.incarnation:
        raise Restarted(
            f"{peer.engine_id!r} rank {peer.rank} was restarted since it gave this ticket",
            ended_by="gone",
            peer=peer.endpoint,
        )


# --- a member that looks, and reads nothing: ``kvflow inspect`` and the doctor ---


class Visit:
    """A connection to a worker that is ready. Thread: the event loop."""

    def __init__(self, client: HandshakeClient, endpoint: str, answer_s: float) -> None:
        self._client = client
        self._answer_s = answer_s
        self.endpoint = endpoint
        self.identity: Identity = client.identity
        self.wire_version = client.version
        self.manifest_schema = client.publication.schema

    @property
    def clock_ahead_s(self) -> float | None:
        """Seconds by which the worker's wall clock is ahead of ours; None if it is unknown."""
        offset = self._client.clock_offset
        return None if offset is None else offset.ahead_s

    async def read_manifest(self) -> Advertisement:
        """Return what the worker publishes, checked. Raises as ``decode``."""
        software = self.identity.software
        return await asyncio.to_thread(decode, self._client.publication, peer=self.endpoint, software=software)

    async def ping(self) -> float:
        """Return the seconds of one round trip. Raises ``DeadlineExceeded`` or ``PeerLost``."""
        return (await self._ask(report=False))[0]

    async def ask_report(self) -> bytes:
        """Return what the worker reports about itself; empty if its release reports nothing. Raises as ``ping``."""
        return (await self._ask(report=True))[1]

    async def _ask(self, *, report: bool) -> tuple[float, bytes]:
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._client.ask(report=report)
        except TimeoutError:
            message = f"{self.endpoint} did not answer within {self._answer_s:g} s"
            raise DeadlineExceeded(message, phase="handshake", peer=self.endpoint) from None
        except Closed as error:
            raise PeerLost(f"{self.endpoint}: {error.message}", peer=self.endpoint) from error
        return answer.rtt_s, b"" if isinstance(answer.report, UnsetType) else answer.report


@asynccontextmanager
async def open_visit(
    endpoint: str, config: WorkerConfig, *, server_key: str = "", network: Network = ZEROMQ
) -> AsyncIterator[Visit]:
    """Dial a worker as a reader does, and leave with a goodbye. Cancellation: safe.

    ``server_key`` is the public key of a worker that has its own.

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
    budgets = config.tuning
    try:
        async with open_client(
            endpoint,
            identity=identity,
            publication=READER,
            security=security_of(config),
            on_event=lambda _: None,
            limits=Limits(connect_s=budgets.connect_s, handshake_s=budgets.handshake_s),
            network=network,
            server_key=server_key,
        ) as client:
            yield Visit(client, endpoint, budgets.handshake_s)
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=endpoint) from error
