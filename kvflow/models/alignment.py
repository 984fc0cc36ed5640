"""Make pages equal for models with recurrent layers: enlarge attention blocks, and pad states."""

from collections.abc import Mapping

import msgspec

from kvflow.layout.pages import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, Mamba


def align_states(specs: Mapping[str, CacheSpec], *, shard: Shard | None = None) -> dict[str, CacheSpec]:
    """Enlarge attention blocks until a page holds a state, and pad the states to that page.

    A state is as large as hundreds of tokens. Without this, attention pages would be mostly padding. The block size
    becomes the smallest multiple whose page holds a state, as in vLLM 0.32. Ranks divide states and tokens differently,
    so the result depends on ``tp_size``.

    Args:
        specs: layer name -> spec.
        shard: the rank. Every rank of an engine gets the same result, that of rank 0, which holds the most.

    Returns:
        The specs, in the same order. A model without states, or without attention, is unchanged.
    """
    largest = Shard(tp_size=shard.tp_size if shard else 1)
    state_bytes = max((page_bytes(spec, largest) for spec in specs.values() if isinstance(spec, Mamba)), default=0)
    attention = [spec for spec in specs.values() if not isinstance(spec, Mamba)]
    if not state_bytes or not attention:
        return dict(specs)
    smallest = min(attention, key=lambda spec: page_bytes(spec, largest))
    factor = -(-state_bytes // page_bytes(smallest, largest))
    block_size = factor * smallest.block_size
    padded = factor * page_bytes(smallest, largest)
    return {
        name: msgspec.structs.replace(spec, block_size=block_size, page_bytes=padded)
        if isinstance(spec, Mamba)
        else msgspec.structs.replace(spec, block_size=factor * spec.block_size)
        for name, spec in specs.items()
    }
