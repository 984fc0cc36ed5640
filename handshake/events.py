"""What a connection tells the program above it: past participles, one per thing that happened.

A connection ends with exactly one ``ConnectionClosed`` or ``ConnectionFailed``; nothing follows it.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from handshake.messages import Identity, LeaseAnswer, LeaseRef, Publication


class PeerReady(Struct, frozen=True, kw_only=True):
    """The handshake is done. Its ``repr`` does not show the pass.

    Attributes:
        identity: of the peer.
        publication: its.
        version: of the wire protocol.
        pass_: that a server has given to this client; empty if it gives none, and of a client.
    """

    identity: Identity
    publication: Publication
    version: int
    pass_: bytes = b""

    def __repr__(self) -> str:
        return f"PeerReady({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "pass_"]


class ReleaseReceived(Struct, frozen=True, kw_only=True):
    """The peer, as known from ``PeerReady``, needs these leases no more.

    Attributes:
        leases: all of them.
        read: whether it has read what they promise; ``UNSET`` if it does not tell.
    """

    leases: tuple[LeaseRef, ...]
    read: bool | UnsetType = UNSET


class RenewReceived(Struct, frozen=True, kw_only=True):
    """The peer still needs these leases."""

    leases: tuple[LeaseRef, ...]


class ReleaseAnswered(Struct, frozen=True, kw_only=True):
    """What became of the leases that we released."""

    leases: tuple[LeaseAnswer, ...]


class RenewAnswered(Struct, frozen=True, kw_only=True):
    """What became of the leases that we asked to renew.

    Attributes:
        lease_s: seconds for which the held ones are held, counted from the answer.
    """

    leases: tuple[LeaseAnswer, ...]
    lease_s: float


class PingAnswered(Struct, frozen=True, kw_only=True):
    """The server has answered our last ping.

    Attributes:
        rtt_s: seconds between question and answer.
        report: that we have asked for; ``UNSET`` if we have not, or the server reports nothing.
    """

    rtt_s: float
    report: bytes | UnsetType = UNSET


class ConnectionClosed(Struct, frozen=True, kw_only=True):
    """One side left in peace."""

    reason: str


class ConnectionFailed(Struct, frozen=True, kw_only=True):
    """The connection ended with a complaint.

    Attributes:
        code: see ``handshake.errors.CloseCode``; the peer's own word if it refused.
        reason: what is wrong.
        remedy: what to do about it.
        refused: True if the peer refused us; False if we found the fault.
    """

    code: str
    reason: str
    remedy: str = ""
    refused: bool = False


Ending = ConnectionClosed | ConnectionFailed
Event = PeerReady | ReleaseReceived | RenewReceived | ReleaseAnswered | RenewAnswered | PingAnswered | Ending
