"""Random models, and random engines that serve them: every kind of cache, shard, stage, layout and block size.

Everything is chosen through ``pick(options)``, which returns one of them: Hypothesis's, which shrinks towards the
first, or that of a seeded generator. What is random but not worth shrinking comes from the case's seed.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import Group, plan_groups
from kvflow.layout.shards import Shard
from kvflow.layout.specs import (
    MLA,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    Opaque,
    SlidingWindow,
    State,
)

from .oracle import Kind, Model, content_bytes, held, keeps_every_token

SPECS = {
    "full": FullAttention,
    "sliding": SlidingWindow,
    "chunked": ChunkedLocal,
    "cross": CrossAttention,
    "mla": MLA,
    "mamba": Mamba,
    "opaque": Opaque,
}
LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "BHLNC")
KV_FORMS = ("content", "split", "block_split")
TP_SIZES = (1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 7, 8)
DCP_SIZES = (1, 1, 2, 3, 4)
TARGETS = 2
"""Ranks of unlike engines that pull one request: what the source engine took to make is used twice."""
BLOCK_SIZES = (4, 1, 2, 3, 6, 8, 12)
RANKS_MAX = 8
"""Of an engine, where tokens are divided among ranks of their own: more would only take time."""
MEMORIES = ("allocated", "allocated", "adopted", "own")
"""Who made the tensors: kvflow, kvflow but described anew from the views, or the engine with strides of its own."""
CONTENTS = ("uint8", "bfloat16", "float32", "float8_e4m3fn")


@dataclass(frozen=True)
class Stage:
    """What all ranks of one pipeline stage have in common.

    Attributes:
        layers: layer name -> kind.
        specs: the same as kvflow wants it.
        groups: a partition of them.
        tp_size: ranks that divide the heads.
        layout: of the allocation.
        kv: form of keys and values.
        memory: one of ``MEMORIES``.
        options: of ``allocate``.
        dcp_size: ranks that divide the tokens.
        interleave: tokens in a row that lie on one of them.
        nested: whether those ranks are neighbors among the ``tp_size``, as vLLM has it, or a factor of their own.
    """

    layers: dict
    specs: dict
    groups: tuple[Group, ...]
    tp_size: int
    layout: str
    kv: str
    memory: str = "allocated"
    options: dict = field(default_factory=dict)
    dcp_size: int = 1
    interleave: int = 1
    nested: bool = False

    @property
    def num_ranks(self):
        return self.tp_size if self.nested else self.tp_size * self.dcp_size

    def place(self, rank):
        """Return a rank's number among those that divide the heads, and among those that divide the tokens."""
        return (rank if self.nested else rank // self.dcp_size), rank % self.dcp_size

    def shard(self, rank):
        tp_rank, dcp_rank = self.place(rank)
        return Shard(
            tp_rank=tp_rank,
            tp_size=self.tp_size,
            dcp_rank=dcp_rank,
            dcp_size=self.dcp_size,
            dcp_interleave=self.interleave,
        )


@dataclass(frozen=True)
class Case:
    """One request that an engine offers, and ranks of other engines that pull it.

    Attributes:
        model: what all of them serve.
        sources: (stage, rank) of every rank that is asked.
        targets: (stage, rank) of each that pulls, alone.
        whole: whether the sources together have everything, and share it out; otherwise one gives what it can.
        turn: of the targets, among sources that would do equally well; None: whoever holds something may give it.
        seed: of block ids, noise and gaps.
    """

    model: Model
    sources: tuple
    targets: tuple
    whole: bool
    turn: int | None
    seed: int


def generate_case(pick, seed):
    """Return a model, a source engine and ``TARGETS`` ranks of target engines: as many pairs."""
    model = generate_model(pick)
    names = list(model.layers)
    whole = pick((True, True, True, False))
    tp_size = pick(TP_SIZES)
    if whole:
        # Stages of unlike parallelism that overlap hold parts of the same that end at different heads.
        sizes = (tp_size, tp_size, pick(TP_SIZES))
        stages = [generate_stage(pick, model, part, pick(sizes)) for part in _stages(pick, names)]
        sources = [(stage, rank) for stage in stages for rank in range(stage.num_ranks)]
    else:
        stage = generate_stage(pick, model, _slice(pick, names), tp_size)
        sources = [(stage, pick(range(stage.num_ranks)))]
    targets = []
    for _ in range(TARGETS):
        wanted = _slice(pick, names)
        if not whole and not sources[0][0].layers.keys() & set(wanted):
            wanted = names
        stage = generate_stage(pick, model, wanted, pick(TP_SIZES))
        targets.append((stage, pick(range(stage.num_ranks))))
    return Case(model, tuple(sources), tuple(targets), whole, pick((0, 1, 2, None)), seed)


def generate_model(pick):
    """One to three kinds of layers, one or two of each, in turns."""
    kinds = [pick(KINDS)(pick) for _ in range(pick((1, 1, 2, 2, 3)))]
    layers = [kind for kind in dict.fromkeys(kinds) for _ in range(pick((1, 2)))]
    layers = layers[::2] + layers[1::2]
    named = {f"layers.{index}": kind for index, kind in enumerate(layers)}
    return Model(named, pick(range(1, 26)), pick(range(1, 10)))


def _attention(pick):
    name, more = pick((("full", {}), ("sliding", {"window": 40}), ("chunked", {"chunk": 64}), ("cross", {})))
    quantization = pick((None, None, None, "fp8_per_token_head", "nvfp4"))
    sizes = (16, 32) if quantization == "nvfp4" else (1, 2, 3, 8)
    dtypes = {"nvfp4": ("uint8",), "fp8_per_token_head": ("float8_e4m3fn", "int8")}.get(quantization, CONTENTS)
    fields = {
        "num_kv_heads": pick(range(1, 9)),
        "head_size": pick(sizes),
        "head_size_v": pick((0, 0, *sizes)),
        "dtype": pick(dtypes),
        "quantization": quantization,
    }
    return Kind(name, tuple((fields | more).items()))


def _latent(pick):
    fields = {
        "head_size": pick((1, 4, 6)),
        "dtype": pick(CONTENTS),
        "rope_size": pick((0, 2)),
        "rope_dtype": pick((None, "bfloat16", "float32")),
        "scale_bytes": pick((0, 0, 3, 4)),
        "sliding_window": pick((0, 0, 24)),
    }
    return Kind("mla", tuple(fields.items()))


def _recurrent(pick):
    states = []
    for name in ("conv_x", "conv_B", "ssm")[: pick((1, 2, 3))]:
        shape = tuple(pick(range(1, 8)) for _ in range(pick((1, 2, 3))))
        states.append(State(name, shape, pick(CONTENTS[:3]), pick((0, *range(len(shape)), None))))
    return Kind("mamba", (("states", tuple(states)),))


def _opaque(pick):
    """Pages of a kind that is not known are moved whole, so that their block size is the model's."""
    return Kind("opaque", (("nbytes", pick((1, 7, 32))), ("block_size", pick(BLOCK_SIZES))))


KINDS = (_attention, _attention, _attention, _attention, _latent, _latent, _recurrent, _recurrent, _opaque)


def _slice(pick, names):
    """Some neighbors, mostly all."""
    if pick((True, True, False)):
        return names
    first = pick(range(len(names)))
    return names[first : pick(range(first + 1, len(names) + 1))]


def _stages(pick, names):
    """Cut the layers into pipeline stages; a stage may hold layers of the next one as well, and one more holds all."""
    cuts = sorted({0, *(pick(range(len(names))) for _ in range(pick((0, 0, 0, 1, 2)))), len(names)})
    stages = [names[low : high + pick((0, 0, 1))] for low, high in pairwise(cuts)]
    return [*stages, *pick(([], [], [], [names]))]


def generate_stage(pick, model, names, tp_size):
    """Choose how one stage keeps its layers."""
    layers = {name: model.layers[name] for name in names}
    layout, kv = pick(LAYOUTS), pick(KV_FORMS)
    block_size = pick(BLOCK_SIZES)
    options = {}
    if pick((False, False, True)):
        options = {"apart": (pick(names),) if len(names) > 1 else (), "alignment": pick((1, 16, 24))}
    grouping = pick(("like", "planned", "mixed"))
    specs, groups = {}, None
    if grouping == "planned":
        specs = {name: spec_of(kind, block_size) for name, kind in layers.items()}
        groups = _planned(specs, layout, tp_size)
    if groups is None:
        specs, groups = _grouped(pick, layers, block_size, mixed=grouping == "mixed")
    divided = _divided_tokens(pick, layers, groups, tp_size)
    return Stage(layers, specs, groups, tp_size, layout, kv, pick(MEMORIES), options, *divided)


def _divided_tokens(pick, layers, groups, tp_size):
    """Choose decode context parallelism that the stage can have: its size, interleave, and where its ranks are."""
    striped = [group for group in groups if keeps_every_token(group)]
    if not striped or any(kind.name == "opaque" for kind in layers.values()):
        return 1, 1, False
    heads = {layers[name].heads for group in striped for name in group.layers}
    ways = [(size, False) for size in DCP_SIZES if tp_size * size <= RANKS_MAX]
    ways += [(size, True) for size in DCP_SIZES if size > 1 and _neighbors_hold_the_same(heads, tp_size, size)]
    size, nested = pick(ways or [(1, False)])
    widths = [width for width in range(1, 13) if not any(group.block_size % width for group in striped)]
    return (size, pick(widths), nested) if size > 1 else (1, 1, False)


def _neighbors_hold_the_same(heads, tp_size, size):
    """Whether ``size`` neighbors hold the same heads, so that they can divide the tokens."""
    return tp_size % size == 0 and all(
        held(total, rank, tp_size) == held(total, rank - rank % size, tp_size)
        for total in heads
        for rank in range(tp_size)
    )


def spec_of(kind, block_size, kernel_block_size=0):
    """Return the spec of one kind for blocks of some size."""
    fields = dict(kind.fields)
    if kind.tokens and kernel_block_size:
        fields["kernel_block_size"] = kernel_block_size
    return SPECS[kind.name](**{"block_size": block_size} | fields)


def _planned(specs, layout, tp_size):
    """Let kvflow form the groups, or return None: pages of several sizes do not fit every layout."""
    try:
        return plan_groups(specs, layout=layout, shard=Shard(tp_size=tp_size))
    except SpecInvalid:
        return None


def _grouped(pick, layers, block_size, *, mixed):
    """Put like layers into groups, in any order, each with a block size of its own."""
    like = {}
    for name, kind in layers.items():
        joins = mixed and kind.tokens and kind.name != "cross"
        like.setdefault("mixed" if joins else kind, []).append(name)
    specs, groups = {}, []
    for names in like.values():
        own = block_size * pick((1, 1, 2)) // pick((1, 1, 2)) or 1
        divisors = [size for size in range(1, own + 1) if own % size == 0]
        kernel = pick((0, pick(divisors)))
        times = pick((1, 1, 1, 2))
        cut = pick((len(names), *range(1, len(names) + 1)))
        for members in filter(None, (names[:cut], names[cut:])):
            kinds = {layers[name] for name in members}
            specs |= {name: spec_of(layers[name], own, kernel) for name in members}
            page = max(content_bytes(kind, own * times) for kind in kinds)
            padded = 0 if pick((True, True, False)) else page + pick((0, 5, 32))
            windows = {specs[name].window for name in members}
            several = len({kind.name for kind in kinds}) > 1 or len(windows) > 1
            kind_name = "mixed" if several else next(iter(kinds)).name
            blocks = specs[members[0]].block_size * (1 if kind_name == "opaque" else times)
            groups.append(Group(tuple(members), kind_name, blocks, 0 if several else windows.pop(), padded))
    order = sorted(range(len(groups)), key=lambda _: pick(range(2)))
    return specs, tuple(groups[index] for index in order)
