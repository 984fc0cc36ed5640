"""The connection to one peer: its states, the tasks that wait for one of them, and the choice of its data planes.

A connection has one of these states:

==============  ====================================================================  ==============================
state           meaning                                                               what it has
==============  ====================================================================  ==============================
``dialing``     the control connection is being made                                  nothing
``linked``      our transport is being connected                                      ``link``
``attached``    our transport is connected                                            ``link``, ``carrier``
``connected``   the peer can be read from                                             ``link``, ``carrier``, ``peer``
``unreadable``  the peer cannot be read from, but its leases can be released          ``link``, ``error``
``dropped``     it must end; the same peer may be connected again afterwards          ``drop``, and what it had
``closed``      it has ended                                                          ``peer`` or ``error``
==============  ====================================================================  ==============================
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from msgspec import Struct

from kvflow.errors import KvflowError, LayoutMismatch, PeerLost
from kvflow.ids import PeerId
from kvflow.leases.tickets import Member
from kvflow.reads.contract import Carrier, PeerAddress, Published
from kvflow.reads.pulls import advance
from kvflow.rendezvous.dialer import Link
from kvflow.rendezvous.endpoint import Network
from kvflow.rendezvous.publication import Advertisement
from kvflow.validation import Name, Number
from kvflow.worker.failures import connection_error
from kvflow.worker.prepared import Peer

SAME_PLANE = "Set transport to 'auto', or to the same data plane, on both sides."
NO_PLANE = (
    "Correct what the message names, or set transport to 'auto' on both sides to read over TCP. Two containers of one "
    "host need one PID namespace (docs/howto/deploy.md), and UCX_TLS must not leave out cma."
)
SAME_ENCRYPTION = "Set tcp_encryption to the same value on all workers of a cluster."


class PeerState(Struct, frozen=True, kw_only=True):
    """One worker that another one is connected with.

    Attributes:
        name: ``engine/rank/incarnation``.
        state: of a producer ``dialing``, ``linked``, ``attached``, ``connected``, ``unreadable`` or ``dropped``; of a
            reader ``connected``.
        software: release that it runs, as it says; empty if it is not known.
        transport: what carries the bytes of a producer; empty for a reader, and before it is known.
        rtt_s: seconds of the last round trip of a reader's control channel; None if it is not known.
    """

    name: Name
    state: Name
    software: Name = ""
    transport: Name = ""
    rtt_s: Number | None = None


State = Literal["dialing", "linked", "attached", "connected", "unreadable", "dropped", "closed"]
Event = Literal["linked", "attached", "connected", "unreadable", "dropped", "closed"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("dialing", "linked"): "linked",
    ("dialing", "dropped"): "dropped",
    ("dialing", "closed"): "closed",
    ("linked", "attached"): "attached",
    ("linked", "unreadable"): "unreadable",
    ("linked", "dropped"): "dropped",
    ("linked", "closed"): "closed",
    ("attached", "connected"): "connected",
    ("attached", "dropped"): "dropped",
    ("attached", "closed"): "closed",
    ("connected", "dropped"): "dropped",
    ("connected", "closed"): "closed",
    ("unreadable", "dropped"): "dropped",
    ("unreadable", "closed"): "closed",
    # The task of a dropped connection ends its current step first: what waits for that step gets its result.
    ("dropped", "linked"): "dropped",
    ("dropped", "connected"): "dropped",
    ("dropped", "unreadable"): "dropped",
    ("dropped", "closed"): "closed",
}


@dataclass(slots=True, eq=False)
class Connection:
    """The connection to one peer.

    Attributes:
        member: the peer and its address, as a ticket names them.
        begun_at: when it was begun to be dialed.
        state: see the table of this module.
        link: the control connection.
        linked_at: when the control connection was ready; None before.
        carrier: what carries the bytes.
        peer: the peer, once it can be read from.
        error: why it cannot be read from.
        unusable: why our transport cannot read from it over any data plane of both sides; empty if it can.
        drop: code and detail of why it must end.
    """

    member: Member
    begun_at: float
    state: State = "dialing"
    link: Link | None = None
    linked_at: float | None = None
    carrier: Carrier | None = None
    peer: Peer | None = None
    error: KvflowError | None = None
    unusable: str = ""
    drop: tuple[str, str] | None = None
    _changed: asyncio.Future[None] | None = None

    def advance(self, event: Event) -> None:
        """Enter the next state, and wake every task that waits for a change.

        Raises:
            IllegalTransition: the table has no such entry. Nothing has changed.
        """
        self.state = advance(TRANSITIONS, self.state, event, "a connection")
        self.wake()

    def wake(self) -> None:
        """Wake every task that waits for a change."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    async def change(self) -> None:
        """Wait for the next change. Cancellation: safe."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def fail(self, error: KvflowError) -> None:
        """Fail the tasks that wait for the peer, unless it is connected or has failed already."""
        if self.peer is None and self.error is None:
            self.error = error
            self.wake()

    async def require_link(self) -> Link:
        """Wait for the control connection, and return it; raise what has ended the connection before."""
        while self.link is None:
            if self.error is not None:
                raise self.error
            await self.change()
        return self.link

    async def require_peer(self) -> Peer:
        """Wait until the peer can be read from, and return it; raise why it cannot."""
        while self.peer is None:
            if self.error is not None:
                raise self.error
            await self.change()
        return self.peer

    async def require_carrier(self) -> Carrier:
        """Wait until our transport is connected, and return what carries the bytes.

        Raises:
            PlaneUnusable: our transport cannot read from the peer.
            TransferFailed: the connection was dropped before.
        """
        while self.carrier is None:
            if self.unusable:
                raise PlaneUnusable(self.unusable)
            if self.drop is not None:
                raise connection_error(str(self.member.peer), *self.drop)
            await self.change()
        return self.carrier

    async def dropped(self) -> tuple[str, str]:
        """Wait until the connection must end; return code and detail."""
        while self.drop is None:
            await self.change()
        return self.drop


class PlaneUnusable(Exception):
    """Our transport cannot read from a peer over any data plane that both sides have."""


class PlaneNegotiation(Struct, frozen=True):
    """Our side of the choice of data planes over which a peer is read: those that both sides have, and settings allow.

    Attributes:
        published: what our transport publishes.
        tcp_encryption: the setting of our TCP plane.
        network: resolves names.
        within_s: seconds that resolving a name may take.
        weights: see ``WorkerConfig.peer_weights``.
    """

    published: Published
    tcp_encryption: str
    network: Network
    within_s: float
    weights: Mapping[str, int]

    async def address(self, link: Link) -> PeerAddress:
        """Return what our transport needs to read from a peer: the data planes of both sides, and their addresses.

        Raises:
            LayoutMismatch: both sides have no data plane in common, or the settings of the only one differ.
            PeerLost: the only common data plane has a name that cannot be resolved.
        """
        theirs = link.advertisement
        planes = {name: theirs.planes[name] for name in self.published.planes if name in theirs.planes}
        if not planes:
            raise LayoutMismatch("transport", _names(theirs), self.published.names, remedy=SAME_PLANE)
        endpoint = ""
        if "tcp" in planes:
            endpoint = await self._tcp_endpoint(link.peer, theirs, required=len(planes) == 1)
        if not endpoint:
            planes.pop("tcp", None)
        return PeerAddress(
            link.peer,
            planes,
            theirs.epochs,
            agent=link.agent,
            data_endpoint=endpoint,
            credentials=link.credentials,
            weight=self.weights.get(link.peer.engine_id, 1),
        )

    async def _tcp_endpoint(self, peer: PeerId, theirs: Advertisement, *, required: bool) -> str:
        """Return the numeric endpoint of a peer's TCP plane; empty if it cannot be used but another plane may.

        Raises:
            LayoutMismatch, PeerLost: the TCP plane cannot be used, and it is required.
        """
        if theirs.tcp_encryption != self.tcp_encryption:
            if required:
                self._refuse_encryption(theirs)
            return ""
        try:
            async with asyncio.timeout(self.within_s):
                found = await self.network.resolve(theirs.data_endpoint)
        except (TimeoutError, OSError, ValueError) as error:  # a name that cannot be written is a ValueError
            if required:
                reason = f"its TCP plane is at {theirs.data_endpoint}, which cannot be resolved: {error!r}"
                raise PeerLost(f"{peer} cannot be read from: {reason}", peer=str(peer)) from error
            return ""
        # A wildcard listens at IPv4 addresses, and a name may have addresses of both kinds.
        return min(found, key=lambda endpoint: "[" in endpoint)

    def refuse(self, theirs: Advertisement, detail: str) -> NoReturn:
        """Refuse a peer that our transport cannot read from.

        Raises:
            LayoutMismatch: always.
        """
        both_tcp = "tcp" in theirs.planes and "tcp" in self.published.planes
        if both_tcp and theirs.tcp_encryption != self.tcp_encryption:
            self._refuse_encryption(theirs)
        ours = f"{self.published.names} ({detail.removeprefix(f'{self.published.names}: ')})"
        raise LayoutMismatch("transport", _names(theirs), ours, remedy=NO_PLANE)

    def _refuse_encryption(self, theirs: Advertisement) -> NoReturn:
        raise LayoutMismatch(
            "tcp_encryption", theirs.tcp_encryption, self.tcp_encryption, remedy=SAME_ENCRYPTION
        ) from None


def _names(theirs: Advertisement) -> str:
    return "+".join(sorted(theirs.planes))
