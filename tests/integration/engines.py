"""Engines of several ranks as the combinations have them, and what they keep of one request.

The oracle knows what an attention backend knows: the tensors, what their axes stand for, and which heads of the model
a rank holds by the written rule. It shares nothing with the planner, nor with ``component`` and ``held`` of a cache.
"""

import zlib
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import prod

import msgspec
import numpy as np
import torch

import kvflow

NUM_BLOCKS = 64
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
FORMS = {"content": "BHNC", "split": "KBNHC", "block_split": "BKNHC"}
CANONICAL = "KBRHNC"


@dataclass(frozen=True)
class Request:
    """What a model is asked to keep.

    Attributes:
        name: of the request; every byte depends on it.
        num_tokens: of it.
        salt: xored into every byte, to tell replicas from each other.
    """

    name: str
    num_tokens: int
    salt: int = 0

    def content(self, layer, role, *shape):
        """Return what the whole model keeps: uint8 that depend on nothing but names and coordinates."""
        seed = zlib.crc32(f"{self.name}/{layer}/{role}".encode())
        values = np.random.default_rng(seed).integers(0, 256, prod(shape), np.uint8)
        return torch.from_numpy(values.reshape(shape) ^ np.uint8(self.salt))


@dataclass(frozen=True)
class Engine:
    """How an engine keeps its cache.

    Attributes:
        specs: of the whole model.
        tp: ranks that divide the heads, in each stage.
        dcp: neighbors among them that divide the tokens.
        interleave: tokens in a row that lie on one of those.
        layout: of ``kvflow.allocate``.
        kv: likewise.
        stages: names of the layers of each pipeline stage; empty for one stage with all.
        form: axes of the tensors that the engine allocates itself and kvflow adopts; empty if kvflow allocates.
        order: the same axes as they lie in memory, where that is another order.
        options: further arguments of ``kvflow.allocate``.
        note: what is special about it.
    """

    specs: Mapping[str, object]
    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    layout: str = "BLHNC"
    kv: str = "content"
    stages: tuple[tuple[str, ...], ...] = ()
    form: str = ""
    order: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def ranks(self):
        """Build every rank of it, stage by stage."""
        stages = self.stages or (tuple(self.specs),)
        return [Rank(self, stage, rank) for stage in stages for rank in range(self.tp)]


def is_state(spec):
    """Tell whether a layer keeps states instead of tokens."""
    return isinstance(spec, kvflow.Mamba)


