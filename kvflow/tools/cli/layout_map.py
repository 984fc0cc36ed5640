"""The memory of one block as a picture: a lane per group, a box per page, a color per component."""

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from kvflow.layout.describe import CachePlan
from kvflow.tools.cli.layout_pieces import Piece, pieces
from kvflow.tools.cli.layout_report import Report

WIDTH = 1200
LEFT, RIGHT = 190, 40
TOP = 116
LANE, GAP = 46, 16
RULER = 44
"""Pixels: the picture, its margins, the height of a lane, the space between two, and the room for the ruler."""

CHARACTER = 6.2
"""Pixels that a digit of a label takes, about."""

TICKS_MAX = 10

COLORS = {
    "k": "#8ab6d6",
    "v": "#f3c178",
    "latent": "#8fc9a8",
    "rope": "#c3dd8f",
    "conv_x": "#c9b3e3",
    "conv_B": "#ab93d1",
    "conv_C": "#8f76bb",
    "conv_q": "#c9b3e3",
    "conv_k": "#ab93d1",
    "conv_v": "#8f76bb",
    "ssm": "#eda5a5",
}
OTHER_COLORS = ("#b8c4ce", "#d9c7b0", "#a9d3d6", "#e0b7cf")
"""For roles without a color of their own, in the order in which they appear."""


FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'

HATCHING = (
    '<defs><pattern id="padding" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#f6f6f6"/>'
    '<line x1="0" y1="0" x2="0" y2="7" stroke="#b9b9b9" stroke-width="2"/></pattern></defs>'
)


class Row(NamedTuple):
    """One group of the map.

    Attributes:
        title: what it is.
        detail: how many of what.
        layers: name of a layer, and where its parts lie.
        padding: bytes of the block that it leaves unused.
    """

    title: str
    detail: str
    layers: Sequence[tuple[str, Sequence[Piece]]]
    padding: int


def draw(plan: CachePlan, report: Report) -> str:
    """Draw one block as an SVG image.

    Every lane starts at byte 0: groups lie over each other, and a block belongs to one of them at a time.

    Args:
        plan: the cache in a pool of one block, where every layout is one row.
        report: what to write beside it.
    """
    lanes = [
        Row(
            f"group {index}: {group.kind}",
            f"{len(group.layers)} layers, {group.block_size} tokens",
            [(name, pieces(plan.layers[name].components, group.block_size)) for name in group.layers],
            report.groups[index].padding_bytes,
        )
        for index, group in enumerate(plan.groups)
    ]
    bottom = TOP + len(lanes) * (LANE + GAP)
    every = [piece for row in lanes for _, cut in row.layers for piece in cut]
    colors = _colors(every)
    scale = (WIDTH - LEFT - RIGHT) / plan.bytes_per_block
    canvas = f'width="{WIDTH}" height="{bottom + RULER}"'
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + RULER}" {canvas} {FONT}>',
        HATCHING,
        f'<rect {canvas} fill="white"/>',
        *_heading(report, max(len(cut) for row in lanes for _, cut in row.layers)),
        *_legend(colors, striped=any(piece.interleaved for piece in every)),
        *_ruler(plan.bytes_per_block, scale, bottom),
    ]
    for at, row in enumerate(lanes):
        elements += _lane(row, at, plan.bytes_per_block, scale, colors)
    return "\n".join([*elements, "</svg>", ""])


def _heading(report: Report, pieces_max: int) -> Iterator[str]:
    facts = (
        f"layout {report.layout}, kv {report.kv}, rank {report.tp_rank} of {report.tp_size}: "
        f"one block is {report.bytes_per_block:,} bytes, {report.padding_percent:.1f} % of them padding on average"
    )
    if report.tensors < report.positions:
        note = "A block is one row."
    elif report.tensors > 1:
        note = f"The pages of a block lie in {report.tensors} tensors, drawn side by side."
    else:
        note = "A block is one page."
    if pieces_max > 1:
        note += f" Pages lie in up to {pieces_max} pieces."
    yield f'<text x="{LEFT}" y="30" font-size="20" font-weight="bold">{escape(report.model)}</text>'
    yield f'<text x="{LEFT}" y="52" fill="#444">{escape(facts)}. {note}</text>'


