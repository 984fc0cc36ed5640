"""Two workers meet over ZeroMQ: authenticated, of agreed version, each with one publication of the other.

A server listens for any number of clients. Both prove that they hold one cluster secret, agree on a wire version
and exchange one opaque, digest-checked publication each; from then on the client renews and releases leases, and
the server answers. This package knows peers, versions, frames and keys, and nothing of what is published.
"""

# Shells.
from handshake.client import HandshakeClient, open_client

# Errors.
from handshake.errors import (
    AddressInvalid,
    CloseCode,
    Closed,
    ConnectionLost,
    ConnectionRefused,
    HandshakeError,
    LocalProtocolError,
    RemoteProtocolError,
    SocketsExhausted,
    TimedOut,
    Unauthenticated,
)

# Events.
from handshake.events import (
    ConnectionClosed,
    ConnectionFailed,
    Ending,
    Event,
    PeerReady,
    PingAnswered,
    ReleaseAnswered,
    ReleaseReceived,
    RenewAnswered,
    RenewReceived,
)
from handshake.limits import Limits

# Messages and their parts.
from handshake.messages import (
    Identity,
    LeaseAnswer,
    LeaseRef,
    Outcome,
    Publication,
    Release,
    Released,
    Renew,
    Renewed,
)
from handshake.offsets import ClockOffset
from handshake.security import AllowedKeys, ClusterSecurity, CurveKeys, sign, verify
from handshake.server import HandshakeServer, Peer, PeerKey, open_server
from handshake.version import VersionRange

__all__ = [
    "AddressInvalid",
    "AllowedKeys",
    "ClockOffset",
    "CloseCode",
    "Closed",
    "ClusterSecurity",
    "ConnectionClosed",
    "ConnectionFailed",
    "ConnectionLost",
    "ConnectionRefused",
    "CurveKeys",
    "Ending",
    "Event",
    "HandshakeClient",
    "HandshakeError",
    "HandshakeServer",
    "Identity",
    "LeaseAnswer",
    "LeaseRef",
    "Limits",
    "LocalProtocolError",
    "Outcome",
    "Peer",
    "PeerKey",
    "PeerReady",
    "PingAnswered",
    "Publication",
    "Release",
    "ReleaseAnswered",
    "ReleaseReceived",
    "Released",
    "RemoteProtocolError",
    "Renew",
    "RenewAnswered",
    "RenewReceived",
    "Renewed",
    "SocketsExhausted",
    "TimedOut",
    "Unauthenticated",
    "VersionRange",
    "open_client",
    "open_server",
    "sign",
    "verify",
]
