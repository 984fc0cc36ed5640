"""Every error that handshake raises to its caller, and the codes with which a connection fails.

The tree, by whose fault it is and what the caller can do about it::

    HandshakeError
    ├── ConfigInvalid          fix the address or the secret
    ├── LocalProtocolError     our own code said something that it must not say now
    ├── RemoteProtocolError    the peer said something that it must not say
    ├── PeerRefused            the peer gave a reason for not talking to us
    ├── AuthenticationFailed   the peer does not hold our cluster secret
    ├── ConnectionLost         the peer died, hung up or cannot be reached
    ├── CapacityExceeded       this process can open no more sockets or files
    ├── DeadlineExceeded       a phase took longer than its budget
    └── Closed                 the connection has ended; open another one

Each has a stable ``code`` for machines, and its text ends with what to do.
"""

from enum import StrEnum
from typing import ClassVar


class FailureCode(StrEnum):
    """Why a connection failed; the codes that a peer is told cross the wire in ``Refuse``.

    A newer peer may send a code that is not here: a received code is text, never looked up.
    """

    VERSION_UNSUPPORTED = "version_unsupported"
    """No version is in both ranges."""
    PROTOCOL_VIOLATION = "protocol_violation"
    """A message that cannot be read, or that its sender must not send now."""
    TOO_MANY_PEERS = "too_many_peers"
    """``Limits.peers_max`` connections are there already."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """``Limits.connections_per_key_max`` connections of this key are there already."""
    RATE_EXCEEDED = "rate_exceeded"
    """More messages or leases per second than ``Limits`` allow."""
    KEY_REMOVED = "key_removed"
    """The peer's public key is not among the allowed keys any more."""
    KEY_UNKNOWN = "key_unknown"
    """A public key that is not allowed. Never on the wire: ZeroMQ turns it away."""
    UNAUTHENTICATED = "unauthenticated"
    """No encryption, another secret, or not a word. Never on the wire: ZeroMQ turns it away."""
    BUSY = "busy"
    """``Limits.pending_handshakes_max`` are under way, this the oldest or the newest: dial again in a moment."""
    PUBLICATION_REFUSED = "publication_refused"
    """The program above cannot use what the peer published."""
    CLOSING = "closing"
    """The server is leaving."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    """The handshake took longer than ``Limits.handshake_s``."""
    SILENT = "silent"
    """Nothing was heard for ``Limits.silence_s_max``."""
    CONGESTED = "congested"
    """The peer does not read what it is sent: its queue is full. Never on the wire."""
    OVERFLOWED = "overflowed"
    """More bytes than messages may have, such as one of many frames: the connection was cut. Never on the wire."""
    CONNECTION_LOST = "connection_lost"
    """The transport is gone. Never on the wire."""
    INTERNAL_ERROR = "internal_error"
    """The program above failed to handle an event of this connection."""


class HandshakeError(Exception):
    """Base of all errors of handshake.

    Attributes:
        code: stable name of the kind of error, for logs, metrics and tests.
        remedy: what to do about it, one sentence.
        local: nothing was sent, for a reason of our own: the peer may be well.
    """

    code: ClassVar[str] = "handshake_error"
    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str = "", local: bool = False) -> None:
        self.message = message
        self.remedy = remedy or self.default_remedy
        self.local = local
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.remedy}".rstrip()


class ConfigInvalid(HandshakeError):
    """An address or a secret cannot be used, or would be unsafe."""

    code = "config_invalid"
    default_remedy = "Correct the named setting."


class LocalProtocolError(HandshakeError):
    """Our own side tried to say something that the protocol does not allow; nothing was sent."""

    code = "local_protocol_error"
    default_remedy = "This is a defect of the calling program."


class RemoteProtocolError(HandshakeError):
    """The peer said something that the protocol does not allow.

    Attributes:
        violation: what is wrong: ``frame_count``, ``frame_size``, ``format``, ``malformed``, ``digest`` or
            ``unexpected``.
    """

    code = "protocol_violation"
    default_remedy = "Run the same release on both sides; if they do, treat the peer as hostile."

    def __init__(self, message: str, *, violation: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.violation = violation


class PeerRefused(HandshakeError):
    """The peer answered with a refusal.

    Attributes:
        refusal: the peer's own stable code, for example ``version_unsupported``.
    """

    code = "peer_refused"
    default_remedy = "Do what the peer's reason says."

    def __init__(self, refusal: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"the peer refused ({refusal}): {message}", remedy=remedy)
        self.refusal = refusal


class AuthenticationFailed(HandshakeError):
    """The peer does not hold our cluster secret, or only one side uses encryption."""

    code = "authentication_failed"
    default_remedy = "Give every worker of the cluster the same secret, and check that the address is a worker's."


class ConnectionLost(HandshakeError):
    """The peer died, hung up or cannot be reached."""

    code = "connection_lost"
    default_remedy = "Check that the peer runs and that its address is reachable from here."


class CapacityExceeded(HandshakeError):
    """This process can open no more sockets or files; nothing was dialled.

    Attributes:
        resource: what is exhausted.
        limit: its bound.
    """

    code = "capacity_exceeded"
    default_remedy = "Raise the limit, or divide the work among more processes."

    def __init__(self, resource: str, limit: int, *, remedy: str = "") -> None:
        super().__init__(f"no room for more {resource}: the limit is {limit}", remedy=remedy, local=True)
        self.resource = resource
        self.limit = limit


class DeadlineExceeded(HandshakeError):
    """A phase used up its budget.

    Attributes:
        phase: ``connect`` or ``handshake``.
    """

    code = "deadline_exceeded"
    default_remedy = "Check the peer's load and the network between; a hung peer is found only by its deadline."

    def __init__(self, message: str, *, phase: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.phase = phase


class Closed(HandshakeError):
    """The connection has ended, so nothing can be sent on it."""

    code = "closed"
    default_remedy = "Open a new connection."
