"""Which source rank gives what, so that every byte of the target is written exactly once."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import LayoutMismatch
from kvflow.layout.manifest import Manifest
from kvflow.transfer.match import Piece, PieceName, Pieces, require_common_layer


class Share(Struct, frozen=True):
    """What one source rank gives.

    Attributes:
        source: its number.
        pieces: what is taken of it; None: all that both sides hold.
    """

    source: int
    pieces: Pieces | None


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
    wanted, held = _pieces(target), [_pieces(source) for source in sources]
    complete = [index for index, there in enumerate(held) if _all_common(there, wanted) == wanted]
    if complete:
        return (Share(complete[turn % len(complete)], None),)
    taken: list[dict[PieceName, Piece]] = [{} for _ in sources]
    for name, (first, count) in wanted.items():
        at = first
        while at < first + count:
            reaches = {index: _reach(there.get(name), at) for index, there in enumerate(held)}
            furthest = max(reaches.values(), default=at)
            if furthest <= at:
                raise LayoutMismatch(f"{name[0]}.{name[1]}", "absent", f"head {at} is needed")
            equals = [index for index, reach in reaches.items() if reach == furthest]
            end = min(furthest, first + count)
            taken[equals[turn % len(equals)]][name] = (at, end - at)
            at = end
    return tuple(
        Share(index, None if pieces == _all_common(held[index], wanted) else pieces)
        for index, pieces in enumerate(taken)
        if pieces
    )


def _pieces(manifest: Manifest) -> dict[PieceName, Piece]:
    """Return what a rank holds of every component: first and count along the sharded axis."""
    return {
        (layer.name, part.role): (part.held.first, part.held.count)
        for group in manifest.groups
        for layer in group.layers
        for part in layer.components
    }


def _reach(piece: Piece | None, at: int) -> int:
    """Return where a piece that holds ``at`` ends; ``at`` itself if it does not."""
    return piece[0] + piece[1] if piece is not None and piece[0] <= at < piece[0] + piece[1] else at


def _common(there: Mapping[PieceName, Piece], wanted: Mapping[PieceName, Piece], name: PieceName) -> Piece:
    (first, count), (first_there, count_there) = wanted[name], there.get(name, (0, 0))
    low = max(first, first_there)
    return (low, max(0, min(first + count, first_there + count_there) - low))


def _all_common(there: Mapping[PieceName, Piece], wanted: Mapping[PieceName, Piece]) -> dict[PieceName, Piece]:
    pieces = {name: _common(there, wanted, name) for name in wanted}
    return {name: piece for name, piece in pieces.items() if piece[1]}
