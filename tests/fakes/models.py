"""The engines of a scenario: one small model, and how each engine lays its cache out. Planned once per process."""

from functools import cache

from msgspec import Struct

from kvflow.layout.describe import CachePlan, plan_cache
from kvflow.layout.groups import plan_groups
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, DType, FullAttention, Mamba, SlidingWindow, State

NUM_BLOCKS = 64
"""Blocks of one engine: few, so that they are reused soon."""

DTYPE: DType = "float32"
"""Four bytes per element: room for a pattern that names content, layer, role, head and token."""


class Shape(Struct, frozen=True):
    """How one engine holds the model.

    Attributes:
        model: which of the models.
        block_size: tokens of one block.
        num_ranks: tensor-parallel ranks.
        layout: order of the axes.
        kv: how keys and values lie.
    """

    model: str
    block_size: int
    num_ranks: int
    layout: str
    kv: str


SHAPES = tuple(
    Shape(model, block_size, num_ranks, layout, kv)
    for model in ("full", "window", "state")
    for block_size in (4, 8)
    for num_ranks in (1, 2)
    for layout, kv in (("BLHNC", "content"), ("LBNHC", "split"), ("BHLNC", "content"))
    if (model, block_size) != ("state", 8)  # a row of states is as long as a row of so many tokens
)


@cache
def plan_of(shape: Shape, rank: int) -> CachePlan:
    """Return where everything lies in the memory of one rank."""
    specs = _specs(shape)
    shard = Shard(tp_rank=rank, tp_size=shape.num_ranks)
    groups = plan_groups(specs, layout=shape.layout, shard=shard)
    return plan_cache(specs, groups, layout=shape.layout, kv=shape.kv, shard=shard, num_blocks=NUM_BLOCKS)


def _specs(shape: Shape) -> dict[str, CacheSpec]:
    size = shape.block_size
    full = FullAttention(block_size=size, num_kv_heads=2, head_size=2, dtype=DTYPE)
    match shape.model:
        case "full":
            return {"a": full, "b": full}
        case "window":
            return {"a": full, "b": SlidingWindow(block_size=size, num_kv_heads=2, head_size=2, dtype=DTYPE, window=6)}
        case _:
            return {"a": full, "b": Mamba(block_size=size, states=(State("ssm", (4, 4), DTYPE, shard_axis=0),))}
