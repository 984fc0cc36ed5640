"""An adopted cache is an allocated one as far as anyone can tell, and what is adopted shares no byte by mistake."""

import itertools
from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import Group
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, FullAttention, Mamba, Opaque, SlidingWindow, State
from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate
from kvflow.memory.overlap import LiveBytes, check_overlaps
from kvflow.planning.plan import plan_transfer

from .caches import LAYOUTS, execute, fill_with_noise, mark_free, models, sides, thorough, thoroughly, write_tags

many = thoroughly(200)
"""For those that move bytes, which take longest."""

BLOCK_SIZE = 8
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")


@st.composite
def attention_specs(draw, heads):
    """Keys and values per head: of any size, quantized, with smaller kernel blocks."""
    quantization = draw(st.sampled_from((None, None, "fp8_per_token_head", "nvfp4")))
    dtype = {None: draw(st.sampled_from(DTYPES)), "nvfp4": "uint8"}.get(quantization, "float8_e4m3fn")
    size = st.sampled_from((16, 32)) if quantization == "nvfp4" else st.integers(1, 9)
    fields = {
        "block_size": BLOCK_SIZE,
        "kernel_block_size": draw(st.sampled_from((0, 0, 8, 4, 2))),
        "num_kv_heads": heads,
        "head_size": draw(size),
        "head_size_v": draw(st.just(0) | size),
        "dtype": dtype,
        "quantization": quantization,
    }
    return FullAttention(**fields) if draw(st.booleans()) else SlidingWindow(**fields, window=20)


@st.composite
def latent_specs(draw):
    rope = draw(st.integers(0, 4))
    return MLA(
        block_size=BLOCK_SIZE,
        kernel_block_size=draw(st.sampled_from((0, 4))),
        head_size=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
        rope_size=rope,
        rope_dtype=draw(st.none() | st.sampled_from(DTYPES)) if rope else None,
        scale_bytes=draw(st.integers(0, 5)),
    )


