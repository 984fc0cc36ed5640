"""Digests of what blocks hold, equal on every engine: ``digests`` of an offer, and what ``find`` asks for.

The producer signs the digest of the last block of each group; the consumer computes and compares it. Digests form a
chain from the first token on: each covers the one before it, the token ids of its block, and all else by which an
engine distinguishes blocks (in vLLM: adapter, media, salt, embeddings). They are keyed with a key that follows from the
cluster secret, so that no client can search for two prompts with one digest. vLLM's own hashes differ between engines,
by function and seed.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any

import msgspec
from msgspec import Struct

from kvflow.errors import ContentMismatch, TicketInvalid
from kvflow.ids import ABSENT
from kvflow.leases.tickets import Grant, Ticket

__all__ = ["Chains", "Contents", "TokenIds"]

Request = Any  # of vLLM's scheduler, or ``TokenIds``

DIGEST_BYTES = 16
TOKEN_BYTES = 4

START = blake2b(b"kvflow content 1", digest_size=DIGEST_BYTES).digest()
"""Start of every chain. Change it if digests are computed in another way."""

LINKS = (b"tokens", b"tokens and keys")
"""Names of the two hashes of a link of the chain: of a block with tokens alone, and of one with other keys too."""

Links = tuple[Any, ...]  # these hashes, to be copied

BLOCK_SIZES_MAX = 16  # largest number of different block sizes in one ticket; engines have one to three

ExtraKeys = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""vLLM's ``generate_block_hash_extra_keys``: request, first token, end, first media item -> keys, next media item."""

DigestLists = tuple[tuple[bytes, ...], ...]


class TokenIds(Struct, frozen=True):
    """A request that token ids alone determine.

    Attributes:
        all_token_ids: the prompt, and what is generated so far.
        prompt_embeds: embeddings instead of ids; none.
    """

    all_token_ids: Sequence[int]
    prompt_embeds: None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.all_token_ids)


def no_extra_keys(_request: Request, _first: int, _end: int, media: int) -> tuple[None, int]:
    """Say that nothing but its tokens determines a block."""
    return None, media


Chain = tuple[list[bytes], int]  # the digest at the end of each block, and the media item that follows
NO_CHAIN: Chain = ([], 0)


