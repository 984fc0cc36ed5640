"""Digests of a request's blocks. The producer signs one for each block; the consumer computes and compares them.

Digests form a chain over the request's blocks from its first token on. Each covers the one before it, the token ids of
its block, and whatever else vLLM's prefix cache tells blocks apart by: adapter, media, salt, embeddings. Two blocks
with the same digest hold the keys and values of the same prefix. vLLM's own block hashes differ between engines: each
engine chooses the hash function, and may begin the chain with a random number.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from kvflow import Grant, Ticket
from kvflow.errors import ContentMismatch, TicketInvalid
from kvflow.integrations.vllm.blocks import ABSENT

Request = Any
"""A request of vLLM's scheduler, which only the connector imports."""

DIGEST_BYTES = 16

START = blake2b(b"kvflow.integrations.vllm content 1", digest_size=DIGEST_BYTES).digest()
"""What every chain begins with. Another way to make digests needs another start."""

PLAIN, KEYED = (blake2b(digest_size=DIGEST_BYTES, person=person) for person in (b"tokens", b"tokens and keys"))
"""Set apart blocks of tokens alone from those that begin with a digest of their other keys. Each link is a copy."""

BLOCK_SIZES_MAX = 16
"""Different block sizes of one producer. Engines have one to three."""

TOKEN_BYTES = 4

ExtraKeys = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""vLLM's ``generate_block_hash_extra_keys``: request, first token, end, first media item -> keys, next media item."""

Digests = tuple[tuple[bytes, ...], ...]


class Contents:
    """Make and compare the digests of vLLM's requests.

    Args:
        extra_keys: what vLLM hashes beside the tokens of a block.
    """

    def __init__(self, extra_keys: ExtraKeys) -> None:
        self._extra_keys = extra_keys

    def digests(
        self, request: Request, block_ids: Sequence[Sequence[int]], block_sizes: Sequence[int], num_tokens: int
    ) -> Digests:
        """Return the digest of each block that a producer offers; empty for an absent one.

        Args:
            request: whose blocks they are.
            block_ids: the last blocks of each group.
            block_sizes: tokens in a block of each group, 0 for states.
            num_tokens: that the blocks hold.

        Raises:
            ContentMismatch: the request has fewer tokens, or one whose id is no unsigned number of 32 bits.
        """
        tokens = _token_bytes(request, num_tokens)
        # What all tokens together have no keys of, no block of them has. Embeddings would be hashed for the answer.
        plain = request.prompt_embeds is None and self._extra_keys(request, 0, num_tokens, 0)[0] is None
        chain = _plain_chain if plain else partial(self._chain, request)
        chains = {size: chain(tokens, size or num_tokens) for size in set(block_sizes)}
        return tuple([_last(chains[size], ids) for ids, size in zip(block_ids, block_sizes, strict=True)])

    def require(self, request: Request, ticket: Ticket) -> None:
        """Check that a ticket's blocks hold the beginning of a request, all of them.

        Args:
            request: that is to be continued from these blocks.
            ticket: whose signature was checked.

        Raises:
            ContentMismatch: they hold something else, or the ticket does not say what they hold.
            TicketInvalid: the ticket has more block sizes than any engine.
        """
        for grant in ticket.grants:
            self._require(request, grant)

    def _require(self, request: Request, grant: Grant) -> None:
        contents = grant.contents
        if isinstance(contents, msgspec.UnsetType):
            raise ContentMismatch(
                "the ticket does not say what its blocks hold",
                remedy="Have the prompt prefilled by a vLLM engine with KVFlowConnector of the same release.",
            )
        covered, *others = set(grant.num_tokens)
        if others:
            raise TicketInvalid("the ticket's groups are of different numbers of tokens, which vLLM's never are")
        if covered > request.num_tokens:
            raise ContentMismatch(
                f"the ticket's blocks hold {covered} tokens, and the request has {request.num_tokens}",
                remedy="Send the prompt that was prefilled, or one that continues it.",
            )
        sizes = [content.block_size for content in contents]
        if len(set(sizes)) > BLOCK_SIZES_MAX:
            raise TicketInvalid(f"the ticket has blocks of {len(set(sizes))} sizes, at most {BLOCK_SIZES_MAX} are read")
        expected = self.digests(request, grant.block_ids, sizes, covered)
        for group, (content, digests) in enumerate(zip(contents, expected, strict=True)):
            if content.digests != digests:
                raise ContentMismatch(
                    f"the ticket's blocks of group {group} hold {covered} other tokens than the request begins with",
                    group=group,
                )

    def _chain(self, request: Request, tokens: bytes, block_size: int) -> list[bytes]:
        """Return the chain's value at the end of each block; the last one may be shorter."""
        chain = []
        digest, media = START, 0
        known, keyed = None, b""  # an adapter's keys are the same for every block
        num_tokens = len(tokens) // TOKEN_BYTES
        for first in range(0, num_tokens, block_size):
            end = min(first + block_size, num_tokens)
            keys, media = self._extra_keys(request, first, end, media)
            link = (KEYED if keys else PLAIN).copy()
            link.update(digest)
            if keys:
                if keys != known:
                    known, keyed = keys, _digest_of_keys(keys)
                link.update(keyed)
            link.update(tokens[first * TOKEN_BYTES : end * TOKEN_BYTES])
            digest = link.digest()
            chain.append(digest)
        return chain


def _plain_chain(tokens: bytes, block_size: int) -> list[bytes]:
    """Return the chain of a request whose blocks have no other keys than their tokens."""
    chain, digest, nbytes = [], START, block_size * TOKEN_BYTES
    for first in range(0, len(tokens), nbytes):
        link = PLAIN.copy()
        link.update(digest + tokens[first : first + nbytes])
        digest = link.digest()
        chain.append(digest)
    return chain


def _last(chain: Sequence[bytes], block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return the end of a chain, one digest for each block id; empty for an absent block."""
    digests = chain[len(chain) - len(block_ids) :]
    if ABSENT in block_ids:
        return tuple([digest if block >= 0 else b"" for block, digest in zip(block_ids, digests, strict=True)])
    return tuple(digests)


def _token_bytes(request: Request, num_tokens: int) -> bytes:
    """Return the first token ids of a request, little-endian, 32 bits each."""
    try:
        ids = array("I", request.all_token_ids[:num_tokens])
    except (OverflowError, TypeError) as error:
        raise ContentMismatch(f"the request has a token that is none: {error}") from error
    if len(ids) != num_tokens:
        raise ContentMismatch(f"the request has {len(ids)} tokens, fewer than {num_tokens}")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _digest_of_keys(keys: tuple[Any, ...]) -> bytes:
    """Return a digest of fixed length, so that the end of the keys cannot pass for tokens.

    vLLM's key of an adapter is its name and its path; engines keep the same adapter at different paths.
    """
    portable = [key[:2] if key[0] == "lora" else key for key in keys]
    return blake2b(msgspec.msgpack.encode(portable), digest_size=DIGEST_BYTES).digest()
