"""What became of one request: which servers it used, what failed, and how far its answer came. One record tells it.

``kvflow trace`` reads these records, and ``docs/reference/cli.md`` lists their fields.
"""

import time
from enum import StrEnum
from typing import Any, Final, Literal

import structlog
from msgspec import Struct, field

from kvflow.clock import monotonic

ERROR_CHARACTERS_MAX: Final = 500
"""Of a text that a server or the system chose."""


class Outcome(StrEnum):
    """Why a request failed; empty if its client has a server's whole answer. The names stay from release to release."""

    ANSWERED = ""
    CLIENT_LOST = "client_lost"
    DECODE_FAILED = "decode_failed"
    DECODE_UNREACHABLE = "decode_unreachable"
    PROXY_STOPPED = "proxy_stopped"
    STREAM_BROKEN = "stream_broken"


REMEDIES: Final = {
    Outcome.ANSWERED: "",
    Outcome.CLIENT_LOST: "Do nothing if the user canceled. Otherwise raise the timeout of the client, or of the load "
    "balancer before it, or find out which phase took that long.",
    Outcome.DECODE_FAILED: "Read the log of the named decode server.",
    Outcome.DECODE_UNREACHABLE: "Start a decode server, or correct the addresses that --decode names.",
    Outcome.PROXY_STOPPED: "Send no new requests to a proxy before you stop it, and send this request again.",
    Outcome.STREAM_BROKEN: "Read the log of the named decode server: it died, or closed the connection. Send the "
    "request again.",
}


class FailedAttempt(Struct, frozen=True):
    """A server that was asked in vain, before the next one.

    Attributes:
        role: ``prefill`` or ``decode``.
        server: its base URL.
        error: what it answered, or how it could not be reached.
    """

    role: str
    server: str
    error: str


class RequestRecord(Struct, kw_only=True):
    """What becomes of one request. Thread: the loop's.

    Attributes:
        request_id: its name, which both servers are told.
        client: ``host:port`` of who asks.
        called_at: seconds since 1970 when the request had arrived.
        started: likewise, on the monotonic clock.
        phase: ``prefill``, ``decode`` until the first bytes of an answer, or ``answer``.
        status: of HTTP; 0 while there is none.
        prefill_server: base URL of the server that was asked last to compute the prompt; empty if it failed.
        decode_server: likewise, of the server that was asked for the answer; empty if it cannot be reached.
        failed_attempts: servers that were asked before these, in order.
        prefill_s: when the prefill server had answered; None if the request ended before.
        first_bytes_s: when the first bytes of a streamed answer came; None before, and of other answers.
        sent_bytes: of the answer, as far as the connection to the client took them.
        ended: whether the client was sent the last event of a stream. Clients hang up then, before the connection ends.
        outcome: how it ended.
        detail: what happened, if it failed.
    """

    request_id: str
    client: str = ""
    called_at: float = field(default_factory=time.time)
    started: float = field(default_factory=monotonic)
    phase: str = "prefill"
    status: int = 0
    prefill_server: str = ""
    decode_server: str = ""
    failed_attempts: list[FailedAttempt] = []
    prefill_s: float | None = None
    first_bytes_s: float | None = None
    sent_bytes: int = 0
    ended: bool = False
    outcome: Outcome = Outcome.ANSWERED
    detail: str = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return monotonic() - self.started

    def attempt_failed(self, role: Literal["prefill", "decode"], error: object) -> str:
        """Note that the server of a role was asked in vain; return what to log of it."""
        told = shown_error(error)
        if role == "prefill":
            self.failed_attempts.append(FailedAttempt(role, self.prefill_server, told))
            self.prefill_server = ""
        else:
            self.failed_attempts.append(FailedAttempt(role, self.decode_server, told))
            self.decode_server = ""
        return told

    def on_bytes(self) -> None:
        """Note that bytes of a streamed answer came."""
        if self.first_bytes_s is None:
            self.first_bytes_s = self.elapsed_s
            self.phase = "answer"

    def fail(self, outcome: Outcome, detail: object) -> str:
        """Note why there is no whole answer; what failed first counts. Return what to log of it."""
        told = shown_error(detail)
        if self.outcome is Outcome.ANSWERED and not (self.ended and outcome is Outcome.CLIENT_LOST):
            self.outcome, self.detail = outcome, told
        return told

    def write(self, log: structlog.stdlib.BoundLogger) -> None:
        """Log the record: ``request.answered``, or ``request.failed`` with a code and a remedy."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "status": self.status,
            "prefilled": bool(self.prefill_server) and self.prefill_s is not None,
            "prefill_server": self.prefill_server,
            "decode_server": self.decode_server,
            "failed_attempts": [
                {"role": each.role, "server": each.server, "error": each.error} for each in self.failed_attempts
            ],
            "phase": self.phase,
            "sent_bytes": self.sent_bytes,
            "called_at": round(self.called_at, 6),
            "prefill_s": _rounded(self.prefill_s),
            "first_bytes_s": _rounded(self.first_bytes_s),
            "elapsed_s": round(self.elapsed_s, 6),
        }
        if self.outcome is Outcome.ANSWERED:
            log.info("request.answered", **fields)
            return
        fields |= {"code": self.outcome.value, "detail": self.detail, "remedy": REMEDIES[self.outcome]}
        tell = log.info if self.outcome is Outcome.CLIENT_LOST else log.warning
        tell("request.failed", **fields)


def shown_error(error: object) -> str:
    """Return what to log of an error, or of a text: never empty, and not too long."""
    text = str(error) if isinstance(error, str) else repr(error)
    return text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[: ERROR_CHARACTERS_MAX - 3]}..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
