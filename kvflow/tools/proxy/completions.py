"""The requests to servers that a proxy makes of a client's, and the record of what became of it.

A field that is not read here keeps the bytes in which it came, and so does the ticket. ``kvflow trace`` reads the
records, and ``docs/reference/cli.md`` lists their fields.
"""

import re
import time
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec
import structlog
from msgspec import Raw, Struct, field, to_builtins

from kvflow.observability.logs import Repeats

PARAMS = "kv_transfer_params"

# Asks a prefill server to keep the cache of this prompt, and to answer where it is.
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}

NULL, FALSE, ONE, OFFERED = (Raw(msgspec.json.encode(value)) for value in (None, False, 1, OFFER))

# What a prefill server is always asked for, by path. The Responses API would keep the answer for later questions.
ONE_TOKEN: Final = {
    "/v1/completions": {"max_tokens": ONE},
    "/v1/chat/completions": {"max_tokens": ONE},
    "/v1/responses": {"max_output_tokens": ONE, "store": FALSE},
    "/v1/messages": {"max_tokens": ONE},
}
# Likewise if the client sends them. Their values are not read: a server may understand more types of JSON than we do.
REPLACED: Final = {"stream": FALSE, "n": ONE, "max_completion_tokens": ONE, "background": FALSE}
DROPPED: Final = ("stream_options", "min_tokens")  # refused without a stream, and above one token

# All other fields together, with their names: tools and schemas have some hundred KiB. Reading each takes a microsecond
# or more of the event loop.
OTHERS_BYTES_MAX: Final = 1 << 20

# Matches a list of anything but token ids; a list of token ids is one prompt.
LIST_OF_PROMPTS: Final = re.compile(rb"\s*\[\s*[^\s\d\]-]")

# Fields for which no prefill server is asked, and why.
ALONE: Final = {
    "prompt_embeds": "prompt_embeds may be a second prompt",
    "previous_response_id": "only the decode server has the previous response",
}

# An error in a stream of each API: ``data: {"error": ...}``, ``event: error``, ``event: response.failed``.
STREAM_ERROR: Final = re.compile(
    rb"""^(?:data: ?\{\s*"error"\s*:\s*[^\sn]|event: ?(?:error|response\.failed)\r?\n).{0,500}""", re.MULTILINE
)
LINE_BYTES: Final = 64  # of a line, in which an error shows

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RequestMalformed(Exception):
    """A client's request cannot be forwarded; the message says why."""


class Completion(Struct, frozen=True):
    """A client's request."""

    fields: dict[str, Raw]  # of its JSON object, each as it was sent
    alone: str = ""  # why no prefill server is asked; empty if one is


class _LongFields(Struct, frozen=True):
    """Fields of any length, whose values are not read here."""

    prompt: Raw = NULL
    messages: Raw = NULL
    prompt_embeds: Raw = NULL
    input: Raw = NULL
    instructions: Raw = NULL
    system: Raw = NULL


LONG: Final = _LongFields.__struct_fields__


class _PrefillAnswer(Struct, frozen=True):
    kv_transfer_params: Raw = NULL


class _Error(Struct, frozen=True):
    message: str


class _ErrorAnswer(Struct, frozen=True):
    error: _Error


class _TransferParams(Struct, frozen=True):
    do_remote_prefill: bool | None = None


class _Pushed(Struct, frozen=True):
    """Parameters of a prefill server whose prompts are found by their content."""

    remote_host: str
    remote_port: int
    transfer_mode: Literal["push"]


def read_completion(body: bytes) -> Completion:
    """Read the body of a request for a completion.

    Raises:
        RequestMalformed: it is no JSON object, has ``kv_transfer_params``, or fields that are too long.
    """
    try:
        # As text: msgspec then skips the characters of fields that are not asked for.
        text = body.decode()
        known = msgspec.json.decode(text, type=_LongFields)
        others = len(body) - sum(len(getattr(known, name)) for name in LONG)
        if others > OTHERS_BYTES_MAX:
            raise RequestMalformed(f"the fields other than {', '.join(LONG)} have more than {OTHERS_BYTES_MAX} bytes")
        fields = msgspec.json.decode(text, type=dict[str, Raw])
        if msgspec.json.decode(fields.get(PARAMS, NULL)) is not None:
            raise RequestMalformed(f"clients must not send {PARAMS}; servers set it")
        return Completion(fields, alone=_why_alone(fields))
    except UNREADABLE as error:
        raise RequestMalformed(f"the body is not a JSON object that can be read: {error}") from error


