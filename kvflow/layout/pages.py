"""How many bytes one layer keeps in one block on one rank."""

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec


def content_bytes(spec: CacheSpec, shard: Shard) -> int:
    """Return the bytes of one page on one rank without padding at its end."""
    blocks = spec.block_size // spec.kernel_tokens
    end = 0
    for part in spec.components:
        size = ITEM_BYTES[part.dtype]
        end = -(-end // size) * size + part.nbytes(shard)  # a component starts where its elements may
    return blocks * end


def page_bytes(spec: CacheSpec, shard: Shard | None = None) -> int:
    """Return the bytes of one page on one rank, padding included (without a shard: of the whole model).

    Raises:
        SpecInvalid: the padded page is too small for its content.
    """
    content = content_bytes(spec, shard or Shard())
    if spec.page_bytes is None:
        return content
    if spec.page_bytes < content:
        raise SpecInvalid(f"page_bytes is {spec.page_bytes}, but the page holds {content} bytes")
    return spec.page_bytes
