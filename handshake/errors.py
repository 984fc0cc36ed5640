"""Every error that handshake raises to its caller, and the codes of failed connections.

The tree shows what is wrong or what to do::

    HandshakeError
    ├── AddressInvalid        fix the address or the secret
    ├── LocalProtocolError    this process tried to send a message that the protocol does not allow
    ├── RemoteProtocolError   the peer sent a message that the protocol does not allow
    ├── ConnectionRefused     the peer refused the connection, and said why
    ├── Unauthenticated       the peer has another cluster secret
    ├── ConnectionLost        the peer died, closed the connection, or cannot be reached
    │   └── WrongServer       another server answers at its address
    ├── SocketsExhausted      this process can open no more sockets or files
    ├── TimedOut              a phase took longer than its budget
    └── Closed                the connection has ended; open another one

Each has a stable ``code`` for programs, and its text ends with what to do.
"""

from enum import StrEnum
from typing import ClassVar


class CloseCode(StrEnum):
    """Why a connection failed. A newer peer may send another code: a received code is never looked up here."""

    VERSION_UNSUPPORTED = "version_unsupported"
    """The two sides have no protocol version in common. Install the same release on both."""
    PROTOCOL_VIOLATION = "protocol_violation"
    """A message was malformed, or came at the wrong time. Install the same release on both sides."""
    TOO_MANY_PEERS = "too_many_peers"
    """The peer has ``peers_max`` connections, and none ended for half of ``handshake_s``. A pull dials again for
    ``queue_s``. Use another producer."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """The peer has ``Limits.connections_per_key_max`` connections of this key. Close some of them."""
    RATE_EXCEEDED = "rate_exceeded"
    """This side sent more messages or leases per second than the peer's ``Limits`` allow. Send fewer."""
    KEY_REMOVED = "key_removed"
    """This side's public key was removed from the peer's allowed keys. Add it again to connect."""
    KEY_UNKNOWN = "key_unknown"
    """The public key is not among the allowed keys. Add it. ZeroMQ closes the connection without this code."""
    UNAUTHENTICATED = "unauthenticated"
    """The connection is not encrypted, has another secret, or sent nothing. Give both sides one secret.
    ZeroMQ closes the connection without this code."""
    BUSY = "busy"
    """``Limits.pending_handshakes_max`` handshakes are in progress without encryption, and this one is the oldest or
    the newest. Connect again in a moment."""
    PUBLICATION_REFUSED = "publication_refused"
    """The peer cannot use what this side published. Its log says why."""
    CLOSING = "closing"
    """The peer is closing. Use another one."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    """The handshake took longer than ``Limits.handshake_s``. Check the load and the network."""
    SILENT = "silent"
    """Nothing was received for ``Limits.silence_s_max``. Check that the other side runs."""
    CONGESTED = "congested"
    """This side has not read what it asked for: see ``Limits.outgoing_bytes_max``. Ask less at once."""
    OVERFLOWED = "overflowed"
    """The peer sent more bytes than messages may have. The connection was closed. This code is never sent."""
    CONNECTION_LOST = "connection_lost"
    """The connection broke. Check that the peer runs. This code is never sent."""
    INTERNAL_ERROR = "internal_error"
    """The peer failed while it handled a message of this connection. Its log has the traceback."""


class HandshakeError(Exception):
    """Base of all errors of handshake.

    Attributes:
        code: stable name of the kind of error.
        remedy: what to do.
        local: True if this process is the cause. Nothing was sent, and the peer may work.
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


class AddressInvalid(HandshakeError):
    """An address or a secret cannot be used, or would be unsafe."""

    code = "config_invalid"
    default_remedy = "Give an address of the form tcp://HOST:PORT that this host can use."


class LocalProtocolError(HandshakeError):
    """This process tried to send a message that the protocol does not allow. Nothing was sent."""

    code = "local_protocol_error"
    default_remedy = "This is a defect of the calling program: report it with the traceback."


class RemoteProtocolError(HandshakeError):
    """The peer sent a message that the protocol does not allow.

    Attributes:
        violation: what is wrong: ``frame_count``, ``frame_size``, ``format``, ``malformed``, ``digest`` or
            ``unexpected``.
    """

    code = "protocol_violation"
    default_remedy = "Run the same release on both sides. If they already do, treat the peer as hostile."

    def __init__(self, message: str, *, violation: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.violation = violation


class ConnectionRefused(HandshakeError):
    """The peer answered with a refusal; ``refusal``: its stable code, for example ``version_unsupported``."""

    code = "peer_refused"
    default_remedy = "Look up the peer's reason under Refusals in docs/reference/errors.md."

    def __init__(self, refusal: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"the peer refused ({refusal}): {message}", remedy=remedy)
        self.refusal = refusal


class Unauthenticated(HandshakeError):
    """The peer has another cluster secret, or only one side uses encryption."""

    code = "authentication_failed"
    default_remedy = (
        "Give every worker the same secret, and list the keys of its peers if it has a key of its own. Check that the "
        "address is a worker's."
    )


class ConnectionLost(HandshakeError):
    """The peer died, closed the connection, or cannot be reached."""

    code = "connection_lost"
    default_remedy = "Check that the peer runs and that its address is reachable from here."


class WrongServer(ConnectionLost):
    """Another server answers at the address, or at one of several.

    Attributes:
        answered: the ``Identity`` of that server if the address is the only one; else None.
    """

    code = "wrong_server"
    default_remedy = "Wait until the name leads to the server, or give each server an address or a name of its own."

    def __init__(self, message: str, *, answered: object = None) -> None:
        super().__init__(message)
        self.answered = answered


class SocketsExhausted(HandshakeError):
    """This process can open no more sockets or files. It did not connect."""

    code = "capacity_exceeded"
    default_remedy = "Raise the limit, or divide the work among more processes."

    def __init__(self, resource: str, limit: int, *, remedy: str = "") -> None:
        super().__init__(f"no room for more {resource}: the limit is {limit}", remedy=remedy, local=True)
        self.resource = resource
        self.limit = limit


class TimedOut(HandshakeError):
    """A phase took longer than its budget; ``phase``: ``connect`` or ``handshake``."""

    code = "deadline_exceeded"
    default_remedy = "Check the peer's load and the network. Only a deadline finds a hung peer."

    def __init__(self, message: str, *, phase: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.phase = phase


class Closed(HandshakeError):
    """The connection has ended. Nothing can be sent on it."""

    code = "closed"
    default_remedy = "Open a new connection."
