"""An oracle that knows what an attention backend knows: ``cache.views``, and which heads a rank holds.

It says by coordinates (layer, role, head, token) which byte of the model lies where. It shares no code with
``component()``, ``held()``, the manifest or the planner.
"""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

ABSENT = -1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Kind:
    """What the model keeps in one layer, without anything that an engine may choose."""

    name: str
    fields: tuple

    @property
    def tokens(self):
        """Whether it keeps something for every token, which blocks of any size can hold."""
        return self.name not in ("mamba", "opaque")

    @property
    def recurrent(self):
        """Whether a request has one block of it, however many tokens there are."""
        return self.name == "mamba"

    @cached_property
    def heads(self):
        """Heads of the whole model; a latent counts as one."""
        return dict(self.fields).get("num_kv_heads", 1)

    @cached_property
    def states(self):
        """(role, shape, item bytes, axis that ranks divide or None) of each state."""
        fields = dict(self.fields)
        if self.name == "opaque":
            return [("page", (fields["nbytes"],), 1, None)]
        return [(state.name, state.shape, ITEM_BYTES[state.dtype], state.shard_axis) for state in fields["states"]]

    @cached_property
    def planes(self):
        """Keys and values, or a latent: for each, bytes of a cell and (role, first byte, bytes) of its parts."""
        fields = dict(self.fields)
        item = ITEM_BYTES[fields["dtype"]]
        if self.name == "mla":
            rope = ITEM_BYTES[fields["rope_dtype"] or fields["dtype"]]
            sizes = [("latent", fields["head_size"], item), ("rope", fields["rope_size"], rope)]
            return [_cell([*sizes, ("scale", fields["scale_bytes"], 1)])]
        cells = []
        for role, size in (("k", fields["head_size"]), ("v", fields["head_size_v"] or fields["head_size"])):
            match fields["quantization"]:
                case "nvfp4":  # two elements in a byte, and a scale of one byte for every 16
                    parts = [(role, size // 2, 1), (f"{role}_scale", size // 16, 1)]
                case "fp8_per_token_head":
                    parts = [(role, size, 1), (f"{role}_scale", 1, 4)]
                case _:
                    parts = [(role, size, item)]
            cells.append(_cell(parts))
        return cells


def _cell(sizes):
    """Lay parts side by side: each begins, and the cell ends, at a multiple of its element's size."""
    parts, end = [], 0
    for role, count, item in sizes:
        if count:
            first = math.ceil(end / item) * item
            end = first + count * item
            parts.append((role, first, count * item))
    widest = max(item for _, count, item in sizes if count)
    return math.ceil(end / widest) * widest, parts


def content_bytes(kind, block_size):
    """Return an upper bound of the bytes of one page on any rank."""
    if kind.tokens:
        return kind.heads * block_size * sum(nbytes for nbytes, _ in kind.planes)
    return sum(math.prod(shape) * item + 4 for _, shape, item, _ in kind.states)


@dataclass(frozen=True)
class Model:
    """Layers by name, and the tokens of one request; layers of kind ``cross`` keep those of an encoder."""

    layers: dict
    num_tokens: int
    encoder_tokens: int

    def tokens_of(self, layer):
        return self.encoder_tokens if self.layers[layer].name == "cross" else self.num_tokens

    def content(self, layer, role, *shape):
        """What the whole model keeps of a request under one name: bytes that depend on nothing but the name."""
        return _random_bytes(f"{layer}.{role}", shape)


@lru_cache(4096)
def _random_bytes(name, shape):
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, shape, np.uint8)


@lru_cache(4096)
def held(total, tp_rank, tp_size):
    """Global numbers of the heads that a rank holds, by the written rule."""
    if total < tp_size:
        return [tp_rank * total // tp_size]
    return [int(head) for head in np.array_split(np.arange(total), tp_size)[tp_rank]]


def keeps_every_token(group):
    """Whether decode context parallelism divides the tokens of a group: where no window lets blocks be dropped."""
    return group.kind in ("full", "mixed") or (group.kind == "mla" and not group.window)


@lru_cache(4096)
def held_tokens(end, rank, size, interleave):
    """Tokens before ``end`` that a rank holds, in the order in which they lie, by the written rule."""
    return np.array([token for token in range(end) if token // interleave % size == rank], np.int64)


@dataclass(frozen=True)
class Shared:
    """What of a target moves: which heads, or what else ranks divide, and which tokens.

    Attributes:
        heads: (layer, extent of the divided axis) -> global numbers along it; an undivided axis has one.
        tokens: (layer, token numbers) -> whether each moves.
        part: layer -> which part of the target's tokens they are.
    """

    heads: object
    tokens: object = lambda layer, tokens: np.ones(len(tokens), bool)
    part: object = lambda layer: 1


@dataclass(frozen=True)
class Pool:
    """One rank's cache, and the blocks that a request has in it.

    Attributes:
        stage: what the rank has in common with others.
        rank: its number.
        cache: the cache.
        memory: all its bytes, and others around them: uint8, flat.
        block_ids: one list per group.
    """

    stage: object
    rank: int
    cache: object
    memory: np.ndarray
    block_ids: list

    @property
    def address(self):
        return self.memory.ctypes.data

    def held(self, total):
        return held(total, self.stage.place(self.rank)[0], self.stage.tp_size)

    def dcp_size(self, group):
        """Ranks among which the tokens of a group are divided."""
        return self.stage.dcp_size if keeps_every_token(group) else 1

    def dcp_size_of(self, layer):
        """Ranks among which the tokens of a layer are divided."""
        (group,) = (group for group in self.stage.groups if layer in group.layers)
        return self.dcp_size(group)

    def has_token(self, layer, tokens):
        """Tell of each token whether this rank holds it."""
        size = self.dcp_size_of(layer)
        return tokens // self.stage.interleave % size == self.stage.place(self.rank)[1] % size

    def groups(self):
        """Yield each group with its list of blocks."""
        yield from zip(self.stage.groups, self.block_ids, strict=True)

    def heads(self, layer):
        """(place here, global number) of each head held."""
        return list(enumerate(self.held(self.stage.layers[layer].heads)))

    def cells(self, layer):
        """Yield each role with its bytes, ``[block, kernel block, head, token, byte]``, aliasing the cache."""
        kind, view, kv = self.stage.layers[layer], self.cache.views[layer], self.stage.kv
        size = sum(nbytes for nbytes, _ in kind.planes)
        if len(kind.planes) == 1:
            tensors = [self._by_kernel_block(layer, view, 2)[:, :, None]]
        elif kv == "content":
            whole = self._by_kernel_block(layer, view, 3)
            keys = kind.planes[0][0]
            tensors = [whole[..., :keys], whole[..., keys:size]]
        else:
            if isinstance(view, torch.Tensor):
                view = view.unbind(0 if kv == "split" else view.dim() - 4)
            tensors = [self._by_kernel_block(layer, each, 3).swapaxes(2, 3) for each in view]
        for cells, (nbytes, parts) in zip(tensors, kind.planes, strict=True):
            assert cells.shape[-1] == nbytes
            for role, first, count in parts:
                yield role, cells[..., first : first + count]

    def _by_kernel_block(self, layer, tensor, dims):
        """Return bytes with an axis of kernel blocks behind that of blocks; ``dims`` axes follow."""
        if tensor.dim() == dims + 1:
            tensor = tensor.unflatten(0, (self.cache.num_blocks, -1))
        return tensor.view(torch.uint8).numpy()

    def state(self, layer, index):
        """One state as bytes, ``[block, *shape held here, byte of an element]``, aliasing the cache."""
        view = self.cache.views[layer]
        tensor = view[index] if isinstance(view, list) else view
        item = self.stage.layers[layer].states[index][2]
        return tensor.view(torch.uint8).unflatten(-1, (-1, item)).numpy()

    def listed_tokens(self, group, ids, num_tokens):
        """Token numbers that the listed blocks have room for, and the block and the place in it of each."""
        size = self.dcp_size(group)
        num_blocks = math.ceil(num_tokens / (group.block_size * size))
        rank = self.stage.place(self.rank)[1] % size
        here = held_tokens(num_blocks * group.block_size * size, rank, size, self.stage.interleave)
        by_block = here.reshape(num_blocks, group.block_size)
        placed = [
            (token, block, place)
            for position, block in enumerate(ids, start=num_blocks - len(ids))
            if block != ABSENT
            for place, token in enumerate(by_block[position].tolist())
        ]
        return np.array(placed, np.int64).reshape(-1, 3).T


def write(pool, model, shared, *, past_the_end=False, value=None):
    """Write what belongs into each listed block, through the views.

    Args:
        pool: where.
        model: whose bytes.
        shared: what of it to write.
        past_the_end: write where a listed block holds no token of the request, rather than where it does.
        value: write this instead of the model's bytes.
    """
    for group, ids in pool.groups():
        for layer in group.layers:
            kind = pool.stage.layers[layer]
            if not kind.tokens:
                if not past_the_end:
                    _write_states(pool, model, layer, shared, value)
                continue
            end = model.tokens_of(layer)
            token, block, place = pool.listed_tokens(group, ids, end)
            chosen = (token >= end) if past_the_end else (token < end) & shared.tokens(layer, token)
            token, block, place = token[chosen], block[chosen], place[chosen]
            for role, cells in pool.cells(layer):
                _, _, _, kernel_tokens, nbytes = cells.shape
                kernel, slot = np.divmod(place, kernel_tokens)
                content = model.content(layer, role, end, kind.heads, nbytes) if value is None else None
                for here, head in pool.heads(layer):
                    if head in shared.heads(layer, kind.heads):
                        cells[block, kernel, here, slot] = content[token, head] if value is None else value


def _write_states(pool, model, layer, shared, value):
    """Write states, and pages of a kind that is not known, which differ from block to block."""
    for block, tokens in tokens_by_block(pool, model, layer).items():
        for index, (role, shape, item, axis) in enumerate(pool.stage.layers[layer].states):
            state = pool.state(layer, index)[block]
            name = f"{role} {min(tokens)}"
            content = model.content(layer, name, *shape, item) if value is None else np.full((*shape, item), value)
            if axis is None:
                if shared.heads(layer, 1):
                    state[...] = content
                continue
            for here, number in enumerate(pool.held(shape[axis])):
                if number in shared.heads(layer, shape[axis]):
                    np.moveaxis(state, axis, 0)[here] = content.take(number, axis)


def tokens_by_block(pool, model, layer):
    """Block -> tokens of the request that it holds of a layer; a state counts as token 0."""
    ((group, ids),) = ((group, ids) for group, ids in pool.groups() if layer in group.layers)
    if pool.stage.layers[layer].recurrent:
        return {block: {0} for block in ids[-1:] if block != ABSENT}
    end = model.tokens_of(layer)
    held_by = {}
    for token, block, _ in pool.listed_tokens(group, ids, end).T.tolist():
        if token < end:
            held_by.setdefault(block, set()).add(token)
    return held_by
