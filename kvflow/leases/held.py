"""One lease that is held, and the indexes by which peers find it."""

from collections.abc import Collection, Hashable, Sequence
from math import lcm
from typing import Self

from msgspec import Struct

from kvflow.errors import BlockIdsInvalid
from kvflow.ids import LeaseKey
from kvflow.layout.groups import Group, window_blocks
from kvflow.layout.manifest import Manifest
from kvflow.leases.blocks import blocks_for
from kvflow.leases.tickets import Grant

Blocks = tuple[tuple[int, ...], ...]

SETTLES = frozenset(("full", "mla"))  # kinds of layers whose blocks settle one after another; others do at the seal

ADVANCES_MAX = 256  # of one lease that are listed at its end. Beyond them every second is left out.


class Lease(Struct, eq=False):
    """One lease that is held.

    ``released_by``: by engine and number of its ranks, those that have released it; ``named_by``: the key that has
    named this engine first; ``text``: of its ticket, once a peer has found it. ``digests``: of the first group of a
    kept one, and the last one of others that peers may find; ``first``: blocks of the request before these; ``before``:
    the lease that was found by the last digest that it shares. ``found``: by which question, until that reader gives it
    back unread. ``served``: of its blocks, those that have settled, which is all of them unless it is open.
    Of an open one, ``settled``: tokens; ``told``: its blocks, as ``OpenGroups`` compares them; ``advances``: seconds
    since the admission, and the tokens that had settled.
    """

    grant: Grant
    epoch: int
    admitted_at: float
    ends_at: float
    read: bool = False
    released_by: dict[tuple[str, int], set[int]] = {}
    macs: Sequence[bytes] = ()
    named_by: dict[tuple[str, int], str] = {}
    digests: tuple[bytes, ...] = ()
    first: int = 0
    before: LeaseKey = (0, 0)
    found: Hashable = None
    text: str = ""
    blocks: Blocks = ()
    served: Blocks = ()
    sealed: bool = True
    settled: int = 0
    told: set[int] = set()
    advances: list[tuple[float, int]] = []

    @property
    def kept(self) -> bool:
        """Whether only the producer ends it."""
        return self.grant.kind == "kept"

    def digest_at(self, place: int) -> bytes:
        """Return the digest of the block behind so many others of the request; empty if it is not listed."""
        at = place - self.first
        return self.digests[at] if 0 <= at < len(self.digests) else b""

    @property
    def released(self) -> bool:
        """Whether all ranks of one consumer engine have released the lease."""
        return any(len(ranks) == num_ranks for (_, num_ranks), ranks in self.released_by.items())


