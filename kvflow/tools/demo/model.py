"""A small hybrid transformer over bytes: full and sliding-window attention in turn, weights from a fixed seed.

It is not trained, and what it says means nothing. What matters is that its attention is sharp, so that a block
with wrong contents shows in the tokens that follow; ``tests/demo/test_model.py`` corrupts blocks to see that.

The arithmetic of a token depends on its position and its context only, never on who else is served, on the
block ids, or on the layout of the cache. So two processes that hold the same cache agree to the last bit.

Shape suffixes: ``T`` tokens, ``Q`` queries of a tile, ``S`` cached tokens in sight, ``V`` vocabulary, ``Z`` hidden,
``F`` hidden of the feed-forward network, ``H`` heads, ``D`` head size, ``B`` blocks, ``N`` tokens of a block.
"""

# ruff: noqa: N803, N806  # shape suffixes are capital letters, as everywhere in this field

import math
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch.nn import functional

from kvflow.layout.specs import CacheSpec, FullAttention, SlidingWindow

VOCABULARY = 256  # tokens are bytes
QUERY_TILE = 128  # queries that attend together: bounds the scores, and skips most of what a window hides
ROPE_BASE = 10_000.0
# Factor on the queries. Random attention is nearly uniform: an average over a thousand tokens hides one wrong one.
ATTENTION_SHARPNESS = 8.0
EVERYTHING = 1 << 31  # window of a full-attention layer


class ModelShape(Struct, frozen=True):
    """Sizes of the model: even layers attend to everything, odd ones to ``window`` tokens, the current one included."""

    num_layers: int = 16
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    window: int = 128
    block_size: int = 16
    seed: int = 20

    def specs(self) -> dict[str, CacheSpec]:
        """Return what each layer caches."""
        full = FullAttention(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype="bfloat16"
        )
        sliding = SlidingWindow(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype="bfloat16",
            window=self.window,
        )
        return {f"layers.{index}": sliding if index % 2 else full for index in range(self.num_layers)}


