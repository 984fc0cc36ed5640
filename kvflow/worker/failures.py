"""Which error a caller gets for a failed transfer: one table."""

import asyncio

from kvflow.errors import (
    DeadlineExceeded,
    KvflowError,
    PeerLost,
    ProtocolViolation,
    StaleLease,
    TransferCancelled,
    TransferFailed,
)
from kvflow.transfer import events

ERRORS: dict[str, type[TransferFailed]] = {
    StaleLease.code: StaleLease,
    PeerLost.code: PeerLost,
    "peer_closed": PeerLost,
    TransferCancelled.code: TransferCancelled,
    "cancelled": TransferCancelled,
    "closing": TransferCancelled,
    "key_removed": PeerLost,
    "metadata_invalid": ProtocolViolation,
    "bounds": ProtocolViolation,  # ours are checked when we bind, so that it is the peer's memory that is not there
}
"""Code of the scheduler or the transport -> error. Any other code is a plain ``TransferFailed``."""

CANCELLED = "the caller cancelled the pull"


def transfer_error(event: events.TransferFailed) -> TransferFailed:
    """Return the error that this event stands for."""
    about = {"request_id": event.request_id, "peer": event.peer}
    message = f"request {event.request_id!r}: {event.detail}"
    if event.code == DeadlineExceeded.code:
        return DeadlineExceeded(message, phase=event.phase, quarantined=event.quarantined, **about)
    kind = ERRORS.get(event.code, TransferFailed)
    return kind(message, quarantined=event.quarantined, **about)


def meeting_error(peer: str, code: str, detail: str) -> TransferFailed:
    """Return the error for whoever waits to meet a peer that is let go instead."""
    return ERRORS.get(code, TransferFailed)(f"{peer} cannot be read from: {detail}", peer=peer)


def as_ours(error: BaseException, request_id: str) -> KvflowError:
    """Return what ended a pull as one of our errors: its blocks are the caller's again."""
    if isinstance(error, KvflowError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return TransferCancelled(CANCELLED, request_id=request_id)
    failed = TransferFailed(f"the pull ended with {type(error).__name__}: {error}", request_id=request_id)
    failed.__cause__ = error  # as ``raise ... from`` does it
    return failed