def first_place(grant: Grant, num_digests: int) -> int:
    """Return how many blocks of a request, of its first group, are before those that have these digests."""
    size = grant.contents[0].block_size if grant.contents else 0
    return max(0, -(-grant.num_tokens[0] // size) - num_digests) if size else 0


class Index:
    """Of each digest, the newest kept lease that has it, and how many others have it.

    A digest covers all tokens up to the end of its block, so leases that share one share all before it, at the same
    places behind the start of the request. Thread: as ``LeaseTable``.
    """

    def __init__(self) -> None:
        self._newest: dict[bytes, Lease] = {}
        self._others: dict[bytes, int] = {}

    def find(self, digests: Sequence[bytes]) -> tuple[Lease, int] | None:
        """Return the lease that has the last possible of these digests, and how many lead to it; None if none has."""
        newest = self._newest
        for at in range(len(digests) - 1, -1, -1):
            if digests[at] in newest:
                return newest[digests[at]], at + 1
        return None

    def add(self, lease: Lease) -> None:
        """Add a kept lease, which is then the newest."""
        newest, others = self._newest, self._others
        for digest in lease.digests:
            if digest in newest:
                others[digest] = others.get(digest, 0) + 1
                lease.before = (newest[digest].grant.slot, newest[digest].epoch)
            newest[digest] = lease
        newest.pop(b"", None)  # of absent blocks
        others.pop(b"", None)

    def remove(self, lease: Lease, left: dict[int, Lease]) -> None:
        """Remove a lease; of the digests that others have, the newest of those takes its place. ``left``: by slot."""
        newest, others = self._newest, self._others
        orphaned: list[tuple[int, bytes]] = []
        for place, digest in enumerate(lease.digests, lease.first):
            if newest.get(digest) is not lease:
                self._count_less(digest)
            elif digest in others:
                self._count_less(digest)
                orphaned.append((place, digest))
            else:
                del newest[digest]
        while orphaned:
            place, digest = orphaned[-1]
            slot, epoch = lease.before
            heir = left.get(slot)  # usually, so that not all leases are searched
            if heir is None or heir.epoch != epoch or heir.digest_at(place) != digest:
                heir = next((each for each in reversed(left.values()) if each.digest_at(place) == digest), None)
            if heir is None:  # the engine's digests are not chained: this one is found no more
                newest.pop(digest, None)
                orphaned.pop()
            while heir is not None and orphaned and heir.digest_at(orphaned[-1][0]) == orphaned[-1][1]:
                newest[orphaned.pop()[1]] = heir

    def _count_less(self, digest: bytes) -> None:
        count = self._others.pop(digest, 0)
        if count > 1:
            self._others[digest] = count - 1


class OfferIndex:
    """Offers, open or not, that a peer may find, by the digest of their last block. Thread: as ``LeaseTable``.

    Each is found by one question at a time: until the reader that has asked gives it back unread.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, dict[int, Lease]] = {}  # those that nobody has found; then by slot
        self._by_question: dict[Hashable, Lease] = {}  # the others

    def add(self, lease: Lease, digest: bytes) -> None:
        """Add an offer, or give it another digest; empty bytes name none."""
        lease.digests = (digest,) if digest else ()
        if digest and lease.found is None:
            self._by_digest.setdefault(digest, {})[lease.grant.slot] = lease

    def take(self, digests: Sequence[bytes], question: Hashable) -> tuple[Lease, int] | None:
        """Return the lease that ends at the last possible digest, the oldest of equal ones: it has one reader."""
        for at in range(len(digests) - 1, -1, -1):
            if digests[at] in self._by_digest:
                lease = next(iter(self._by_digest[digests[at]].values()))
                self.forget(lease)
                lease.found = question
                self._by_question[question] = lease
                return lease, at + 1
        return None

    def found_by(self, question: Hashable) -> Lease | None:
        """Return the offer that a question has found."""
        return self._by_question.get(question)

    def give_back(self, lease: Lease) -> None:
        """Let the next question find an offer that was found and not read."""
        self.forget(lease)
        lease.found = None
        self.add(lease, *lease.digests)

    def forget(self, lease: Lease) -> None:
        """Find an offer no more."""
        if self._by_question.get(lease.found) is lease:  # a client may use the number of its question again
            del self._by_question[lease.found]
        if lease.found is not None:
            return
        for digest in lease.digests:
            leases = self._by_digest[digest]
            del leases[lease.grant.slot]
            if not leases:
                del self._by_digest[digest]


class OpenGroups:
    """The groups of a cache: which blocks an open lease may list, and when.

    ``early``: whether a group settles block by block. Others, such as windows and states, write a block again while the
    request is computed, so they are told with the seal. ``unit``: tokens of whole blocks of every early group.
    ``reaches``: kind, block size and window of the layers of each group.
    """

    def __init__(
        self, sizes: Sequence[int], early: Sequence[bool], aliases: Sequence[int], reaches: Sequence[Collection[Group]]
    ) -> None:
        self.sizes = tuple(sizes)
        self._reaches = tuple(reaches)
        self._groups = tuple(zip(sizes, early, aliases, strict=True))
        self.unit = lcm(*[size for size, is_early, _ in self._groups if is_early]) if any(early) else 0

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the groups of this cache."""
        early = [all(layer.kind in SETTLES for layer in group.layers) for group in manifest.groups]
        reaches = [
            {Group((), layer.kind, group.block_tokens, layer.window) for layer in group.layers}
            for group in manifest.groups
        ]
        return cls([group.tokens_per_id for group in manifest.groups], early, manifest.aliases, reaches)

    def least(self, group: int, num_tokens: int) -> int:
        """Return how many of the last blocks of a group the next token needs; 0 if no layer of it is here."""
        return max([window_blocks(reach, num_tokens) for reach in self._reaches[group]], default=0)

    def whole(self, num_tokens: int) -> int:
        """Return how many of these tokens are in whole blocks."""
        return num_tokens - num_tokens % self.unit if self.unit else 0

    def counts(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group hold so many tokens, which are whole, before the seal."""
        return [num_tokens // size if early else 0 for size, early, _ in self._groups]

    def tokens_of(self, counts: Sequence[int]) -> int:
        """Return how many tokens so many blocks of each group hold, in whole blocks."""
        held = [count * size for count, (size, early, _) in zip(counts, self._groups, strict=True) if early]
        return self.whole(min(held, default=0))

    def extend(
        self, grant: Grant, blocks: Blocks, told: set[int], new: Blocks, settled: int, *, sealed: bool
    ) -> tuple[Blocks, set[int]]:
        """Return the blocks with new ones behind them, and what to add to ``told``.

        ``settled``: tokens of whole blocks. ``sealed``: all tokens are.

        Raises:
            BlockIdsInvalid: too many blocks, too few, too early, or one that was told before.
        """
        fresh: set[int] = set()
        for group, (size, early, alias) in enumerate(self._groups):
            more, tokens = new[group], grant.num_tokens[group]
            most = blocks_for(tokens, size)
            count = len(blocks[group]) + len(more)
            least = settled // size if early else 0
            if sealed:
                least = self.least(group, tokens)
            if more and not (early or sealed):
                raise BlockIdsInvalid(
                    f"group {group}: its blocks are written again, so they cannot be told before the seal", group=group
                )
            if not least <= count <= most:
                fault = f"group {group}: {count} blocks are told, and {least} to {most} would hold these tokens"
                raise BlockIdsInvalid(fault, group=group)
            before, keys = len(fresh), [alias << 32 | block for block in more if block >= 0]
            fresh.update(keys)
            if len(fresh) < before + len(keys) or not told.isdisjoint(keys):
                raise BlockIdsInvalid(f"group {group}: a block is told twice, among {list(more[:8])}", group=group)
        return tuple([old + more for old, more in zip(blocks, new, strict=True)]), fresh
