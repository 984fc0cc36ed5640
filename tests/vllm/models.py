"""The models about which vLLM is asked: what each layer keeps, in kvflow's words.

Head counts, sizes and patterns of layers are those of the published configurations; blocks have 16 tokens unless
vLLM itself enlarges them at start-up.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from kvflow.layout.specs import (
    MLA,
    CacheSpec,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
    State,
)

LAYOUTS = ("LBNHC", "BLHNC")
"""One with layers outermost and one with blocks outermost: nothing else of a layout decides about groups."""


class Model(msgspec.Struct):
    """One model.

    Attributes:
        name: of the model, or of what is peculiar about it.
        specs: layer name -> spec, in the order in which vLLM registers the layers.
        tp_size: ranks that divide the heads; vLLM is asked about the first.
        extra: layer name -> fields of vLLM's spec for which ours has no word.
    """

    name: str
    specs: dict[str, CacheSpec]
    tp_size: int = 1
    extra: dict[str, dict[str, Any]] = {}


def _attention(heads: int, size: int, block_size: int) -> dict[str, Any]:
    return {"num_kv_heads": heads, "head_size": size, "block_size": block_size, "dtype": "bfloat16"}


def full(heads: int, size: int, block_size: int = 16, **fields: Any) -> FullAttention:
    return FullAttention(**_attention(heads, size, block_size) | fields)


def sliding(heads: int, size: int, window: int, block_size: int = 16, **fields: Any) -> SlidingWindow:
    return SlidingWindow(**_attention(heads, size, block_size) | fields, window=window)


def chunked(heads: int, size: int, chunk: int) -> ChunkedLocal:
    return ChunkedLocal(**_attention(heads, size, 16), chunk=chunk)


def cross(heads: int, size: int) -> CrossAttention:
    return CrossAttention(**_attention(heads, size, 16))


def mla(size: int = 576, block_size: int = 64, dtype: str = "bfloat16", **fields: Any) -> MLA:
    return MLA(head_size=size, block_size=block_size, dtype=dtype, **fields)


def mamba(*shapes: tuple[int, ...], block_size: int = 16, page_bytes: int | None = None) -> Mamba:
    states = tuple(State(f"state{index}", shape, "bfloat16") for index, shape in enumerate(shapes))
    return Mamba(states=states, block_size=block_size, page_bytes=page_bytes)


def pattern(*parts: CacheSpec, repeats: int = 1) -> dict[str, CacheSpec]:
    """Return layers that repeat these specs."""
    return {f"layers.{index}": spec for index, spec in enumerate(parts * repeats)}


def every(layers: int, period: int, special: CacheSpec, usual: CacheSpec) -> dict[str, CacheSpec]:
    """Return layers of which the last of each period is special."""
    return pattern(*(usual if (index + 1) % period else special for index in range(layers)))


GRANITE = {"conv_x": (8192, 3), "conv_B": (128, 3), "conv_C": (128, 3), "ssm": (128, 64, 128)}
PLAIN_ROWS = {"model_version": "deepseek_v4", "cache_dtype_str": "auto"}
SCALED_ROWS = {"model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla"}
QWEN3_NEXT = {"conv_q": (2048, 3), "conv_k": (2048, 3), "conv_v": (4096, 3), "ssm": (32, 128, 128)}


def hybrid(states: dict[str, tuple[int, ...]], heads: int, size: int, block_size: int, tp_size: int = 1):
    """Return the two specs of a hybrid model, aligned as vLLM does at start-up.

    Args:
        states: name -> shape of each state.
        heads: KV heads of an attention layer.
        size: of a head.
        block_size: the least multiple of 16 for which the page of attention holds a state; 16 without alignment.
        tp_size: ranks that divide both.
    """
    attention = full(heads, size, block_size)
    page = attention.block_size * 2 * heads * size * 2 // tp_size
    parts = tuple(State(name, shape, "bfloat16") for name, shape in states.items())
    aligned = block_size > 16
    return attention, Mamba(states=parts, block_size=block_size, page_bytes=page if aligned else None)


def deepseek_v4_flash(name: str, real: dict[str, Any], row_bytes: int, alignment: int) -> Model:
    """Return 43 layers: a window in each, compressed by 4 or 128 in 41, an indexer where by 4.

    A row covers 4 or 128 tokens, for which ``MLA`` has no word: its cell is a token's share of a row, and the page
    says what is rounded away. vLLM gets the real fields.

    Args:
        name: of the model.
        real: vLLM's fields of the cache itself, which has rows of several forms.
        row_bytes: bytes of a row of the cache.
        alignment: bytes that each page is a multiple of.
    """

    def rows(nbytes: int, block_size: int, tokens: int = 1, window: int = 0) -> MLA:
        page = -(-nbytes * (block_size // tokens) // alignment) * alignment
        return mla(nbytes // tokens, block_size, "uint8", sliding_window=window, page_bytes=page)

    aligned = {"alignment": alignment}
    specs: dict[str, CacheSpec] = {}
    extra: dict[str, dict[str, Any]] = {}
    for layer in range(43):
        prefix, tokens = f"layers.{layer}", 128 if layer % 2 else 4
        if layer >= 2 and tokens == 4:
            specs[f"{prefix}.index"] = rows(132, 256, 4)
            extra[f"{prefix}.index"] = {"state_content_bytes": 132, "tokens_per_state": 4, **aligned}
            specs[f"{prefix}.index_state"] = rows(2048, 4, window=8)
        specs[f"{prefix}.window"] = rows(row_bytes, 64, window=128)
        extra[f"{prefix}.window"] = {"state_content_bytes": row_bytes, **real, **aligned}
        if layer >= 2:
            specs[prefix] = rows(row_bytes, 256, tokens)
            extra[prefix] = {"state_content_bytes": row_bytes, "tokens_per_state": tokens, **real, **aligned}
            specs[f"{prefix}.state"] = rows(4096, 8, window=128) if tokens == 128 else rows(8192, 4, window=8)
    return Model(name, specs, extra=extra)


SHORT_PATTERN = (
    *(full(1, 32), full(1, 64)) * 2,
    *(sliding(8, 64, 64),) * 5,
    *(chunked(2, 64, 64), chunked(1, 64, 64), chunked(2, 64, 64), chunked(2, 64, 64)),
)
"""Two repeats of two pages, to whose length the windows are cut; the chunks have two pages, but no pattern."""


def published() -> list[Model]:
    """Return the models whose answers the file keeps."""
    gpt_oss = sliding(8, 64, 128), full(8, 64)
    granite, granite_state = hybrid(GRANITE, 8, 128, 528)
    qwen, qwen_state = hybrid(QWEN3_NEXT, 2, 256, 544)
    qwen_2, qwen_state_2 = hybrid(QWEN3_NEXT, 2, 256, 544, tp_size=2)
    granite_16, granite_state_16 = hybrid(GRANITE, 8, 128, 16)
    qwen_16, qwen_state_16 = hybrid(QWEN3_NEXT, 2, 256, 16)
    return [
        Model("gpt-2", pattern(full(12, 64), repeats=12)),
        Model("llama-3.1-8b", pattern(full(8, 128), repeats=32)),
        Model("llama-3.1-8b-tp2", pattern(full(8, 128), repeats=32), tp_size=2),
        Model("qwen2.5-7b", pattern(full(4, 128), repeats=28)),
        Model("gemma-2-2b", pattern(sliding(4, 256, 4096), full(4, 256), repeats=13)),
        Model("gemma-3-4b-it", every(34, 6, full(4, 256), sliding(4, 256, 1024))),
        Model("gemma-3-27b", every(62, 6, full(16, 128), sliding(16, 128, 1024))),
        Model("gpt-oss-20b", pattern(*gpt_oss, repeats=12)),
        Model("gpt-oss-20b-tp2", pattern(*gpt_oss, repeats=12), tp_size=2),
        Model("gpt-oss-20b-eagle", pattern(*gpt_oss * 12, full(8, 64))),
        Model("llama-4-scout", every(48, 4, full(8, 128), chunked(8, 128, 8192))),
        Model("deepseek-v3", pattern(mla(), repeats=61)),
        Model("deepseek-v3.2", pattern(mla(), mla(132, dtype="uint8"), repeats=61)),
        deepseek_v4_flash("deepseek-v4-flash", PLAIN_ROWS, 1024, 512),
        deepseek_v4_flash("deepseek-v4-flash-fp8", SCALED_ROWS, 584, 576),
        Model("granite-4-h-small", every(40, 10, granite, granite_state)),
        Model("granite-4-h-small-unaligned", every(40, 10, granite_16, granite_state_16)),
        Model("qwen3-next-80b", every(48, 4, qwen, qwen_state)),
        Model("qwen3-next-80b-tp2", every(48, 4, qwen_2, qwen_state_2), tp_size=2),
        Model("qwen3-next-80b-unaligned", every(48, 4, qwen_16, qwen_state_16)),
        Model("whisper", pattern(full(12, 64), cross(12, 64), repeats=12)),
        Model("two-head-sizes", every(12, 6, full(2, 512), sliding(8, 256, 1024))),
        Model("two-head-sizes-that-do-not-divide", every(12, 6, full(2, 512), sliding(3, 256, 1024))),
        Model("two-head-sizes-of-one-kind", pattern(full(8, 128), full(4, 64), repeats=6)),
        Model("two-windows", pattern(sliding(8, 64, 128), sliding(8, 64, 1024), full(8, 64), repeats=4)),
        Model("two-block-sizes", pattern(full(8, 64, 32), sliding(8, 128, 512), repeats=4)),
        Model("scales-per-head", pattern(*(_scaled(spec) for spec in gpt_oss), repeats=12)),
        Model("nvfp4", pattern(full(8, 128, dtype="uint8", quantization="nvfp4"), sliding(8, 128, 64), repeats=4)),
        Model("padded-attention", pattern(full(8, 64, page_bytes=40960), sliding(8, 64, 128), repeats=4)),
        Model("mla-with-window", pattern(mla(), mla(sliding_window=512), repeats=8)),
        Model("mla-with-smaller-window", pattern(mla(), mla(320, sliding_window=512), repeats=8)),
        Model("mla-with-draft", pattern(*(mla(),) * 8, sliding(8, 64, 2048), full(8, 64, 64))),
        Model("mla-with-draft-of-large-heads", pattern(*(mla(),) * 8, sliding(8, 128, 2048), full(8, 128, 64))),
        Model("mla-with-states", every(28, 4, mla(), mamba((8192, 3), page_bytes=73728))),
        Model("mla-that-does-not-divide", pattern(mla(), mamba((10000, 5)), repeats=3)),
        Model("many-states", pattern(full(8, 64), full(4, 64), *(mamba((5000, 3)),) * 9, repeats=2)),
        Model("patterns-of-pages", pattern(full(8, 64), full(4, 96), *(sliding(8, 64, 64),) * 3, repeats=4)),
        Model("patterns-of-unequal-length", pattern(*(full(8, 64), full(4, 96)) * 2, *(sliding(8, 64, 64),) * 3)),
        Model("patterns-beside-others", pattern(*SHORT_PATTERN, *(mamba((5000, 3)),) * 5)),
        Model("patterns-beside-larger-states", pattern(*SHORT_PATTERN, *(mamba((10000, 3)),) * 5)),
        Model("window-of-two-kinds", pattern(sliding(8, 64, 128), mla(576, 16, sliding_window=128), full(8, 64))),
        Model("window-of-two-kinds-reversed", pattern(mla(512, 16, sliding_window=128), sliding(8, 64, 128))),
        Model("rows-of-windows", pattern(full(8, 64), sliding(2, 64, 64), sliding(1, 64, 64), sliding(2, 64, 64))),
        Model("gaps-in-a-pattern", pattern(full(4, 64), *(sliding(4, 64, 64),) * 9, *(sliding(1, 64, 64),) * 3)),
        Model("one-head-each-at-tp2", pattern(full(1, 64), *(full(2, 64), sliding(2, 64, 64)) * 2), tp_size=2),
    ]


def random_models(seed: int = 0) -> Iterator[Model]:
    """Yield small models of two to four specs in any order and number, without end."""
    draw = random.Random(seed)
    for number in range(1 << 30):
        pool = [_random_spec(draw) for _ in range(draw.randint(2, 4))]
        specs = [spec for spec in pool for _ in range(draw.choice((1, 2, 3, 4, 5, 6, 8, 12, 13)))]
        if draw.random() < 0.5:
            draw.shuffle(specs)
        yield Model(f"random-{number}", pattern(*specs), tp_size=draw.choice((1, 1, 2)))


def _random_spec(draw: random.Random) -> CacheSpec:
    heads, size, block_size = draw.choice((2, 4, 6, 8)), draw.choice((32, 64, 96)), draw.choice((16, 16, 16, 32))
    window = draw.choice((64, 128))
    kinds = [
        full(heads, size, block_size),
        full(heads, size, block_size),
        sliding(heads, size, window, block_size),
        sliding(heads, size, window, block_size),
        sliding(heads, size, window, page_bytes=heads * size * 64 + draw.choice((0, 4096, 5000))),
        chunked(heads, size, window),
        cross(heads, size),
        mla(size, block_size),
        # vLLM takes these together by window alone, whatever their sizes: two of them must not differ.
        mla(64, 16, sliding_window=window),
        mamba((heads * 64, draw.choice((3, 64)))),
    ]
    return draw.choice(kinds)


def _scaled(spec: CacheSpec) -> CacheSpec:
    return msgspec.structs.replace(spec, dtype="float8_e4m3fn", quantization="fp8_per_token_head")