def prefill_body(completion: Completion, path: str, hint: Raw | None = None) -> bytes:
    """Return the body for a prefill server: the same prompt, one token, ``OFFER``, and who may have its beginning."""
    fields = {name: REPLACED.get(name, value) for name, value in completion.fields.items() if name not in DROPPED}
    params = OFFERED if hint is None else OFFER | {"kv_hint": hint}
    return msgspec.json.encode({**fields, **ONE_TOKEN[path], PARAMS: params})


def decode_body(completion: Completion, params: Raw | None) -> bytes:
    """Return the body for a decode server: the request, with the ticket of a prefill server if there is one."""
    fields = {name: value for name, value in completion.fields.items() if name != PARAMS}
    return msgspec.json.encode(fields if params is None else {**fields, PARAMS: params})


def read_params(answer: bytes) -> Raw | None:
    """Return the ticket in a prefill server's answer, as it was sent; None if it has none."""
    try:
        params = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
        read = msgspec.json.decode(params, type=_TransferParams | None)
    except UNREADABLE:
        return None
    return params if read is not None and read.do_remote_prefill else None


def early_params(params: Raw) -> Raw | None:
    """Return what to send with the next prompt before it has a ticket; None if the server offers none early."""
    try:
        told = msgspec.json.decode(params, type=_Pushed)
    except UNREADABLE:
        return None
    place = {"remote_host": told.remote_host, "remote_port": told.remote_port}
    return Raw(msgspec.json.encode({"do_remote_prefill": True, "do_remote_decode": False, **place}))


def without_params(answer: bytes, *, failed: bool) -> bytes:
    """Return a decode server's answer without ``kv_transfer_params``; ``failed``: its text may quote the request."""
    name = PARAMS.encode()
    if name not in answer:
        return answer
    try:
        fields = msgspec.json.decode(answer, type=dict[str, Raw])
    except UNREADABLE:
        fields = {}
    fields.pop(PARAMS, None)
    kept = msgspec.json.encode(fields)
    return error_body("the decode server refused the request") if failed and name in kept else kept


def error_body(message: str, kind: str = "server_error", code: str | None = None) -> bytes:
    """Return an error as OpenAI's clients expect it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_message(answer: bytes) -> str:
    """Return the message of a server's error, or the beginning of what it says; empty if that may have a ticket."""
    if PARAMS.encode() in answer:
        return ""
    try:
        message = msgspec.json.decode(answer, type=_ErrorAnswer).error.message
    except UNREADABLE:
        message = answer[:ERROR_CHARACTERS_MAX].decode(errors="replace")
    return shown_error(message)


class StreamErrors:
    """Finds the first error among the events of a stream, however they are cut into pieces."""

    def __init__(self) -> None:
        self._line = b""  # the beginning of the last line

    def find(self, piece: bytes) -> str:
        """Take one piece; return the event of an error that begins in it, or an empty text."""
        text = self._line + piece
        self._line = text[text.rfind(b"\n") + 1 :][:LINE_BYTES]
        found = STREAM_ERROR.search(text)
        return found[0].decode(errors="replace") if found else ""


def _why_alone(fields: dict[str, Raw]) -> str:
    """Return why the decode server must compute the prompt, or an empty text.

    A server answers one ticket for all prompts of a request: that of the first.
    """
    for name, reason in ALONE.items():
        if bytes(fields.get(name, NULL)) != bytes(NULL):
            return reason
    prompt = fields.get("prompt", NULL)
    if LIST_OF_PROMPTS.match(prompt):
        try:
            msgspec.json.decode(prompt, type=tuple[Raw])  # ends at a second element
        except msgspec.ValidationError:
            return "there are several prompts, and one ticket"
    return ""


ERROR_CHARACTERS_MAX: Final = 500


class EndCause(StrEnum):
    """Why a request failed; empty if its client has a server's whole answer. The values are stable."""

    ANSWERED = ""
    CLIENT_LOST = "client_lost"
    DECODE_FAILED = "decode_failed"
    DECODE_UNREACHABLE = "decode_unreachable"
    PROXY_STOPPED = "proxy_stopped"
    STREAM_BROKEN = "stream_broken"


