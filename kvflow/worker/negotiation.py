"""Over which data planes a peer may be read: what both sides have, and what their settings allow."""

import asyncio
from collections.abc import Mapping
from typing import NoReturn

from msgspec import Struct

from kvflow.errors import LayoutMismatch, PeerLost
from kvflow.ids import PeerId
from kvflow.rendezvous.dialer import Link
from kvflow.rendezvous.introduction import Network
from kvflow.rendezvous.publication import Advertisement
from kvflow.transport.base import PeerAddress, Published

SAME_PLANE = "Set transport to 'auto', or to the same data plane, on both sides."
SAME_ENCRYPTION = "Set tcp_encryption to the same value on all workers of a cluster."


class Unfit(Exception):
    """No data plane of both sides can read from a peer that answers."""


class OurPlanes(Struct, frozen=True):
    """What we can read over.

    Attributes:
        published: by our transport.
        tcp_encryption: of our TCP plane.
        network: looks names up.
        within_s: how long that may take.
        weights: see ``WorkerConfig.peer_weights``.
    """

    published: Published
    tcp_encryption: str
    network: Network
    within_s: float
    weights: Mapping[str, int]

    async def address(self, link: Link) -> PeerAddress:
        """Return what our transport must know of a peer: the data planes of both sides, and where they are.

        Raises:
            LayoutMismatch: there is no such data plane, or the settings of the only one differ.
            PeerLost: the only one is at a name that cannot be looked up.
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
        """Return the numeric endpoint of a peer's TCP plane; empty if it cannot be used, and another one may do.

        Raises:
            LayoutMismatch, PeerLost: it cannot be used, and there is no other one.
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
                reason = f"its TCP plane is at {theirs.data_endpoint}, which cannot be looked up: {error!r}"
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
        ours = f"{self.published.names} ({detail})"
        raise LayoutMismatch("transport", _names(theirs), ours, remedy=SAME_PLANE)

    def _refuse_encryption(self, theirs: Advertisement) -> NoReturn:
        raise LayoutMismatch(
            "tcp_encryption", theirs.tcp_encryption, self.tcp_encryption, remedy=SAME_ENCRYPTION
        ) from None


def _names(theirs: Advertisement) -> str:
    return "+".join(sorted(theirs.planes))
