"""What a member asks a worker over the control channel, and what the worker answers: msgpack, all of it bounded."""

from contextlib import suppress
from typing import Annotated, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from handshake.messages import ANSWER_BYTES_MAX, Nonce
from kvflow.errors import ProtocolViolation
from kvflow.leases.tickets import DIGEST_BYTES_MAX, BlockIds

Digest = Annotated[bytes, Meta(min_length=1, max_length=DIGEST_BYTES_MAX)]
Digests = Annotated[tuple[Digest, ...], Meta(max_length=4096)]  # looked up in half a millisecond at most
COUNT_MAX = 1 << 20
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
IDS_MAX = ANSWER_BYTES_MAX // 10  # block ids of one answer. Each takes at most 5 bytes.
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
WaitMs = Annotated[int, Meta(ge=0, le=86_400_000)]


class AskHeld(Struct, frozen=True, tag_field="type", tag="ask_held"):
    """Who has a lease on blocks of this content?

    Attributes:
        digests: of consecutive blocks from the first token on, chained: one list per group, or one list alone, of the
            first group. All of them are at most 48 KiB, in msgpack.
        wait_ms: how long the answer may wait for such a lease. Unless it is 0, an offer all of whose digests are among
            these answers, too, and is then given to nobody else; otherwise only what is kept.
        at_least: an answer with fewer digests of the first list is of no use.
    """

    digests: Annotated[tuple[Digests, ...], Meta(min_length=1, max_length=256)]
    wait_ms: WaitMs = 0
    at_least: Count = 0


class AnswerHeld(Struct, frozen=True, tag_field="type", tag="held"):
    """The lease with the longest prefix of what was asked for.

    Attributes:
        ticket: its text, as ``kv_transfer_params`` have it; empty if there is none.
        count: how many digests of the first list it holds.
    """

    ticket: Annotated[str, Meta(max_length=ANSWER_BYTES_MAX)] = ""
    count: Count = 0


class AskSettled(Struct, frozen=True, tag_field="type", tag="ask_settled"):
    """What has settled of this lease?

    Attributes:
        slot, epoch: of the lease.
        known: how many blocks of each group the asker has been told.
        above: the answer waits for so many tokens, for the seal, or for the end of the lease.
        wait_ms: how long the answer may wait.
    """

    slot: Annotated[int, Meta(ge=0, le=1 << 24)]
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    known: Annotated[tuple[Count, ...], Meta(max_length=256)]
    above: Tokens = 0
    wait_ms: WaitMs = 0


class AnswerSettled(Struct, frozen=True, tag_field="type", tag="settled"):
    """What has settled of a lease.

    Attributes:
        num_tokens: tokens whose blocks are written; before the seal, those in whole blocks of every group that settles.
        block_ids: the blocks that hold them, group by group, behind those that the asker knows.
        sealed: whether that is all of it. Only then are there blocks of windows and states.
        ended: how the lease has ended; empty while it is held, and before it is admitted.
    """

    num_tokens: Tokens = 0
    block_ids: Annotated[tuple[BlockIds, ...], Meta(max_length=256)] = ()
    sealed: bool = False
    ended: Annotated[str, Meta(max_length=32)] = ""


class Withdraw(Struct, frozen=True, tag_field="type", tag="withdraw"):
    """Answer an open question at once, with nothing: nobody waits for it. ``nonce``: its number on this connection."""

    nonce: Nonce


class _Typed(Struct):
    type: Annotated[str, Meta(max_length=32)]


Question = AskHeld | AskSettled | Withdraw
Answer = AnswerHeld | AnswerSettled
AnswerT = TypeVar("AnswerT")

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(AnswerHeld)
_settled = msgspec.msgpack.Decoder(AnswerSettled)
_types = msgspec.msgpack.Decoder(_Typed)
_KNOWN = {each.__struct_config__.tag for each in get_args(Question)}
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: Question | Answer) -> bytes:
    """Return a question or an answer as it travels."""
    return _encoder.encode(message)


def decode_question(encoded: bytes, *, peer: str) -> Question | None:
    """Return a member's question; None if it is of a type that only newer releases know.

    Raises:
        ProtocolViolation: it is malformed.
    """
    try:
        return _decode(encoded, _questions, peer)
    except ProtocolViolation:
        with suppress(*_DECODE_ERRORS):
            if _types.decode(encoded).type not in _KNOWN:
                return None
        raise


def decode_answer(encoded: bytes, *, peer: str) -> AnswerHeld:
    """Return a worker's answer to ``AskHeld``; empty bytes are that of a worker that does not know the question.

    Raises:
        ProtocolViolation: it is malformed.
    """
    return _decode(encoded, _answers, peer) if encoded else AnswerHeld()


def decode_settled(encoded: bytes, *, peer: str) -> AnswerSettled:
    """Return a worker's answer to ``AskSettled``; raise ``ProtocolViolation`` if it is malformed, or empty."""
    return _decode(encoded, _settled, peer)


def _decode(encoded: bytes, decoder: "msgspec.msgpack.Decoder[AnswerT]", peer: str) -> AnswerT:
    try:
        return decoder.decode(encoded)
    except _DECODE_ERRORS as error:
        raise ProtocolViolation(f"what the peer asks or answers is invalid: {error}", peer=peer) from error
