"""Assign every byte of the target to one source rank.

A rank holds a range of heads (or of another sharded axis) of each component, and a stripe of tokens of each group.
Ranks form a *lattice* if they divide tokens among equally many ranks at one width. Two ranks of a lattice hold the same
tokens or none in common. So each component is read from one lattice: each rank gives all tokens that it shares with the
target, and ranks with the same tokens divide the heads.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import ALL_TOKENS, Stripe
from kvflow.planning.match import (
    ComponentName,
    HeadRange,
    HeadRanges,
    require_common_layer,
    require_equal_layer,
    unread_layers,
)


class Assignment(Struct, frozen=True):
    """What to read from one source rank of a ticket; without ``head_ranges``, everything that both sides hold."""

    source: int
    head_ranges: HeadRanges | None


class _Holding(Struct, frozen=True):
    """The heads and tokens of one component that a rank holds; ``noun`` is what an index along its axis is called."""

    heads: HeadRange
    stripe: Stripe
    total: int
    noun: str

    def describe(self, *ranges: HeadRange) -> str:
        """Name the heads of some ranges, such as ``heads 0-1, 3 of 4``."""
        texts = [str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in sorted(set(ranges))]
        if not texts:
            return f"no {self.noun} of {self.total}"
        plural = "s" if len(texts) > 1 or "-" in texts[0] else ""
        return f"{self.noun}{plural} {', '.join(texts)} of {self.total}"


def assign_sources(target: Manifest, sources: Sequence[Manifest], *, rotation: int = 0) -> tuple[Assignment, ...]:
    """Divide the target among the source ranks.

    If one source holds everything, read from that source only. Otherwise cover each component from its first head on;
    each step takes the source whose range ends last. Layers that the target can rebuild are left out if no source has
    them.

    ``sources`` has one manifest per source rank, in the order of the ticket. ``rotation``, modulo their number, says
    which of several equal sources to take: if each target rank passes its own rank, the replicas share the load.

    Raises:
        LayoutMismatch: no source holds some part of the target; names the heads, and the tokens if they are divided.
            If no source has such a component, names what differs between its layer and the target's.
    """
    require_common_layer(sources, target)
    unread = unread_layers(sources, target)
    wanted = {name: holding for name, holding in _holdings(target).items() if name[0] not in unread}
    held = [_holdings(source) for source in sources]
    complete = [index for index, there in enumerate(held) if _is_complete(there, wanted)]
    if complete:
        there = held[complete[0]]
        rotation = min(
            _rotation_among(there[name].stripe.lattice, holding.stripe, rotation) for name, holding in wanted.items()
        )
        return (Assignment(complete[rotation % len(complete)], None),)
    taken: list[dict[ComponentName, HeadRange]] = [{} for _ in sources]
    for name, holding in wanted.items():
        holders = {index: there[name] for index, there in enumerate(held) if name in there}
        if not holders:
            require_equal_layer(name[0], sources, target)
        for index, heads in _covered(name, holding, holders, rotation):
            taken[index][name] = heads
    return tuple(
        Assignment(index, None if ranges == _all_common(held[index], wanted) else ranges)
        for index, ranges in enumerate(taken)
        if ranges
    )


@lru_cache(maxsize=64)
def _ranks_with(lattice: tuple[int, int], stripe: Stripe) -> tuple[int, ...]:
    """Return the ranks of a lattice that hold tokens of a stripe. A manifest has few distinct stripes."""
    size, width = lattice
    return tuple(rank for rank in range(size) if Stripe(rank, size, width).share_of(stripe))


def _covered(
    name: ComponentName, wanted: _Holding, holders: Mapping[int, _Holding], rotation: int
) -> list[tuple[int, HeadRange]]:
    """Return the head ranges of one component by source, from the first lattice that holds all of it."""
    by_lattice: dict[tuple[int, int], dict[int, dict[int, HeadRange]]] = {}
    for index, holding in holders.items():
        by_rank = by_lattice.setdefault(holding.stripe.lattice, {})
        by_rank.setdefault(holding.stripe.rank, {})[index] = holding.heads
    incomplete: list[tuple[Mapping[int, HeadRange], Stripe]] = []
    for lattice, by_rank in by_lattice.items():
        found: list[tuple[int, HeadRange]] = []
        own_rotation = _rotation_among(lattice, wanted.stripe, rotation)
        for rank in _ranks_with(lattice, wanted.stripe):
            ranges = by_rank.get(rank, {})
            if not _cover_heads(ranges, wanted.heads, own_rotation, found):
                incomplete.append((ranges, Stripe(rank, *lattice)))
                break
        else:
            return found
    held, stripe = incomplete[0] if incomplete else ({}, ALL_TOKENS)
    tokens = f", tokens of {stripe}" if stripe.size > 1 else ""
    raise LayoutMismatch(
        f"{name[0]}.{name[1]}",
        f"{wanted.describe(*held.values())}{tokens}",
        f"{wanted.describe(wanted.heads)}{tokens}",
        remedy="Pass the tickets of all ranks of the producer (join_tickets), and check the Shard of each rank.",
    )


def _cover_heads(
    ranges: Mapping[int, HeadRange], wanted: HeadRange, rotation: int, found: list[tuple[int, HeadRange]]
) -> bool:
    """Append (source, head range) pairs to ``found``; return whether they cover what is wanted."""
    first, count = wanted
    at = first
    while at < first + count:
        reaches = {index: _reach(heads, at) for index, heads in ranges.items()}
        furthest = max(reaches.values(), default=at)
        if furthest <= at:
            return False
        equals = [index for index, reach in reaches.items() if reach == furthest]
        end = min(furthest, first + count)
        found.append((equals[rotation % len(equals)], (at, end - at)))
        at = end
    return True


def _rotation_among(lattice: tuple[int, int], stripe: Stripe, rotation: int) -> int:
    """Return the rotation among targets that read the same tokens: with one width, every ``common``-th of them."""
    size, width = lattice
    common = math.gcd(size, stripe.size) if stripe.lattice[1] == width else 1
    return rotation // common


def _holdings(manifest: Manifest) -> dict[ComponentName, _Holding]:
    return {
        (layer, part.role): _Holding(
            (part.held.first, part.held.count),
            group.stripe,
            part.held.total,
            "head" if part.token_axis >= 0 else "slice",
        )
        for group in manifest.groups
        for layer, part in group.components
    }


def _reach(heads: HeadRange, at: int) -> int:
    """Return the end of a range that contains ``at``; ``at`` itself if it does not contain it."""
    first, count = heads
    return first + count if first <= at < first + count else at


def _is_complete(there: Mapping[ComponentName, _Holding], wanted: Mapping[ComponentName, _Holding]) -> bool:
    """Return whether one source holds everything that is wanted."""
    return all(
        name in there
        and _common(there[name].heads, holding.heads) == holding.heads
        and there[name].stripe.share_of(holding.stripe) == 1
        for name, holding in wanted.items()
    )


def _common(there: HeadRange, wanted: HeadRange) -> HeadRange:
    low = max(wanted[0], there[0])
    return (low, max(0, min(wanted[0] + wanted[1], there[0] + there[1]) - low))


def _all_common(
    there: Mapping[ComponentName, _Holding], wanted: Mapping[ComponentName, _Holding]
) -> dict[ComponentName, HeadRange]:
    """Return the heads that both sides hold of every component whose tokens they share."""
    both = {
        name: _common(there[name].heads, holding.heads)
        for name, holding in wanted.items()
        if name in there and there[name].stripe.share_of(holding.stripe)
    }
    return {name: heads for name, heads in both.items() if heads[1]}
