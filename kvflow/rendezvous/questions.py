"""What a member asks a worker over the control channel, and what the worker answers: msgpack, all of it bounded."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from handshake.messages import ANSWER_BYTES_MAX
from kvflow.errors import ProtocolViolation
from kvflow.leases.tickets import DIGEST_BYTES_MAX

Digest = Annotated[bytes, Meta(min_length=1, max_length=DIGEST_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]


class AskHeld(Struct, frozen=True, tag_field="type", tag="ask_held"):
    """Who keeps blocks of this content?

    Attributes:
        digests: of consecutive blocks from the first token on, chained: one list per group, or one list alone, of the
            first group. All of them are at most 48 KiB, in msgpack.
        wait_ms: how long the answer may wait for content that is being computed. This release does not wait.
        at_least: an answer with fewer digests of the first list is of no use.
    """

    digests: Annotated[tuple[tuple[Digest, ...], ...], Meta(min_length=1, max_length=256)]
    wait_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    at_least: Count = 0


class AnswerHeld(Struct, frozen=True, tag_field="type", tag="held"):
    """The lease with the longest prefix of what was asked for.

    Attributes:
        ticket: its text, as ``kv_transfer_params`` have it; empty if nothing is kept.
        count: how many digests of the first list it holds.
    """

    ticket: Annotated[str, Meta(max_length=ANSWER_BYTES_MAX)] = ""
    count: Count = 0


_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(AskHeld)
_answers = msgspec.msgpack.Decoder(AnswerHeld)
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: AskHeld | AnswerHeld) -> bytes:
    """Return a question or an answer as it travels."""
    return _encoder.encode(message)


def decode_question(encoded: bytes) -> AskHeld | None:
    """Return a member's question; None if it is none that this release knows."""
    try:
        return _questions.decode(encoded)
    except _DECODE_ERRORS:
        return None


def decode_answer(encoded: bytes, *, peer: str) -> AnswerHeld:
    """Return a worker's answer; empty bytes are that of a worker that does not know the question.

    Raises:
        ProtocolViolation: it is malformed.
    """
    try:
        return _answers.decode(encoded) if encoded else AnswerHeld()
    except _DECODE_ERRORS as error:
        raise ProtocolViolation(f"the peer's answer is invalid: {error}", peer=peer) from error