class PagedKV:
    """The pages of one layer.

    Args:
        view: of ``cache.views``. ``kv="content"``: ``[block, head, token, 2 * head_size]``, K before V.
            ``kv="split"``: ``[2, block, token, head, head_size]``.
        head_size: elements of one head of one token.

    Thread: one at a time per block; the model's thread in this engine.
    """

    def __init__(self, view: torch.Tensor, head_size: int) -> None:
        if view.dim() == 5:
            self._k_BHND, self._v_BHND = view.transpose(2, 3)
        else:
            self._k_BHND, self._v_BHND = view[..., :head_size], view[..., head_size:]
        self._block_size = self._k_BHND.shape[2]

    def write(self, block_ids: torch.Tensor, first_token: int, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Store float32 keys and values of consecutive tokens, rounded to the cache's dtype.

        Block i of ``block_ids`` (int64, shape (B,)) holds tokens [i * block_size, (i + 1) * block_size).
        """
        position_T = torch.arange(first_token, first_token + len(k_THD))
        block_T, offset_T = block_ids[position_T // self._block_size], position_T % self._block_size
        self._k_BHND[block_T, :, offset_T] = k_THD.to(self._k_BHND.dtype)
        self._v_BHND[block_T, :, offset_T] = v_THD.to(self._v_BHND.dtype)

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens of the blocks, as contiguous float32 of shape (H, B * N, D)."""
        return _gather(self._k_BHND, block_ids), _gather(self._v_BHND, block_ids)


def _gather(pages_BHND: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    # Contiguous whatever the layout, because the order in which a sum is taken may depend on the strides.
    pages_HBND = pages_BHND[block_ids].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return pages_HBND.flatten(1, 2)


class TinyModel:
    """The weights, and one forward pass over them; two models of one shape are equal."""

    def __init__(self, shape: ModelShape) -> None:
        draw = _WeightSource(shape.seed)
        self.shape = shape
        self._embedding_VZ = draw.matrix(VOCABULARY, shape.hidden, scale=math.sqrt(shape.hidden))
        self._layers = [_DecoderLayer(shape, index, draw) for index in range(shape.num_layers)]
        self._head_VZ = draw.matrix(VOCABULARY, shape.hidden)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        first_token: int,
        pages: Mapping[str, PagedKV],
        block_tables: Mapping[str, torch.Tensor],
    ) -> int:
        """Compute consecutive tokens of one request, store their keys and values, and return the next token.

        Args:
            tokens: bytes to compute; what precedes them is read from the cache.
            first_token: position of ``tokens[0]`` in the request.
            pages: layer name -> its pages.
            block_tables: layer name -> int64 block ids, shape (B,), of the request through these tokens. A
                sliding-window layer reads no block behind its window.
        """
        position_T = torch.arange(first_token, first_token + len(tokens))
        x_TZ = self._embedding_VZ[torch.tensor(tokens)]
        for index, layer in enumerate(self._layers):
            name = f"layers.{index}"
            x_TZ = layer.forward(x_TZ, position_T, pages[name], block_tables[name])
        return int(torch.argmax(self._head_VZ @ _rms_norm(x_TZ[-1])))


class _DecoderLayer:
    """Attention and a feed-forward network."""

    def __init__(self, shape: ModelShape, index: int, draw: "_WeightSource") -> None:
        heads = shape.num_heads * shape.head_size
        kv_heads = shape.num_kv_heads * shape.head_size
        self._shape = shape
        self._window = shape.window if index % 2 else EVERYTHING
        self._q_ZH = draw.matrix(shape.hidden, heads, scale=ATTENTION_SHARPNESS)
        self._k_ZH = draw.matrix(shape.hidden, kv_heads)
        self._v_ZH = draw.matrix(shape.hidden, kv_heads)
        self._out_HZ = draw.matrix(heads, shape.hidden)
        self._up_ZF = draw.matrix(shape.hidden, 2 * shape.hidden)
        self._down_FZ = draw.matrix(2 * shape.hidden, shape.hidden)

    def forward(
        self, x_TZ: torch.Tensor, position_T: torch.Tensor, pages: PagedKV, block_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual stream after this layer, and store these tokens."""
        normal_TZ = _rms_norm(x_TZ)
        size, first_token = self._shape.head_size, int(position_T[0])
        q_THD = _rotate((normal_TZ @ self._q_ZH).view(len(x_TZ), -1, size), position_T)
        k_THD = _rotate((normal_TZ @ self._k_ZH).view(len(x_TZ), -1, size), position_T)
        v_THD = (normal_TZ @ self._v_ZH).view(len(x_TZ), -1, size)
        pages.write(block_ids, first_token, k_THD, v_THD)
        attended_TH = self._attend(q_THD.transpose(0, 1), first_token, pages, block_ids)
        x_TZ = x_TZ + attended_TH @ self._out_HZ
        return x_TZ + functional.gelu(_rms_norm(x_TZ) @ self._up_ZF) @ self._down_FZ

    def _attend(self, q_HTD: torch.Tensor, first_token: int, pages: PagedKV, block_ids: torch.Tensor) -> torch.Tensor:
        """Attend tile by tile to the pages, which hold these tokens already."""
        block_size, end_token = self._shape.block_size, first_token + q_HTD.shape[1]
        first_block = self._first_in_sight(first_token) // block_size
        k_HSD, v_HSD = pages.gather(block_ids[first_block : -(-end_token // block_size)])
        origin = first_block * block_size  # the position of k_HSD[:, 0]
        tiles_HQD = []
        for start in range(first_token, end_token, QUERY_TILE):
            stop, low = min(end_token, start + QUERY_TILE), self._first_in_sight(start)
            query_Q1, key_S = torch.arange(start, stop).unsqueeze(1), torch.arange(low, stop)
            attended = functional.scaled_dot_product_attention(
                q_HTD[None, :, start - first_token : stop - first_token],
                k_HSD[None, :, low - origin : stop - origin],
                v_HSD[None, :, low - origin : stop - origin],
                attn_mask=(key_S <= query_Q1) & (key_S > query_Q1 - self._window),
                enable_gqa=True,
            )
            tiles_HQD.append(attended[0])
        return torch.cat(tiles_HQD, dim=1).transpose(0, 1).flatten(1)

    def _first_in_sight(self, token: int) -> int:
        return max(0, token - self._window + 1)


class _WeightSource:
    """Draws matrices from one seed, in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        """Return a matrix that keeps the variance of its left operand, times ``scale`` squared."""
        return torch.randn(rows, columns, generator=self._generator) * (scale / math.sqrt(rows))


def _rms_norm(x_TZ: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x_TZ, x_TZ.shape[-1:])


def _rotate(x_THD: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding."""
    half = x_THD.shape[-1] // 2
    frequency_D = ROPE_BASE ** (-torch.arange(half) / half)
    angle_T1D = position_T[:, None, None] * frequency_D
    cos, sin = angle_T1D.cos(), angle_T1D.sin()
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
