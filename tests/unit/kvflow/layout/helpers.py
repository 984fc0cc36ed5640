"""What the tests of layouts share: specs in a word, components and manifests with one thing wrong."""

from kvflow.layout.component import Component, Region
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.specs import FullAttention, Mamba, Opaque, SlidingWindow, State

ROOMY = (Region(4096, 1 << 20),)


def full(block_size=16, num_kv_heads=4, head_size=8, dtype="float16", **fields):
    return FullAttention(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, **fields)


def sliding(block_size=16, num_kv_heads=4, head_size=8, dtype="float16", window=64):
    return SlidingWindow(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, window=window
    )


def quantized(how, **fields):
    return full(**{"dtype": {"nvfp4": "uint8"}.get(how, "float8_e4m3fn"), "quantization": how} | fields)


def mamba(**fields):
    """Two states that ranks divide, and between them one that every rank holds whole."""
    states = (
        State("conv_x", (6, 3), "float16"),
        State("conv_B", (5, 3), "float16", shard_axis=None),
        State("ssm", (4, 3, 2), "float32"),
    )
    return Mamba(**{"block_size": 16, "states": states} | fields)


def opaque(nbytes, **fields):
    return Opaque(**{"block_size": 16, "nbytes": nbytes} | fields)


def model(*, layers, full_every=0, **fields):
    """Layer name -> spec: every ``full_every``-th layer sees everything, the others slide; 0 for none that does."""
    return {
        f"layers.{index}": full(**fields) if full_every and (index + 1) % full_every == 0 else sliding(**fields)
        for index in range(layers)
    }


DENSE = {
    "role": "k",
    "dtype": "float16",
    "region": 0,
    "offset": 0,
    "block_stride": 64,
    "kernel_stride": 0,
    "extents": (1, 4, 8),
    "strides": (64, 16, 2),
}
"""One head of four tokens of 16 bytes, dense, in blocks of 64 bytes."""


def component(**changes):
    return Component(**DENSE | changes)


def state(**changes):
    """A state of three rows of four numbers, dense, in blocks of 64 bytes."""
    fields = {"role": "ssm", "dtype": "float32", "extents": (3, 4), "strides": (16, 4), "total": 3, "token_axis": -1}
    return component(**fields | changes)


def manifest(*components, names=("a",), num_blocks=2, block_size=4, regions=ROOMY):
    """One group of layers, each with these components."""
    parts = components or (component(),)
    layers = tuple(Layer(name, "full", 0, parts) for name in names)
    return Manifest(num_blocks, regions, (ManifestGroup("full", block_size, layers),))
