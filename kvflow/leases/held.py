"""One lease that is held, and the index by which peers find it."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import inf, lcm
from typing import Self

from msgspec import Struct

from kvflow.errors import BlockIdsInvalid
from kvflow.layout.groups import SETTLES, Group, whole_tokens, window_blocks
from kvflow.layout.manifest import Manifest
from kvflow.leases.blocks import blocks_for
from kvflow.leases.tickets import Grant

Blocks = tuple[tuple[int, ...], ...]

ADVANCES_MAX = 256  # of one lease that are listed at its end. Beyond them every second is left out.


class EngineReading(Struct, eq=False):
    """An engine that reads a lease: the ranks that have released it, and the key that has named the engine first."""

    released: set[int]
    named_by: str


class Names(Struct, frozen=True, kw_only=True):
    """The digests by which peers find a lease.

    ``for_one``: of its last block, by which one question finds it, until that reader gives it back unread. ``for_all``:
    of its blocks, by which all who ask find it. ``whole``: those of ``for_all`` up to which all windows are whole;
    None: there are no windows. ``ends``: those that ``KeptEnds`` tells.
    """

    for_one: tuple[bytes, ...] = ()
    for_all: tuple[bytes, ...] = ()
    whole: tuple[bytes, ...] | None = None
    ends: tuple[bytes, ...] = ()


NAMELESS = Names()


class Lease(Struct, eq=False, kw_only=True):
    """One lease that is held: the blocks told so far, who ends it, and who finds it.

    ``blocks``: those told so far; ``served``: of these, those that have settled; ``settled``: their tokens. ``sealed``:
    no more are told; until then ``told``: the blocks, as ``OpenGroups`` compares them. ``advances``: of each time that
    more settled, the seconds since the admission, and the tokens.
    ``ends_at``: when it runs out; if never, only the producer ends it, and no readers do.
    ``readers``: by engine and number of its ranks, those that have renewed it or released it in part; None until one
    has. ``shown``: whether a reader has shown its ticket.
    ``names``: by which peers find it. ``found_by``: the question that alone has found it. ``text``: of its ticket, once
    a peer has found it.
    """

    grant: Grant
    epoch: int
    admitted_at: float
    ends_at: float
    blocks: Blocks
    served: Blocks
    settled: int
    sealed: bool
    told: AbstractSet[int]
    names: Names = NAMELESS
    advances: tuple[tuple[float, int], ...] = ()
    read: bool = False
    readers: dict[tuple[str, int], EngineReading] | None = None
    macs: Sequence[bytes] = ()
    shown: bool = False
    found_by: Hashable = None
    text: str = ""

    @property
    def ends_by_readers(self) -> bool:
        """Whether it ends when its readers have released it, or runs out; otherwise only the producer ends it."""
        return self.ends_at < inf

    @property
    def renewed_at(self) -> float:
        """When it was last renewed: at its admission or seal, unless a reader or a question did so."""
        return self.ends_at - self.grant.lease_ms / 1000

    @property
    def is_unread(self) -> bool:
        """Whether it is whole, and no reader has renewed it, released it in part, or shown its ticket."""
        return self.sealed and not (self.shown or self.readers)


_ByDigest = dict[bytes, Lease | dict[int, Lease]]
"""The lease that has a digest; or several by slot, the oldest first."""


class Index:
    """The leases that peers find by a digest: some are found by all, others by one question at a time.

    A digest covers all tokens up to the end of its block, so a question lists the digests of a prompt, and the lease
    that has the last possible of them holds most of it. ``by_question``: those that one question alone has found.
    Thread: as ``LeaseTable``.
    """

    def __init__(self) -> None:
        self._for_all: _ByDigest = {}
        self._for_one: _ByDigest = {}  # those that no question has found
        self._whole: _ByDigest = {}  # those for all, by the digests up to which their windows are whole
        self.by_question: dict[Hashable, Lease] = {}

    def find(self, digests: Sequence[bytes], question: Hashable = None) -> tuple[Lease, int] | None:
        """Return the lease that has the last possible of these digests, and how many lead to it; None if none has.

        ``question``: which is given what it alone finds, the oldest of equal ones, before what all find.
        """
        if question is not None and (found := _find(self._for_one, digests)):
            leases, count = found
            lease = next(iter(leases.values()))
            self.remove(lease)
            lease.found_by = question
            self.by_question[question] = lease
            return lease, count
        if found := _find(self._for_all, digests):
            leases, count = found
            lease = next(reversed(leases.values()))
            names = lease.names
            return (lease, count) if names.whole is None else self._find_whole(names.for_all, digests[:count])
        return None

    def add(self, lease: Lease) -> None:
        """Let peers find a lease, unless a question has found it. Of equal ones it is then the newest."""
        if lease.found_by is not None:
            return
        slot = lease.grant.slot
        for by_digest, digest in self._entries_of(lease):
            there = by_digest.setdefault(digest, lease)
            if isinstance(there, dict):
                there[slot] = lease
            elif there is not lease:
                by_digest[digest] = {there.grant.slot: there, slot: lease}

    def remove(self, lease: Lease) -> None:
        """Let no question find a lease."""
        if lease.found_by is not None:
            if self.by_question.get(lease.found_by) is lease:  # a client may use the number of its question again
                del self.by_question[lease.found_by]
            return
        for by_digest, digest in self._entries_of(lease):
            there = by_digest.get(digest)
            if isinstance(there, dict):
                there.pop(lease.grant.slot, None)
            if not there or there is lease:
                by_digest.pop(digest, None)

    def give_back(self, lease: Lease) -> None:
        """Let the next question find a lease that was found and not read."""
        self.remove(lease)
        lease.found_by = None
        self.add(lease)

    def _entries_of(self, lease: Lease) -> Iterator[tuple[_ByDigest, bytes]]:
        names = lease.names
        for by_digest, digests in (
            (self._for_one, names.for_one),
            (self._for_all, names.for_all),
            (self._whole, names.whole or ()),
        ):
            for digest in digests:
                yield by_digest, digest

    def _find_whole(self, held: Sequence[bytes], asked: Sequence[bytes]) -> tuple[Lease, int] | None:
        """Return the lease with whole windows that has most of what another holds, and how many digests lead there.

        ``held``: digests of the other one. ``asked``: those of the question up to the last that it holds; the question
        leaves out as many behind that as before it.
        """
        last = held.index(asked[-1]) + 1
        before = held.index(asked[-2]) + 1 if len(asked) > 1 and asked[-2] in held else 0
        found = _find(self._whole, held[: max(0, 2 * last - before - 1)])
        if found is None:
            return None
        leases, end = found
        behind = set(held[end:])
        count = next((at for at in range(len(asked), 0, -1) if asked[at - 1] not in behind), 0)
        return (next(reversed(leases.values())), count) if count else None


def _find(by_digest: _ByDigest, digests: Sequence[bytes]) -> tuple[dict[int, Lease], int] | None:
    """Return the leases that have the last possible of these digests, and how many lead to them."""
    for count in range(len(digests), 0, -1):
        if digests[count - 1] in by_digest:
            found = by_digest[digests[count - 1]]
            return found if isinstance(found, dict) else {found.grant.slot: found}, count
    return None


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
        self._has_windows = any(reach.window for group in reaches for reach in group)
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

    def whole_digests(self, grant: Grant, digests: Sequence[bytes]) -> tuple[bytes, ...] | None:
        """Return those of the first group's digests up to which all windows are whole; None if there are no windows."""
        if not self._has_windows or not digests:
            return None
        size, most = self.sizes[0], min(grant.num_tokens)
        behind = blocks_for(grant.num_tokens[0], size) - len(digests)  # of those that the list leaves out
        counts = whole_tokens(self._reaches, grant.block_ids, grant.num_tokens, most)
        places = [-(-end // size) - behind - 1 for end in counts]
        return tuple([digests[place] for place in places if place >= 0])

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
        self, grant: Grant, blocks: Blocks, told: AbstractSet[int], new: Blocks, settled: int, *, sealed: bool
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
