"""Errors of ``handshake`` as errors of kvflow: the only place that knows both."""

from handshake import errors as theirs
from kvflow import errors as ours


class Distrusted(ours.AuthenticationFailed):
    """We do not trust the key that the ticket names, and nothing was dialled."""


class NotDialled(ours.CapacityExceeded):
    """This process lacks what it needs to dial, and nothing was dialled."""


def as_kvflow_error(error: theirs.HandshakeError, *, peer: str) -> ours.KvflowError:
    """Return our error for theirs; chain it with ``raise ... from error``."""
    mapped: ours.KvflowError
    match error:
        case theirs.ConfigInvalid() | theirs.LocalProtocolError():  # such as a manifest too large to publish
            mapped = ours.ConfigInvalid(error.message, remedy=error.remedy)
        case theirs.CapacityExceeded():
            mapped = NotDialled(error.resource, error.limit, remedy=error.remedy)
        case theirs.AuthenticationFailed():
            kind = Distrusted if error.local else ours.AuthenticationFailed
            mapped = kind(f"{peer}: {error.message}", remedy=error.remedy)
        case theirs.PeerRefused():
            reason = error.message.removeprefix(f"the peer refused ({error.refusal}): ")
            mapped = ours.PeerRefused(error.refusal, f"{peer}: {reason}", remedy=error.remedy)
        case theirs.RemoteProtocolError():
            mapped = ours.ProtocolViolation(error.message, peer=peer, remedy=error.remedy)
        case theirs.DeadlineExceeded():
            mapped = ours.DeadlineExceeded(error.message, phase=error.phase, peer=peer, remedy=error.remedy)
        case _:
            mapped = ours.PeerLost(error.message, peer=peer, remedy=error.remedy)
    return mapped
