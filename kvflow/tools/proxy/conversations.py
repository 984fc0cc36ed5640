"""Which engine has answered the beginning of a text: it may still keep the cache, which prefill engines read there."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from kvflow.ids import Newest

TEXTS: Final = ("system", "instructions", "messages", "input", "prompt")  # fields of a request, in this order
PIECE_BYTES: Final = 1 << 10  # of text between two digests: about as many tokens as are worth a fetch
PIECES_MAX: Final = 1 << 10  # of one text
CONVERSATIONS_MAX: Final = 1 << 16


class Conversations:
    """The control endpoint of the engine that has answered each text last. Thread: the loop's."""

    def __init__(self) -> None:
        self._engines = Newest[bytes, str](CONVERSATIONS_MAX)  # by digest, that which was asked longest ago first

    def find(self, digests: Sequence[bytes]) -> str:
        """Return who has answered the longest beginning of a text; empty if nobody is known."""
        for digest in reversed(digests):
            if (engine := self._engines.get(digest)) is not None:
                self._engines[digest] = engine
                return engine
        return ""

    def note(self, digests: Sequence[bytes], endpoint: str) -> None:
        """Remember who has answered a text."""
        if digests:
            self._engines[digests[-1]] = endpoint


def digests_of(fields: Mapping[str, Raw]) -> list[bytes]:
    """Return the digest at the end of each whole piece of a request's text, chained."""
    text = b"\0".join([bytes(fields[name]) for name in TEXTS if name in fields])
    digests, digest = [], b""
    for end in range(PIECE_BYTES, min(len(text), PIECES_MAX * PIECE_BYTES) + 1, PIECE_BYTES):
        digest = blake2b(digest + text[end - PIECE_BYTES : end], digest_size=16).digest()
        digests.append(digest)
    return digests


def hint_of(endpoint: str) -> Raw:
    """Return ``kv_hint`` for a prefill engine: fetch from the engine at this control endpoint."""
    payload = {"source_control_endpoint": endpoint}
    action = {"action_id": "0", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return Raw(msgspec.json.encode({"protocol_version": "0.1", "message_id": "0", "actions": [action]}))