@st.composite
def state_specs(draw, heads):
    shapes = st.lists(st.integers(1, 4), max_size=2)
    states = [
        State(
            f"state_{index}",
            (*draw(shapes), heads * draw(st.integers(1, 3)), *draw(shapes)),
            draw(st.sampled_from(DTYPES)),
            draw(st.none() | st.just(0)),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    return Mamba(block_size=BLOCK_SIZE, states=tuple(states))


@st.composite
def hybrids(draw):
    """Layer name -> spec of any kinds, and groups of like layers in any order."""
    heads = draw(st.sampled_from((1, 2, 3, 4, 6)))
    kinds = attention_specs(heads) | latent_specs() | state_specs(heads)
    kinds |= st.integers(1, 40).map(lambda nbytes: Opaque(block_size=BLOCK_SIZE, nbytes=nbytes))
    like = draw(st.lists(kinds, min_size=1, max_size=3, unique=True))
    specs, groups = {}, []
    for spec in like:
        for _ in range(draw(st.integers(1, 2))):
            names = [f"layers.{len(specs) + index}" for index in range(draw(st.integers(1, 3)))]
            specs |= dict.fromkeys(names, spec)
            padding = draw(st.sampled_from((0, 0, 1 << 14)))
            groups.append(Group(tuple(names), spec.kind, BLOCK_SIZE, spec.window, padding))
    return specs, draw(st.permutations(groups))


@st.composite
def allocated(draw, specs, groups, shard, num_blocks):
    """One way to allocate them, and the axes that cannot be told from the shapes."""
    kv = draw(st.sampled_from(("content", "split", "block_split")))
    cache = allocate(
        specs,
        num_blocks=num_blocks,
        layout=draw(st.sampled_from(LAYOUTS)),
        kv=kv,
        groups=groups,
        shard=shard,
        apart=draw(st.lists(st.sampled_from(sorted(specs)), max_size=1)) if len(specs) > 1 else (),
        alignment=draw(st.sampled_from((1, 16, 48))),
    )
    axes = {}
    if kv == "block_split":  # two blocks could as well be keys and values
        for name, view in cache.views.items():
            if isinstance(view, torch.Tensor) and view.dim() >= 5 and view.shape[0] == 2:
                axes[name] = "BKNHC" if view.dim() == 5 else "BRKNHC"
    return cache, axes


def described(cache):
    """Everything the planner reads, with addresses for places in regions and without the strides of single indices."""
    manifest = cache.manifest()
    return [
        (
            (group.kind, group.block_size, layer.name, layer.kind, layer.window, part.role, part.dtype),
            manifest.regions[part.region].address + part.offset,
            (part.block_stride, part.kernel_stride, part.extents),
            [stride for extent, stride in zip(part.extents, part.strides, strict=True) if extent > 1],
            (part.shard_axis, part.first, part.total, part.token_axis),
        )
        for group in manifest.groups
        for layer in group.layers
        for part in layer.components
    ]


@many
@given(st.data())
def test_an_adopted_cache_is_described_as_it_was_allocated(data):
    specs, groups = data.draw(hybrids())
    tp_size = data.draw(st.sampled_from((1, 1, 2, 4)))
    shard = Shard(tp_rank=data.draw(st.integers(0, tp_size - 1)), tp_size=tp_size)
    cache, axes = data.draw(allocated(specs, groups, shard, data.draw(st.integers(1, 4))))
    adopted = adopt(cache.views, specs, groups, shard=shard, axes=axes)
    assert described(adopted) == described(cache)
    assert adopted.groups == cache.groups
    (whole,) = cache.manifest().regions
    regions = adopted.manifest().regions
    assert all(one.address + one.nbytes < other.address for one, other in itertools.pairwise(regions))
    assert whole.address <= regions[0].address
    assert regions[-1].address + regions[-1].nbytes <= whole.address + whole.nbytes


@thorough
@given(st.data())
def test_a_plan_between_adopted_caches_moves_every_kind(data):
    """One block of each group, from one layout into another; the oracle reads what was allocated."""
    specs, groups = data.draw(hybrids())
    num_blocks = len(groups) + 1
    (source, source_axes), (target, target_axes) = (
        data.draw(allocated(specs, groups, Shard(), num_blocks)) for _ in range(2)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    for seed, cache in enumerate((source, target)):
        fill_with_noise(cache, seed)
    source_ids, target_ids = (rng.permutation(num_blocks)[: len(groups)] for _ in range(2))
    theirs = adopt(source.views, specs, groups, axes=source_axes)
    ours = adopt(target.views, specs, groups, axes=target_axes)
    before = {(name, role): blocks_of(target, name, role).clone() for name, role in roles(target)}
    execute(
        plan_transfer(theirs.manifest(), ours.manifest()),
        theirs,
        ours,
        source_ids=[[block] for block in source_ids],
        target_ids=[[block] for block in target_ids],
        num_tokens=BLOCK_SIZE,
    )
    at = {name: index for index, group in enumerate(groups) for name in group.layers}
    for (name, role), old in before.items():
        index = at[name]
        moved, given = blocks_of(target, name, role), blocks_of(source, name, role)
        assert torch.equal(moved[target_ids[index]], given[source_ids[index]]), (name, role)
        untouched = [block for block in range(num_blocks) if block not in target_ids]
        assert torch.equal(moved[untouched], old[untouched]), (name, role)


def roles(cache):
    return [
        (layer.name, part.role)
        for group in cache.manifest().groups
        for layer in group.layers
        for part in layer.components
    ]


def blocks_of(cache, name, role):
    """One component as bytes, a row per block."""
    return cache.component(name, role).reshape(cache.num_blocks, -1).contiguous().view(torch.uint8)


@thorough
@given(st.data(), st.sampled_from(("source", "target", "both")))
def test_adopted_and_allocated_caches_exchange_tagged_bytes(data, adopting):
    sharded = data.draw(st.booleans())
    model = data.draw(models(mixed_heads=not sharded))
    tp_sizes = (1, 2, 3) if sharded else (1,)
    source_side, target_side = (data.draw(sides(model, tp_sizes=tp_sizes)) for _ in range(2))
    num_tokens = data.draw(st.integers(1, 2 * max(spec.block_size for spec in source_side.specs.values())))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    source, source_ids = opened(source_side, num_tokens, rng)
    target, target_ids = opened(target_side, num_tokens, rng)
    for seed, cache in enumerate((source, target)):
        fill_with_noise(cache, seed)
    write_tags(source_side, source, source_ids, num_tokens, source_side.heads)
    expected, free = (target_side.cache(target.num_blocks) for _ in range(2))
    expected.backing.copy_(target.backing)
    held = {name: sorted({*source_side.heads(name)} & {*target_side.heads(name)}) for name in model.layers}
    write_tags(target_side, expected, target_ids, num_tokens, held.get)
    mark_free(target_side, free, target_ids, num_tokens)

    theirs = adopted_as(source_side, source) if adopting != "target" else source
    ours = adopted_as(target_side, target) if adopting != "source" else target
    plan = plan_transfer(theirs.manifest(), ours.manifest())
    execute(plan, theirs, ours, source_ids=source_ids, target_ids=target_ids, num_tokens=num_tokens)

    meaningful = free.backing == 0
    assert torch.equal(target.backing[meaningful], expected.backing[meaningful])


def adopted_as(side, cache):
    shard = Shard(tp_rank=side.tp_rank, tp_size=side.tp_size)
    return adopt(cache.views, side.specs, cache.groups, shard=shard)


def opened(side, num_tokens, rng):
    """Allocate a pool with room for one request in every group and one block more, and list blocks at random places."""
    counts = [-(-num_tokens // group.block_size) for group in side.cache(1).groups]
    cache = side.cache(sum(counts) + 1)
    order = iter(rng.permutation(cache.num_blocks).tolist())
    return cache, [list(itertools.islice(order, count)) for count in counts]


strides = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24))


@st.composite
def live_bytes(draw):
    """Tensors of any strides in one memory, few enough for their bytes to be listed."""
    axes = st.lists(st.tuples(st.integers(1, 3), strides), max_size=2)
    block_stride = draw(st.sampled_from((8, 12, 24)))
    return [
        LiveBytes(
            path=f"layers.{index}",
            group=draw(st.integers(0, 2)),
            region=0,
            offset=draw(st.integers(0, 40)),
            block_stride=draw(st.just(block_stride) | strides),
            axes=tuple(draw(axes)),
            item_bytes=draw(st.sampled_from((1, 2, 4))),
        )
        for index in range(draw(st.integers(1, 3)))
    ]


def shares_a_byte(live, num_blocks):
    """Tell whether a byte serves two blocks, or two things in one group, by listing all of them."""
    serves: dict[int, list[tuple[int, int, int]]] = {}
    for index, each in enumerate(live):
        for block, *at in itertools.product(range(num_blocks), *(range(extent) for extent, _ in each.axes)):
            inside = sum(place * stride for place, (_, stride) in zip(at, each.axes, strict=True))
            first = each.offset + block * each.block_stride + inside
            for byte in range(first, first + each.item_bytes):
                serves.setdefault(byte, []).append((block, each.group, index))
    return any(
        one[0] != other[0] or one[1] == other[1]
        for users in serves.values()
        for one, other in itertools.combinations(users, 2)
    )


@thorough
@given(live_bytes(), st.integers(1, 4))
def test_what_passes_the_check_of_overlaps_shares_no_byte(live, num_blocks):
    try:
        check_overlaps(live, num_blocks=num_blocks, region_bytes=[1 << 10])
    except SpecInvalid:
        return
    assert not shares_a_byte(live, num_blocks)


@thorough
@given(live_bytes())
def test_what_is_said_to_meet_in_one_block_does(live):
    """With one block the check is exact, but for tensors whose own axes interleave."""
    check = partial(check_overlaps, num_blocks=1, region_bytes=[1 << 10])
    try:
        for each in live:
            check([each])
    except SpecInvalid:
        return
    try:
        check(live)
    except SpecInvalid:
        assert shares_a_byte(live, 1)
