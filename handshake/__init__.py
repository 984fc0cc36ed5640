"""Two workers meet over ZeroMQ: authenticated, of agreed version, each with one publication of the other.

Both prove that they hold one cluster secret, agree on a wire version, and exchange one opaque publication each, with
its digest. Then the client renews and releases leases, and the server answers.
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
    WrongServer,
)
from handshake.limits import Limits

# Events.
# Messages and their parts.
from handshake.messages import (
    Answer,
    Answered,
    Ask,
    Asked,
    ConnectionClosed,
    ConnectionFailed,
    Ending,
    HandshakeEvent,
    Identity,
    LeaseAnswer,
    LeaseOutcome,
    LeaseRef,
    PeerReady,
    PingAnswered,
    Publication,
    Release,
    ReleaseAnswered,
    Released,
    ReleaseReceived,
    Renew,
    RenewAnswered,
    Renewed,
    RenewReceived,
    VersionRange,
)
from handshake.rates import ClockOffset
from handshake.security import AllowedKeys, ClusterSecurity, CurveKeys, sign, verify
from handshake.server import HandshakeServer, Peer, PeerKey, open_server

__all__ = [
    "AddressInvalid",
    "AllowedKeys",
    "Answer",
    "Answered",
    "Ask",
    "Asked",
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
    "HandshakeClient",
    "HandshakeError",
    "HandshakeEvent",
    "HandshakeServer",
    "Identity",
    "LeaseAnswer",
    "LeaseOutcome",
    "LeaseRef",
    "Limits",
    "LocalProtocolError",
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
    "WrongServer",
    "open_client",
    "open_server",
    "sign",
    "verify",
]
