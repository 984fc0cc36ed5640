"""The consumer's end of the control channel: one connection to one producer rank."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from handshake import HandshakeClient, Identity, open_client
from handshake.errors import Closed, HandshakeError
from handshake.events import ConnectionClosed, ConnectionFailed, Event
from handshake.limits import LEASES_MAX
from handshake.messages import LeaseRef, Release, Renew
from kvflow.cache.tickets import RankAddress
from kvflow.errors import PeerLost, StaleLease
from kvflow.ids import LeaseKey, PeerId, peer_id
from kvflow.rendezvous.failures import as_kvflow_error
from kvflow.rendezvous.introduction import OurSide
from kvflow.rendezvous.publication import Advertisement, decode


class Link:
    """A connection that is ready.

    Attributes:
        peer: who is at the other end.
        endpoint: where.
        advertisement: what it published, checked.

    Thread: the event loop.
    """

    def __init__(self, client: HandshakeClient, peer: PeerId, endpoint: str, advertisement: Advertisement) -> None:
        self._client = client
        self.peer = peer
        self.endpoint = endpoint
        self.advertisement = advertisement

    def release(self, leases: Sequence[LeaseKey]) -> None:
        """Tell the producer that our rank needs these leases no more; nothing happens if it is gone."""
        self._send(Release, leases)

    def renew(self, leases: Sequence[LeaseKey]) -> None:
        """Ask the producer to keep these leases; nothing happens if it is gone."""
        self._send(Renew, leases)

    def _send(self, kind: type[Release] | type[Renew], leases: Sequence[LeaseKey]) -> None:
        refs = [LeaseRef(slot=slot, epoch=epoch) for slot, epoch in leases]
        try:
            for first in range(0, len(refs), LEASES_MAX):
                self._client.send(kind(leases=tuple(refs[first : first + LEASES_MAX])))
        except Closed:
            return  # the producer's leases end by themselves


class Replaced(PeerLost):
    """Another engine or rank answers at the address."""


class Restarted(StaleLease):
    """The same rank answers in another incarnation.

    Attributes:
        incarnation: the new one.
    """

    def __init__(self, message: str, *, peer: str, incarnation: str) -> None:
        super().__init__(message, peer=peer)
        self.incarnation = incarnation


@asynccontextmanager
async def open_link(
    engine_id: str,
    address: RankAddress,
    *,
    ours: OurSide,
    on_ended: Callable[[str, str], None],
) -> AsyncIterator[Link]:
    """Dial one producer rank and read its manifest.

    Args:
        engine_id: whom the ticket names.
        address: where, and which incarnation.
        ours: what we say.
        on_ended: called once with a code and a detail when a connection that was ready has ended.

    Raises:
        AuthenticationFailed: it does not hold our secret.
        PeerLost: it cannot be reached, or another worker answers there.
        StaleLease: the same rank answers in another incarnation: its leases are gone.
        ProtocolViolation: what it sends cannot be.
        LayoutMismatch: it writes another version of the manifest.
        DeadlineExceeded: it is silent.
    """
    peer = peer_id(engine_id, address.rank, address.incarnation)

    def on_event(event: Event) -> None:
        match event:
            case ConnectionClosed(reason=reason):
                on_ended("peer_closed", reason)
            case ConnectionFailed(code=code, reason=reason):
                on_ended("peer_lost", f"{code}: {reason}")
            case _:
                pass

    try:
        async with open_client(
            address.endpoint,
            identity=ours.identity,
            publication=ours.publication,
            security=ours.security,
            limits=ours.limits,
            network=ours.network,
            on_event=on_event,
        ) as client:
            _require_peer(client.identity, engine_id, address)
            advertisement = decode(client.publication, peer=peer)
            yield Link(client, peer, address.endpoint, advertisement)
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=address.endpoint) from error


def _require_peer(identity: Identity, engine_id: str, address: RankAddress) -> None:
    if (identity.engine_id, identity.rank) != (engine_id, address.rank):
        raise Replaced(
            f"{address.endpoint} is {identity.engine_id!r} rank {identity.rank} now, not {engine_id!r} "
            f"rank {address.rank}",
            peer=address.endpoint,
        )
    if identity.incarnation != address.incarnation:
        raise Restarted(
            f"{engine_id!r} rank {address.rank} was restarted since it gave this ticket",
            peer=address.endpoint,
            incarnation=identity.incarnation,
        )
