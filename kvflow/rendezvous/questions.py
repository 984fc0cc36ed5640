"""What a member asks a worker over the control channel, and what the worker answers: msgpack, all of it bounded."""

from contextlib import suppress
from typing import Annotated, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from handshake.messages import ANSWER_BYTES_MAX, Nonce
from kvflow.errors import CapacityExceeded, ProtocolViolation
from kvflow.leases.tickets import DIGEST_BYTES_MAX, BlockIds, LeaseName
from kvflow.leases.told import END_BYTES, PIECE_MAX

ASKED_MAX = 4096  # digests of one question: looked up in half a millisecond at most
AskedDigests = Annotated[
    tuple[Annotated[bytes, Meta(min_length=1, max_length=DIGEST_BYTES_MAX)], ...], Meta(max_length=ASKED_MAX)
]
COUNT_MAX = 1 << 20
BlockCount = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
LEASES_ASKED_MAX = 64  # of one question: decoded and looked up in 0.3 ms
IDS_MAX = ANSWER_BYTES_MAX // 10  # block ids of one answer. Each takes at most 5 bytes.
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
ASK_LATER = "Ask again in a moment. A question that needs at_least so many digests waits with those from there on only."
WaitMs = Annotated[int, Meta(ge=0, le=86_400_000)]
ChangeNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Ends = Annotated[bytes, Meta(max_length=END_BYTES * PIECE_MAX)]


class AskHeld(Struct, frozen=True, tag_field="type", tag="ask_held"):
    """Who has a lease on blocks of this content?

    Attributes:
        digests: of consecutive blocks of the first group, from the first token on, chained; at most 48 KiB, in msgpack.
        wait_ms: how long the answer may wait for such a lease. Unless it is 0, an offer all of whose digests are among
            these answers, too, and is then given to nobody else; otherwise only what is kept.
        at_least: an answer with fewer digests is of no use.
    """

    digests: AskedDigests
    wait_ms: WaitMs = 0
    at_least: BlockCount = 0


class AnswerHeld(Struct, frozen=True, tag_field="type", tag="held"):
    """The lease with the longest prefix of what was asked for.

    Attributes:
        ticket: its text, as ``kv_transfer_params`` have it; empty if there is none.
        count: how many of the digests lead to its last one that was asked for.
    """

    ticket: Annotated[str, Meta(max_length=ANSWER_BYTES_MAX)] = ""
    count: BlockCount = 0


class AskSettled(Struct, frozen=True, tag_field="type", tag="ask_settled"):
    """What has settled of these leases?

    Attributes:
        leases: each with the MAC of its ticket. With another one a lease is unknown.
        known: how many blocks of each group the reader has been told, of each lease.
        above: the answer waits until one of the leases has so many tokens, is sealed, or has ended.
        wait_ms: how long the answer may wait.
    """

    leases: Annotated[tuple[LeaseName, ...], Meta(min_length=1, max_length=LEASES_ASKED_MAX)]
    known: Annotated[tuple[BlockCount, ...], Meta(max_length=256)]
    above: Tokens = 0
    wait_ms: WaitMs = 0


class Settled(Struct, frozen=True):
    """What has settled of a lease.

    Attributes:
        num_tokens: tokens whose blocks are written; before the seal, those in whole blocks of every group that settles.
        block_ids: the blocks that hold them, group by group, behind those that the reader knows; no group before the
            lease is admitted.
        sealed: whether that is all of it. Only then are there blocks of windows and states.
        ended: how the lease has ended; empty while it is held, and before it is admitted.
    """

    num_tokens: Tokens = 0
    block_ids: Annotated[tuple[BlockIds, ...], Meta(max_length=256)] = ()
    sealed: bool = False
    ended: Annotated[str, Meta(max_length=32)] = ""


class AnswerSettled(Struct, frozen=True, tag_field="type", tag="settled"):
    """What has settled of each lease that was asked about, in their order."""

    leases: Annotated[tuple[Settled, ...], Meta(max_length=LEASES_ASKED_MAX)]