REMEDIES: Final = {
    EndCause.ANSWERED: "",
    EndCause.CLIENT_LOST: "Do nothing if the user canceled. Otherwise raise the timeout of the client, or of the load "
    "balancer before it, or find out which phase took that long.",
    EndCause.DECODE_FAILED: "Read the log of the named decode server.",
    EndCause.DECODE_UNREACHABLE: "Start a decode server, or correct the addresses that --decode names.",
    EndCause.PROXY_STOPPED: "Send no new requests to a proxy before you stop it, and send this request again.",
    EndCause.STREAM_BROKEN: "Read the log of the named decode server: it died, or closed the connection. Send the "
    "request again.",
}


class FailedAttempt(Struct, frozen=True):
    """A server that failed before the next one was asked. ``role``: ``prefill`` or ``decode``."""

    role: str
    server: str
    error: str


UNWRITTEN: Final = ("started", "ended", "outcome", "detail")
"""Fields of a ``RequestRecord`` that its line in the log has not, or not of every request."""


class RequestRecord(Struct, kw_only=True):
    """What becomes of one request. Thread: the loop's."""

    request_id: str  # sent to both servers
    client: str = ""  # ``host:port`` of who asks
    called_at: float = field(default_factory=time.time)  # when the request had arrived
    started: float = field(default_factory=time.monotonic)  # likewise, on the monotonic clock
    phase: str = "prefill"  # then ``decode`` until the first bytes of an answer, and ``answer``
    status: int = 0  # of HTTP; 0 while there is none
    prefill_server: str = ""  # base URL of the server that was last asked to compute the prompt; empty if it failed
    decode_server: str = ""  # of the server that was last asked for the answer; empty if it cannot be reached
    failed_attempts: list[FailedAttempt] = []  # servers that failed before these, in order
    prefill_s: float | None = None  # when the prefill server had answered; None if the request ended before
    first_bytes_s: float | None = None  # when the first bytes of a streamed answer came; None of other answers
    sent_bytes: int = 0  # of the answer, as far as the connection to the client took them
    ended: bool = False  # the last event of a stream was sent. Clients then hang up before the connection ends.
    outcome: EndCause = EndCause.ANSWERED
    detail: str = ""  # what happened, if it failed

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    def attempt_failed(self, role: Literal["prefill", "decode"], error: object) -> str:
        """Note that the server of a role failed; return what to log of it."""
        shown = shown_error(error)
        server = self.prefill_server if role == "prefill" else self.decode_server
        self.failed_attempts.append(FailedAttempt(role, server, shown))
        if role == "prefill":
            self.prefill_server = ""
        else:
            self.decode_server = ""
        return shown

    def on_bytes(self) -> None:
        """Note that bytes of a streamed answer came."""
        if self.first_bytes_s is None:
            self.first_bytes_s = self.elapsed_s
            self.phase = "answer"

    def fail(self, outcome: EndCause, detail: object) -> str:
        """Note why there is no whole answer, if this is the first reason; return what to log of it."""
        shown = shown_error(detail)
        if self.outcome is EndCause.ANSWERED and not (self.ended and outcome is EndCause.CLIENT_LOST):
            self.outcome, self.detail = outcome, shown
        return shown

    def write(self, log: structlog.stdlib.BoundLogger, repeats: Repeats) -> None:
        """Log the record: ``request.answered``, or ``request.failed`` with a code and a remedy."""
        fields: dict[str, Any] = {
            **{name: value for name, value in to_builtins(self).items() if name not in UNWRITTEN},
            "prefilled": bool(self.prefill_server) and self.prefill_s is not None,
            "elapsed_s": self.elapsed_s,
        }
        fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        if self.outcome is EndCause.ANSWERED:
            log.info("request.answered", **fields)
            return
        fields |= {"code": self.outcome.value, "detail": self.detail, "remedy": REMEDIES[self.outcome]}
        if self.outcome is EndCause.CLIENT_LOST:
            log.info("request.failed", **fields)
            return
        level, further = repeats.level_of(self.outcome, self.decode_server)
        log.log(level, "request.failed", **fields, **further)


def shown_error(error: object) -> str:
    """Return what to log of an error or a text: not empty, and not too long."""
    text = str(error) if isinstance(error, str) else repr(error)
    return text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[: ERROR_CHARACTERS_MAX - 3]}..."
