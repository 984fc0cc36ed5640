"""Which source rank gives what, so that every byte of the target is written exactly once.

A rank holds of each component a range of heads, or of what else ranks divide, and of each group a stripe of tokens.
Ranks of one *lattice*, those that divide tokens alike, hold tokens of their own or the very same ones. So a component
is covered in one lattice: each rank of it that holds tokens of the target gives all of these, and ranks that hold the
same tokens divide the heads.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.layout.manifest import Manifest
from kvflow.layout.stripes import Stripe
from kvflow.transfer.match import Piece, PieceName, Pieces, require_common_layer


class Share(Struct, frozen=True):
    """What one source rank gives.

    Attributes:
        source: its number.
        pieces: what is taken of it; None: all that both sides hold.
    """

    source: int
    pieces: Pieces | None


class _Holding(Struct, frozen=True):
    """What a rank holds of one component: first and count along the sharded axis, and which tokens."""

    piece: Piece
    stripe: Stripe


def share_out(target: Manifest, sources: Sequence[Manifest], *, turn: int = 0) -> tuple[Share, ...]:
    """Divide the target among the source ranks.

    One source that holds everything is preferred. Otherwise each component is covered from its first head on, each
    time by the source that reaches furthest; several may hold parts of it, or the same.

    Args:
        target: the consumer's manifest.
        sources: one per source rank, in the order of the ticket.
        turn: among sources that would do equally well, the one in turn; ranks with turns of their own spread the load.

    Raises:
        LayoutMismatch: the sources together lack a part of the target.
    """
    require_common_layer(sources, target)
    wanted, held = _holdings(target), [_holdings(source) for source in sources]
    complete = [index for index, there in enumerate(held) if _is_complete(there, wanted)]
    if complete:
        there = held[complete[0]]
        turn = min(_turn_among(there[name].stripe.lattice, holding.stripe, turn) for name, holding in wanted.items())
        return (Share(complete[turn % len(complete)], None),)
    taken: list[dict[PieceName, Piece]] = [{} for _ in sources]
    needs = _Needs()
    for name, holding in wanted.items():
        holders = {index: there[name] for index, there in enumerate(held) if name in there}
        for index, piece in _covered(name, holding, holders, needs, turn):
            taken[index][name] = piece
    return tuple(
        Share(index, None if pieces == _all_common(held[index], wanted) else pieces)
        for index, pieces in enumerate(taken)
        if pieces
    )


class _Needs:
    """Which ranks of a lattice hold tokens of a stripe; the components of a manifest have few stripes."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, int], Stripe], tuple[int, ...]] = {}

    def of(self, lattice: tuple[int, int], stripe: Stripe) -> tuple[int, ...]:
        """Return those ranks."""
        found = self._known.get((lattice, stripe))
        if found is None:
            size, width = lattice
            found = tuple(rank for rank in range(size) if Stripe(rank, size, width).share_of(stripe))
            self._known[lattice, stripe] = found
        return found


def _covered(
    name: PieceName, wanted: _Holding, holders: Mapping[int, _Holding], needs: _Needs, turn: int
) -> list[tuple[int, Piece]]:
    """Return what each source gives of one component: those of the first lattice that has all of it.

    Raises:
        LayoutMismatch: none has; names what the first one lacks.
    """
    by_lattice: dict[tuple[int, int], dict[int, dict[int, Piece]]] = {}
    for index, holding in holders.items():
        by_rank = by_lattice.setdefault(holding.stripe.lattice, {})
        by_rank.setdefault(holding.stripe.rank, {})[index] = holding.piece
    lacking = _lacking_head(wanted.piece[0])
    for number, (lattice, by_rank) in enumerate(by_lattice.items()):
        found: list[tuple[int, Piece]] = []
        lack = ""
        for rank in needs.of(lattice, wanted.stripe):
            lack = _cover_heads(by_rank.get(rank, {}), wanted.piece, _turn_among(lattice, wanted.stripe, turn), found)
            if lack:
                tokens = Stripe(rank, *lattice)
                lack += f", tokens of {tokens}" if tokens.size > 1 else ""
                break
        if not lack:
            return found
        lacking = lack if number == 0 else lacking
    raise LayoutMismatch(f"{name[0]}.{name[1]}", "absent", f"{lacking} is needed")


def _cover_heads(pieces: Mapping[int, Piece], wanted: Piece, turn: int, found: list[tuple[int, Piece]]) -> str:
    """Add who gives which heads to ``found``; return what is lacking, in words."""
    first, count = wanted
    at = first
    while at < first + count:
        reaches = {index: _reach(piece, at) for index, piece in pieces.items()}
        furthest = max(reaches.values(), default=at)
        if furthest <= at:
            return _lacking_head(at)
        equals = [index for index, reach in reaches.items() if reach == furthest]
        end = min(furthest, first + count)
        found.append((equals[turn % len(equals)], (at, end - at)))
        at = end
    return ""


def _lacking_head(head: int) -> str:
    return f"head {head}"


def _turn_among(lattice: tuple[int, int], stripe: Stripe, turn: int) -> int:
    """Return the turn among those targets that ask for the same tokens.

    Where both sides divide tokens in stretches of one width, ``common`` neighbors ask for tokens of their own, so that
    only every ``common``-th target chooses among the same sources.
    """
    size, width = lattice
    common = math.gcd(size, stripe.size) if stripe.lattice[1] == width else 1
    return turn // common


def _holdings(manifest: Manifest) -> dict[PieceName, _Holding]:
    """Return what a rank holds of every component."""
    return {
        (layer.name, part.role): _Holding((part.held.first, part.held.count), group.stripe)
        for group in manifest.groups
        for layer in group.layers
        for part in layer.components
    }


def _reach(piece: Piece, at: int) -> int:
    """Return where a piece that holds ``at`` ends; ``at`` itself if it does not."""
    return piece[0] + piece[1] if piece[0] <= at < piece[0] + piece[1] else at


def _is_complete(there: Mapping[PieceName, _Holding], wanted: Mapping[PieceName, _Holding]) -> bool:
    """Tell whether one source holds everything that is wanted."""
    return all(
        name in there
        and _common(there[name].piece, holding.piece) == holding.piece
        and there[name].stripe.share_of(holding.stripe) == 1
        for name, holding in wanted.items()
    )


def _common(there: Piece, wanted: Piece) -> Piece:
    low = max(wanted[0], there[0])
    return (low, max(0, min(wanted[0] + wanted[1], there[0] + there[1]) - low))


def _all_common(there: Mapping[PieceName, _Holding], wanted: Mapping[PieceName, _Holding]) -> dict[PieceName, Piece]:
    """Return the heads of every component that both sides hold, of those whose tokens they have in common."""
    both = {
        name: _common(there[name].piece, holding.piece)
        for name, holding in wanted.items()
        if name in there and there[name].stripe.share_of(holding.stripe)
    }
    return {name: piece for name, piece in both.items() if piece[1]}
