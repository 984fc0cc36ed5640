"""What one page holds, byte by byte: the only place that knows how components lie beside each other in it."""

import math

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec, ComponentSpec


class Plane(Struct, frozen=True):
    """Components that stay together, token by token: keys with their scales, values with theirs, a latent.

    Attributes:
        parts: the components, each with its offset in a cell.
        cell_bytes: bytes of one head of one token.
    """

    parts: tuple[tuple[ComponentSpec, int], ...]
    cell_bytes: int


def planes(spec: CacheSpec) -> tuple[Plane, ...]:
    """Return the planes of a spec whose components have tokens: two for keys and values, one for a latent."""
    named: dict[str, list[ComponentSpec]] = {}
    for part in spec.components:
        named.setdefault(part.role[0] if part.role[0] in "kv" else "", []).append(part)
    found = []
    for parts in named.values():
        offsets, end = beside([(part.shape[-1] * ITEM_BYTES[part.dtype], ITEM_BYTES[part.dtype]) for part in parts])
        found.append(Plane(tuple(zip(parts, offsets, strict=True)), end))
    return tuple(found)


def states(spec: CacheSpec, shard: Shard) -> tuple[tuple[ComponentSpec, int], ...]:
    """Return the states of a spec, each with its offset in the rank's page."""
    sizes = [(part.nbytes(shard), ITEM_BYTES[part.dtype]) for part in spec.components]
    return tuple(zip(spec.components, beside(sizes)[0], strict=True))


def beside(sizes: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Lay pieces of (bytes, alignment) side by side; return their offsets and the bytes of all.

    The whole is padded so that it may stand beside itself.
    """
    offsets, end = [], 0
    for nbytes, alignment in sizes:
        offsets.append(round_up(end, alignment))
        end = offsets[-1] + nbytes
    return offsets, round_up(end, math.lcm(*(alignment for _, alignment in sizes)))


def round_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is not below ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def has_tokens(spec: CacheSpec) -> bool:
    """Tell whether a spec keeps something for every token, rather than a state."""
    return spec.components[0].token_axis >= 0


def kernel_page_bytes(spec: CacheSpec, shard: Shard) -> int:
    """Return the bytes of one kernel block on one rank; of a state, those of all."""
    if not has_tokens(spec):
        return beside([(part.nbytes(shard), ITEM_BYTES[part.dtype]) for part in spec.components])[1]
    heads = shard.heads(spec.components[0].shape[0]).count
    return heads * spec.kernel_tokens * sum(plane.cell_bytes for plane in planes(spec))


def content_bytes(spec: CacheSpec, shard: Shard) -> int:
    """Return the bytes of one page on one rank without padding at its end."""
    return spec.block_size // spec.kernel_tokens * kernel_page_bytes(spec, shard)


def page_bytes(spec: CacheSpec, shard: Shard | None = None, *, layer: str = "") -> int:
    """Return the bytes of one page on one rank, padding included.

    Args:
        spec: of the layer.
        shard: the rank; None: one rank holds the whole model.
        layer: name of the layer, for the error.

    Raises:
        SpecInvalid: the padded page is too small for its content; names the layer, both sizes and the rank.
    """
    shard = shard or Shard()
    content = content_bytes(spec, shard)
    if spec.page_bytes is None:
        return content
    if spec.page_bytes < content:
        raise SpecInvalid(
            f"{layer}{': ' if layer else ''}page_bytes is {spec.page_bytes}, but a page of tp_rank {shard.tp_rank} "
            f"of {shard.tp_size} holds {content} bytes",
            remedy=f"Set page_bytes to at least {content}, or compute it for this tp_size.",
        )
    return spec.page_bytes


def item_alignment(spec: CacheSpec) -> int:
    """Return what every page of a spec must be aligned to, so that each element is."""
    return math.lcm(*(ITEM_BYTES[part.dtype] for part in spec.components))
