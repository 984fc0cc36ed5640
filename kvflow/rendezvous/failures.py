"""Turn errors of ``handshake`` into errors of kvflow. Only this module knows both."""

from handshake import errors as theirs
from kvflow import errors as ours


class Distrusted(ours.AuthenticationFailed):
    """We do not trust the key that the ticket names, and nothing was dialed."""


class NotDialed(ours.CapacityExceeded):
    """This process lacks what it needs to dial, and nothing was dialed."""


def as_kvflow_error(error: theirs.HandshakeError, *, peer: str) -> ours.KvflowError:
    """Return our error for theirs; chain it with ``raise ... from error``."""
    mapped: ours.KvflowError
    match error:
        case theirs.AddressInvalid() | theirs.LocalProtocolError():  # such as a manifest too large to publish
            mapped = ours.ConfigInvalid(error.message, remedy=error.remedy)
        case theirs.SocketsExhausted():
            mapped = NotDialed(error.resource, error.limit, remedy=error.remedy)
        case theirs.Unauthenticated():
            kind = Distrusted if error.local else ours.AuthenticationFailed
            mapped = kind(_about(peer, error.message), remedy=error.remedy)
        case theirs.ConnectionRefused():
            reason = error.message.removeprefix(f"the peer refused ({error.refusal}): ")
            mapped = ours.PeerRefused(error.refusal, _about(peer, reason), remedy=error.remedy)
        case theirs.RemoteProtocolError():
            mapped = ours.ProtocolViolation(error.message, peer=peer, remedy=error.remedy)
        case theirs.TimedOut():
            mapped = ours.DeadlineExceeded(error.message, phase=error.phase, peer=peer, remedy=error.remedy)
        case _:
            mapped = ours.PeerLost(error.message, peer=peer, remedy=error.remedy)
    return mapped


def _about(peer: str, message: str) -> str:
    """Return a message that names the peer, once."""
    return message if message.startswith(peer) else f"{peer}: {message}"