class Rank:
    """One rank: its cache, and its memory as the engine sees it.

    Attributes:
        cache: as kvflow sees it.
        memory: all of its bytes, one flat tensor per allocation.
    """

    def __init__(self, engine, layers, tp_rank):
        self.engine = engine
        self.tp_rank = tp_rank
        self.specs = {name: engine.specs[name] for name in layers}
        self.dcp_rank = tp_rank % engine.dcp
        shard = kvflow.Shard(
            tp_rank=tp_rank,
            tp_size=engine.tp,
            dcp_rank=self.dcp_rank,
            dcp_size=engine.dcp,
            dcp_interleave=engine.interleave,
        )
        if engine.form:
            whole, self.tensors, self.memory = self._engines_own()
            axes = {name: engine.form for name, spec in self.specs.items() if not is_state(spec)}
            self.cache = kvflow.adopt(whole, self.specs, shard=shard, axes=axes)
        else:
            self.cache = kvflow.allocate(
                self.specs, num_blocks=NUM_BLOCKS, layout=engine.layout, kv=engine.kv, shard=shard, **engine.options
            )
            self.tensors, self.memory = self.cache.views, [self.cache.backing]

    def held(self, total):
        """Return which of the model's heads this rank holds, by the written rule."""
        size = self.engine.tp
        if total < size:
            return [self.tp_rank * total // size]
        return [int(head) for head in np.array_split(np.arange(total), size)[self.tp_rank]]

    def ranks_of_tokens(self, group):
        """Return among how many ranks the tokens of a group are divided: where no window lets blocks be dropped."""
        return self.engine.dcp if group.kind in ("full", "mla", "mixed") and not group.window else 1

    def num_blocks(self, group, num_tokens):
        """Return how many block ids so many tokens of a request take."""
        return -(-num_tokens // (group.block_size * self.ranks_of_tokens(group)))

    def tokens(self, group, num_blocks):
        """Return the tokens that a request's first blocks have room for, in the order in which they lie here."""
        size = self.ranks_of_tokens(group)
        every = range(num_blocks * group.block_size * size)
        return torch.tensor(
            [token for token in every if token // self.engine.interleave % size == self.dcp_rank % size]
        )

    def fill(self, seed):
        """Fill all memory with noise that depends on a text, so that a byte that nobody may touch is seen to be."""
        rng = np.random.default_rng(zlib.crc32(seed.encode()))
        for memory in self.memory:
            memory.copy_(torch.from_numpy(rng.integers(0, 256, memory.numel(), np.uint8)))

    def write(self, request, block_ids):
        """Write what the model keeps of a request into its blocks, a list per group; tokens past its end are zeros."""
        for group, blocks in zip(self.cache.groups, block_ids, strict=True):
            for layer in group.layers:
                if is_state(self.specs[layer]):
                    self._write_states(request, layer, blocks)
                else:
                    self._write_tokens(request, layer, group, blocks)

    def forget_past(self, request, block_ids):
        """Zero the tokens past the end of a request: what they hold means nothing."""
        for group, blocks in zip(self.cache.groups, block_ids, strict=True):
            last = self.tokens(group, self.num_blocks(group, request.num_tokens))[-group.block_size :]
            past = torch.nonzero(last >= request.num_tokens).flatten()
            for layer in group.layers if len(past) and blocks and blocks[-1] >= 0 else ():
                if is_state(self.specs[layer]):
                    continue
                for _, cells in self._cells(layer, group.block_size):
                    # A block's tokens have no axis of their own beside kernel blocks: indices instead of a slice.
                    kernel, token = past // cells.shape[3], past % cells.shape[3]
                    cells[blocks[-1]].transpose(1, 2)[kernel, token] = 0

    def _write_tokens(self, request, layer, group, blocks):
        block_size, in_all = group.block_size, self.num_blocks(group, request.num_tokens)
        here = self.tokens(group, in_all)
        first = (in_all - len(blocks)) * block_size
        for role, cells in self._cells(layer, block_size):
            total = getattr(self.specs[layer], "num_kv_heads", 1)
            content = request.content(layer, role, request.num_tokens, total, cells.shape[-1])
            past = torch.zeros(int(here.max()) + 1, total, cells.shape[-1], dtype=torch.uint8)
            content = torch.cat([content, past])[here][:, self.held(total)].transpose(0, 1)
            tokens = cells.shape[3]
            for number, block in enumerate(blocks):
                for kernel in range(cells.shape[1] if block >= 0 else 0):
                    at = first + number * block_size + kernel * tokens
                    cells[block, kernel] = content[:, at : at + tokens]

    def _write_states(self, request, layer, blocks):
        for state, tensor in zip(self.specs[layer].states, self.tensors[layer], strict=True):
            item = BYTES[state.dtype]
            content = request.content(layer, state.name, *state.shape, item)
            if state.shard_axis is not None:
                held = torch.tensor(self.held(state.shape[state.shard_axis]))
                content = content.index_select(state.shard_axis, held)
            tensor[blocks[-1]].view(torch.uint8).unflatten(-1, (-1, item)).copy_(content)

    def _cells(self, layer, block_size):
        """Yield the names of what a layer keeps, each with its bytes: [block, kernel block, head, token, byte]."""
        spec, tensors = self.specs[layer], self.tensors[layer]
        kernel_blocks = block_size // (spec.kernel_block_size or block_size)
        if isinstance(spec, kvflow.MLA):
            form = (self.engine.form or "BNC").replace("L", "")
            yield "latent", canonical(tensors, form, kernel_blocks)[0]
        elif isinstance(tensors, list):
            for role, tensor in zip("kv", tensors, strict=True):
                yield role, canonical(tensor, "BNHC", kernel_blocks)[0]
        else:
            form = (self.engine.form or FORMS[self.engine.kv]).replace("L", "")
            pair = canonical(tensors, form, kernel_blocks)
            keys = cell_bytes(spec, spec.head_size)
            yield "k", pair[0, ..., :keys]
            yield "v", pair[1] if "K" in form else pair[0, ..., keys:]

    def _engines_own(self):
        """Allocate tensors as an engine does: what it hands over, each layer's own, and the memory behind them."""
        whole, own, memory = {}, {}, []
        form, order = self.engine.form, self.engine.order or self.engine.form
        for name, spec in self.specs.items():
            if is_state(spec):
                shapes = [self._held_shape(state) for state in spec.states]
                own[name] = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
                whole[name] = own[name]
                memory += [tensor.view(torch.uint8).view(-1) for tensor in own[name]]
            elif "L" in form and whole:
                whole[name] = next(iter(whole.values()))
            else:
                extents = self._extents(spec)
                base = torch.zeros([extents[axis] for axis in order], dtype=torch.uint8)
                memory.append(base.view(-1))
                whole[name] = base.permute([order.index(axis) for axis in form])
        for index, name in enumerate(self.specs):
            own.setdefault(name, whole[name].select(form.index("L"), index) if "L" in form else whole[name])
        return whole, own, memory

    def _extents(self, spec):
        """Return how long each axis of an engine's tensor is; the content in bytes."""
        latent = isinstance(spec, kvflow.MLA)
        kernel = spec.kernel_block_size or spec.block_size
        kernel_blocks = spec.block_size // kernel
        apart = "R" in self.engine.form
        cell = latent_bytes(spec) if latent else cell_bytes(spec, spec.head_size)
        return {
            "K": 2,
            "L": len(self.specs),
            "B": NUM_BLOCKS * (1 if apart else kernel_blocks),
            "R": kernel_blocks,
            "H": 1 if latent else len(self.held(spec.num_kv_heads)),
            "N": kernel,
            "C": cell * (1 if latent or "K" in self.engine.form else 2),
        }

    def _held_shape(self, state):
        shape = list(state.shape)
        if state.shard_axis is not None:
            shape[state.shard_axis] = len(self.held(shape[state.shard_axis]))
        return (NUM_BLOCKS, *shape), state.dtype

    def scattered(self, counts, seed, *, ascending=False):
        """Return ids of blocks at random places, so many for each group; none is used twice."""
        rng = np.random.default_rng(zlib.crc32(seed.encode()))
        order = np.arange(NUM_BLOCKS) if ascending else rng.permutation(NUM_BLOCKS)
        return [order[sum(counts[:index]) :][:count].tolist() for index, count in enumerate(counts)]


@asynccontextmanager
async def opened(settings, ranks):
    """Open a worker for every rank of an engine."""
    async with AsyncExitStack() as stack:
        each = [msgspec.structs.replace(settings, rank=number, num_ranks=len(ranks)) for number in range(len(ranks))]
        yield [
            await stack.enter_async_context(kvflow.open_worker(config, rank.cache))
            for config, rank in zip(each, ranks, strict=True)
        ]


def canonical(tensor, form, kernel_blocks):
    """Put the bytes of a tensor into one order of axes, a view: [pair, block, kernel block, head, token, byte]."""
    tensor = tensor.view(torch.uint8)
    if "R" not in form:
        if tensor.dim() == len(form):
            tensor = tensor.unflatten(form.index("B"), (-1, kernel_blocks))
        form = form.replace("B", "BR")
    for axis in CANONICAL:
        if axis not in form:
            tensor, form = tensor.unsqueeze(0), axis + form
    return tensor.permute([form.index(axis) for axis in CANONICAL])


def cell_bytes(spec, head_size):
    """Return the bytes of one head of one token, of keys or of values, with their scales."""
    if spec.quantization == "nvfp4":
        return head_size // 2 + head_size // 16
    return head_size * BYTES[spec.dtype] + (4 if spec.quantization else 0)


def latent_bytes(spec):
    """Return the bytes of one token of a latent, with its scales."""
    return spec.head_size * BYTES[spec.dtype] + spec.scale_bytes