def _legend(colors: dict[str, str], *, striped: bool) -> Iterator[str]:
    x = float(LEFT)
    for label, fill in [*colors.items(), ("padding", "url(#padding)")]:
        yield f'<rect x="{x:.1f}" y="68" width="16" height="16" fill="{fill}" stroke="#555" stroke-width="0.5"/>'
        yield f'<text x="{x + 22:.1f}" y="80">{escape(label)}</text>'
        x += 44 + CHARACTER * len(label) * 1.1
    if striped:
        yield f'<text x="{x:.1f}" y="80" fill="#444">stripes: components take turns, token by token</text>'


def _ruler(nbytes: int, scale: float, bottom: int) -> Iterator[str]:
    """Draw ticks at round numbers of bytes, with a line up through the lanes."""
    step = 1 << max(0, math.ceil(math.log2(nbytes / TICKS_MAX)))
    for tick in range(0, nbytes + 1, step):
        x = LEFT + tick * scale
        yield f'<line x1="{x:.2f}" y1="{TOP - 8}" x2="{x:.2f}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle" fill="#444">{_size(tick)}</text>'
    yield f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#888"/>'


def _lane(row: Row, at: int, nbytes: int, scale: float, colors: dict[str, str]) -> Iterator[str]:
    y = TOP + at * (LANE + GAP)
    yield f'<text x="{LEFT - 14}" y="{y + 19}" text-anchor="end" font-weight="bold">{escape(row.title)}</text>'
    yield f'<text x="{LEFT - 14}" y="{y + 35}" text-anchor="end" fill="#444">{escape(row.detail)}</text>'
    yield (
        f'<rect x="{LEFT}" y="{y}" width="{nbytes * scale:.2f}" height="{LANE}" fill="url(#padding)" stroke="#888" '
        f'stroke-width="0.5"><title>padding: {row.padding:,} bytes</title></rect>'
    )
    wide_enough = _widths_of_labels(row, scale)
    for name, layer_pieces in row.layers:
        for piece in layer_pieces:
            yield "<g>"
            yield f"<title>{escape(name)}: bytes {piece.start:,} to {piece.end:,}</title>"
            yield from _parts(piece, y, scale, colors)
            x, width = LEFT + piece.start * scale, (piece.end - piece.start) * scale
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE}" fill="none" stroke="#333" '
                f'stroke-width="{0.8 if width > 3 else 0.2}"/>'
            )
            if piece.end - piece.start in wide_enough:
                middle = f'x="{x + width / 2:.2f}" y="{y + LANE / 2 + 4:.1f}"'
                yield f'<text {middle} text-anchor="middle" font-size="11">{escape(_label(name))}</text>'
            yield "</g>"


def _widths_of_labels(row: Row, scale: float) -> set[int]:
    """Return the sizes of pieces that all of the row's labels fit into: a few of them would look like all."""
    longest: dict[int, int] = {}
    for name, layer_pieces in row.layers:
        for piece in layer_pieces:
            nbytes = piece.end - piece.start
            longest[nbytes] = max(longest.get(nbytes, 0), len(_label(name)))
    return {nbytes for nbytes, length in longest.items() if nbytes * scale > CHARACTER * length + 2}


def _parts(piece: Piece, y: int, scale: float, colors: dict[str, str]) -> Iterator[str]:
    """Color a piece: side by side as the bytes are, or as stripes where components take turns."""
    # A scale beside a latent would be too thin to be seen.
    weights = [max(part.nbytes, sum(other.nbytes for other in piece.parts) // 10) for part in piece.parts]
    top = float(y)
    for part, weight in zip(piece.parts, weights, strict=True):
        start, end = (piece.start, piece.end) if piece.interleaved else (part.start, part.end)
        height = LANE * weight / sum(weights) if piece.interleaved else float(LANE)
        yield (
            f'<rect x="{LEFT + start * scale:.2f}" y="{top:.2f}" width="{(end - start) * scale:.2f}" '
            f'height="{height:.2f}" fill="{colors[part.role]}"/>'
        )
        top += height if piece.interleaved else 0


def _colors(every: Sequence[Piece]) -> dict[str, str]:
    """Return the color of every role that appears, in order."""
    roles = list(dict.fromkeys(part.role for piece in every for part in piece.parts))
    others = [role for role in roles if role not in COLORS]
    return {
        role: COLORS[role] if role in COLORS else OTHER_COLORS[others.index(role) % len(OTHER_COLORS)] for role in roles
    }


def _label(name: str) -> str:
    """Return the number of a layer, which is what of its name fits into a box."""
    number = re.search(r"\d+", name)
    return number[0] if number else name


def _size(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"