@dataclass(slots=True, eq=False)
class Chains:
    """The digests of one request, as far as they are computed. ``Contents`` extends them, on any thread."""

    lock: Lock = field(default_factory=Lock)
    by_size: dict[int, Chain] = field(default_factory=dict)  # by block size

    def first(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Return the digests of the blocks that the first tokens fill, as far as they are computed."""
        return self.by_size.get(block_size, NO_CHAIN)[0][: num_tokens // block_size]


class Contents:
    """Computes and compares the digests of requests: of ``TokenIds``, or of vLLM's.

    Args:
        keys: ``TicketKey.content_keys()``: a key for the fingerprint of each accepted cluster secret, our own first.
        extra_keys: what else than tokens determines a block, as vLLM's function for its own hash of a block says it.

    Example:
        >>> contents = kvflow.contents.Contents(kvflow.TicketKey.of(config).content_keys())
        >>> request = kvflow.contents.TokenIds(prompt)
        >>> digests = contents.digests(request, block_ids=[[3, 4, 9]], block_sizes=[16], num_tokens=48)

    Thread: any.
    """

    def __init__(self, keys: Mapping[bytes, bytes], extra_keys: ExtraKeys = no_extra_keys) -> None:
        self._extra_keys = extra_keys
        self._links: dict[bytes, Links] = {
            fingerprint: tuple([blake2b(key=key, digest_size=DIGEST_BYTES, person=person) for person in LINKS])
            for fingerprint, key in keys.items()
        }
        self._own = next(iter(self._links.values()))

    def digests(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        block_sizes: Sequence[int],
        num_tokens: int,
        *,
        links: Links | None = None,
        chains: Chains | None = None,
    ) -> DigestLists:
        """Return the digest of each of the last blocks of each group; empty for a missing block.

        The blocks of a request hold ``num_tokens`` tokens; ``block_sizes`` are 0 for states. ``links``: of another
        secret than our own; ``chains``: of this request, which are extended.

        Raises:
            ContentMismatch: the request has fewer tokens, or a token id is not an unsigned 32-bit integer.
        """
        begun = chains if chains is not None and links in (None, self._own) else Chains()
        if begun is chains:
            self.grow(request, begun, block_sizes, num_tokens)
        ends = {}
        for size in set(block_sizes):
            ends[size] = begun.first(size, num_tokens) if size else []
            if not size or len(ends[size]) * size < num_tokens:
                chain = begun.by_size.get(size, NO_CHAIN)
                ends[size] = self._grown(request, links or self._own, size or num_tokens, num_tokens, chain)[0]
        return tuple([_last(ends[size], ids) for ids, size in zip(block_ids, block_sizes, strict=True)])

    def grow(self, request: Request, chains: Chains, block_sizes: Iterable[int], num_tokens: int) -> None:
        """Extend our own chains of these sizes, without those of states, by the blocks that the first tokens fill."""
        with chains.lock:
            for size in filter(None, block_sizes):
                chain, end = chains.by_size.get(size, NO_CHAIN), num_tokens - num_tokens % size
                if len(chain[0]) * size < end:
                    chains.by_size[size] = self._grown(request, self._own, size, end, chain)

    def require(self, request: Request, ticket: Ticket, first: int = 0, chains: Chains | None = None) -> None:
        """Check that all blocks of a ticket, whose signature was checked, hold the beginning of a request.

        If only the ``first`` tokens of more are to be read, the source has compared their digests: the ticket has those
        of its last blocks alone. A source that lies about them could as well sign other digests, or serve other bytes.

        Raises:
            ContentMismatch: the blocks hold something else, or the ticket has no digests.
            TicketInvalid: the ticket has more block sizes than any engine.
        """
        for grant, fingerprint in zip(ticket.grants, ticket.fingerprints, strict=True):
            if 0 < first < max(grant.num_tokens):
                continue
            self._require(request, grant, self._links.get(fingerprint, self._own), chains)

    def _require(self, request: Request, grant: Grant, links: Links, chains: Chains | None) -> None:
        contents = grant.contents
        if contents is None:
            raise ContentMismatch(
                "the ticket has no digests of its blocks",
                remedy="Prefill the prompt on an engine that signs digests, such as vLLM with KVFlowConnector.",
            )
        covered, *others = set(grant.num_tokens)
        if others:
            raise TicketInvalid("the groups of the ticket have different numbers of tokens: expected the same number")
        if covered > request.num_tokens:
            raise ContentMismatch(
                f"the blocks of the ticket hold {covered} tokens, but the request has only {request.num_tokens}",
                remedy="Send the prompt that was prefilled, or a prompt that continues it. Have the router limit the "
                "prefill to one token: max_tokens, or in /v1/responses max_output_tokens, is 1.",
            )
        sizes = [content.block_size for content in contents]
        if len(set(sizes)) > BLOCK_SIZES_MAX:
            raise TicketInvalid(f"the ticket has {len(set(sizes))} block sizes: at most {BLOCK_SIZES_MAX} are allowed")
        # Of an open offer the ticket has no blocks yet, and the digest of the last that there will be.
        block_ids = [(0,)] * len(sizes) if grant.is_open else grant.block_ids
        expected = self.digests(request, block_ids, sizes, covered, links=links, chains=chains)
        for group, (content, digests) in enumerate(zip(contents, expected, strict=True)):
            last = digests[len(digests) - len(content.digests) :]
            if content.digests != last or any(digests) != any(last):
                raise ContentMismatch(
                    f"the first {covered} tokens of the request are not those in the ticket's blocks of group {group}",
                    group=group,
                )

    def _grown(self, request: Request, links: Links, block_size: int, num_tokens: int, chain: Chain) -> Chain:
        """Return a chain with the digest at the end of each block; the last block may be partly filled."""
        if len(chain[0]) * block_size > num_tokens:
            chain = NO_CHAIN
        digests, media = list(chain[0]), chain[1]
        plain, keyed_link = links
        digest = digests[-1] if digests else START
        known, keyed = None, b""  # the keys of an adapter are the same for every block
        start = len(digests) * block_size
        tokens = _token_bytes(request, start, num_tokens)
        # If all tokens together have no other keys, no block has any. For embeddings this question would hash them.
        asks = request.prompt_embeds is not None or self._extra_keys(request, start, num_tokens, media)[0] is not None
        for first in range(start, num_tokens, block_size):
            end, keys = min(first + block_size, num_tokens), None
            if asks:
                keys, media = self._extra_keys(request, first, end, media)
            link = (keyed_link if keys else plain).copy()
            if keys:
                if keys != known:
                    known, keyed = keys, _digest_of_keys(keys)
                digest += keyed
            link.update(digest + tokens[(first - start) * TOKEN_BYTES : (end - start) * TOKEN_BYTES])
            digest = link.digest()
            digests.append(digest)
        return digests, media


def _last(chain: Sequence[bytes], block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return the end of a chain, one digest for each block id; empty for a missing block."""
    digests = chain[len(chain) - len(block_ids) :]
    if ABSENT in block_ids:
        return tuple([digest if block >= 0 else b"" for block, digest in zip(block_ids, digests, strict=True)])
    return tuple(digests)


def _token_bytes(request: Request, first: int, end: int) -> bytes:
    """Return these token ids as little-endian 32-bit integers."""
    try:
        ids = array("I", request.all_token_ids[first:end])
    except (OverflowError, TypeError) as error:
        raise ContentMismatch(f"a token id of the request is not an unsigned 32-bit integer: {error}") from error
    if len(ids) != end - first:
        raise ContentMismatch(f"the request has only {first + len(ids)} tokens: expected {end}")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _digest_of_keys(keys: tuple[Any, ...]) -> bytes:
    """Return a digest of fixed length, so that no keys can be mistaken for tokens."""
    portable = [key[:2] if key[0] == "lora" else key for key in keys]  # an adapter's path differs between engines
    return blake2b(msgspec.msgpack.encode(portable), digest_size=DIGEST_BYTES).digest()