class AskKept(Struct, frozen=True, tag_field="type", tag="ask_kept"):
    """Which ends have the leases that you keep, and which have gone?

    Attributes:
        since: the last change that we know, as ``AnswerKept.until``; 0: we know nothing.
        begun: as the last answer had it.
        wait_ms: how long the answer may wait for the next change.
    """

    since: ChangeNumber = 0
    begun: ChangeNumber = 0
    wait_ms: WaitMs = 0


class AnswerKept(Struct, frozen=True, tag_field="type", tag="kept"):
    """Ends of kept leases, or the next piece of them.

    Attributes:
        until: number of the last change that is told, in this incarnation.
        begun: if it is not the number in the question, forget what was told before: all is told again.
        new: the first 8 bytes of digests at ends that leases have, one after the other.
        gone: likewise, of ends that no lease has now. Others may be among them that were never told.
        is_all: whether everything is told now. Otherwise ask again; or there are more leases than the worker tells.
    """

    until: ChangeNumber = 0
    begun: ChangeNumber = 0
    new: Ends = b""
    gone: Ends = b""
    is_all: bool = False


class NoRoom(Struct, frozen=True, tag_field="type", tag="no_room"):
    """The question cannot wait: too many others do. ``limit``: bytes of all questions that wait at this worker."""

    limit: Annotated[int, Meta(ge=0, le=1 << 40)]


class Withdraw(Struct, frozen=True, tag_field="type", tag="withdraw"):
    """Answer an open question at once, with nothing: nobody waits for it. ``nonce``: its number on this connection."""

    nonce: Nonce


class _Typed(Struct):
    type: Annotated[str, Meta(max_length=32)]


PeerQuestion = AskHeld | AskSettled | AskKept | Withdraw
PeerAnswer = AnswerHeld | AnswerSettled | AnswerKept | NoRoom
AnswerT = TypeVar("AnswerT")

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[PeerQuestion] = msgspec.msgpack.Decoder(PeerQuestion)
_answers: msgspec.msgpack.Decoder[AnswerHeld | NoRoom] = msgspec.msgpack.Decoder(AnswerHeld | NoRoom)
_settled: msgspec.msgpack.Decoder[AnswerSettled | NoRoom] = msgspec.msgpack.Decoder(AnswerSettled | NoRoom)
_kept: msgspec.msgpack.Decoder[AnswerKept | NoRoom] = msgspec.msgpack.Decoder(AnswerKept | NoRoom)
_types = msgspec.msgpack.Decoder(_Typed)
_KNOWN = {each.__struct_config__.tag for each in get_args(PeerQuestion)}
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: PeerQuestion | PeerAnswer) -> bytes:
    """Return a question or an answer as it travels."""
    return _encoder.encode(message)


def decode_question(encoded: bytes, *, peer: str) -> PeerQuestion | None:
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
        CapacityExceeded: the worker has no room for the question to wait.
        ProtocolViolation: it is malformed.
    """
    return _answered(_decode(encoded, _answers, peer), peer) if encoded else AnswerHeld()


def decode_settled(encoded: bytes, *, peer: str) -> AnswerSettled:
    """Return a worker's answer to ``AskSettled``; raise as ``decode_answer``, also if it is empty."""
    return _answered(_decode(encoded, _settled, peer), peer)


def decode_kept(encoded: bytes, *, peer: str) -> AnswerKept | None:
    """Return a worker's answer to ``AskKept``; None if it tells nothing. Raises as ``decode_answer``."""
    answer = _answered(_decode(encoded, _kept, peer), peer) if encoded else None
    if answer is not None and (len(answer.new) % END_BYTES or len(answer.gone) % END_BYTES):
        raise ProtocolViolation("what the peer tells ends within a digest", peer=peer)
    return answer


def _answered(answer: AnswerT | NoRoom, peer: str) -> AnswerT:
    if isinstance(answer, NoRoom):
        raise CapacityExceeded(f"bytes of questions that wait at {peer}", answer.limit, remedy=ASK_LATER)
    return answer


def _decode(encoded: bytes, decoder: "msgspec.msgpack.Decoder[AnswerT]", peer: str) -> AnswerT:
    try:
        return decoder.decode(encoded)
    except _DECODE_ERRORS as error:
        raise ProtocolViolation(f"what the peer asks or answers is invalid: {error}", peer=peer) from error
