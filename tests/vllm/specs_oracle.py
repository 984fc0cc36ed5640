# ruff: noqa: T201 - a script prints what it leaves out
"""Ask vLLM itself what it keeps for a model, by its Hugging Face config, and write ``tests/data/vllm_specs.json``.

vLLM's own model class is built from the config on torch's device ``meta``, where weights have a shape and no memory.
vLLM's ``get_kv_cache_spec`` then asks its layers, as it does at the start of an engine. So the answers are vLLM's own
for every model, for one rank, with these reservations:

- vLLM's platform for CPUs has backends of its own for MLA, and none for an indexer. What GPUs have is named instead:
  ``TritonMLABackend``, or ``FlashMLASparseBackend`` for models with an indexer. Neither runs; a spec takes a name and a
  layout from them.
- ``torch.cuda.Event``, ``torch.cuda.Stream``, ``torch.accelerator.empty_cache`` and ``torch.nn.Module.to`` do nothing,
  for models that use them.
- The experts of Nemotron-H, which vLLM refuses on CPUs, are left out: they keep nothing.
- Quantized weights are read as if they were not, since CPUs lack the kernels, and so caches that checkpoints quantize.

Needs the environment of ``groups_oracle.py``. Models with images need torchvision besides, of which a copy without its
compiled part will do::

    pip install --no-deps --target /tmp/torchvision torchvision==0.28.0
    : > /tmp/torchvision/torchvision/_meta_registrations.py
    PYTHONPATH=.:/tmp/torchvision .venv-vllm/bin/python tests/vllm/specs_oracle.py tests/data/vllm_specs.json

That asks again about every config of the file. ``--add FOLDER --source TEXT`` adds the published configs of a folder
first (``owner--name_config.json``), and ``--defaults`` what transformers takes where a config says nothing, for every
text model that both know. A default is often that of the first model of its family, and is no published config.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import nemotron_h
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.workspace import init_workspace_manager

DTYPE = "bfloat16"
"""That all models are asked for."""

MLA_BACKENDS = {
    False: "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend",
    True: "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend",
}

DROPPED = ("quantization_config", "compression_config", "auto_map", "_name_or_path", "transformers_version", "id2label")
DROPPED += ("label2id", "rope_scaling", "modules_to_not_convert", "torchscript", "use_bfloat16", "base_model_tp_plan")
"""Keys of a config that the file leaves out: they do not decide what is kept for a token."""


class Idle:
    """What stands for an event or a stream of a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class NoExperts(torch.nn.Module):
    """What stands for the experts of Nemotron-H, which vLLM has no kernel for on CPUs. They keep nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.experts = torch.nn.Identity()

    def __getattr__(self, name: str) -> int:
        if name.startswith("n_"):
            return 0  # so many experts of any sort
        return super().__getattr__(name)  # type: ignore[no-any-return]


class Oracle:
    """vLLM, as far as it must be started. One in a process.

    Attributes:
        backend: path of the class of the attention backend, which the platform for CPUs chooses where it is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = False
        self.backend = ""
        platform = type(current_platform)
        usual = platform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

        def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, **named: Any) -> str:
            if self.backend:
                return self.backend
            if attn_selector_config.use_mla:
                return MLA_BACKENDS[bool(attn_selector_config.use_sparse)]
            return str(usual(cls, selected_backend, attn_selector_config=attn_selector_config, **named))

        platform.get_attn_backend_cls = classmethod(backend)
        torch.cuda.Event = torch.cuda.Stream = Idle
        torch.accelerator.empty_cache = lambda: None
        torch.nn.Module.to = lambda module, *_, **__: module
        nemotron_h.NemotronHMoE = NoExperts

    def specs(self, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the class of vLLM that serves a model, and its specs by the names of layers."""
        module, whole = self.build(config)
        with set_current_vllm_config(whole):
            return type(module).__name__, get_kv_cache_spec(whole)

    def build(
        self, config: dict[str, Any], *, tp_size: int = 1, cache_dtype: str = "auto"
    ) -> tuple[torch.nn.Module, VllmConfig]:
        """Return the model of vLLM as the first of some ranks builds it, without memory, and its configuration."""
        (self._folder / "config.json").write_text(json.dumps(config))
        folder = str(self._folder)
        whole = EngineArgs(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype=DTYPE, enforce_eager=True,
            load_format="dummy", kv_cache_dtype=cache_dtype,
        ).create_engine_config()  # fmt: skip
        whole.parallel_config.tensor_parallel_size = tp_size
        with set_current_vllm_config(whole):
            if not self._started:
                init_distributed_environment(1, 0, f"file://{self._folder}/rendezvous", 0, "gloo")
                initialize_model_parallel()
                init_workspace_manager(torch.device("meta"))
                self._started = True
            get_tp_group().world_size = tp_size
            torch.set_default_dtype(getattr(torch, DTYPE))
            try:
                with torch.device("meta"):
                    return initialize_model(whole), whole
            finally:
                torch.set_default_dtype(torch.float32)


def written(spec: Any) -> dict[str, Any]:
    """Return what one spec of vLLM says of its layer, but not of the pages of this platform."""
    found: dict[str, Any] = {"class": type(spec).__name__}
    if hasattr(spec, "shapes"):
        return found | {"shapes": [list(shape) for shape in spec.shapes], "dtypes": [*map(name_of, spec.dtypes)]}
    found |= {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size, "dtype": name_of(spec.dtype)}
    optional = {
        "head_size_v": spec.head_size_v if spec.head_size_v != spec.head_size else 0,
        "window": getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
        "tokens_per_state": spec.tokens_per_state if spec.tokens_per_state != 1 else 0,
    }
    return found | {key: value for key, value in optional.items() if value}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(specs: dict[str, Any]) -> dict[str, Any]:
    """Return each distinct spec once, and for each pattern of names which of them its layers have, by their number."""
    distinct: list[dict[str, Any]] = []
    layers: dict[str, list[int | None]] = {}
    for name, spec in specs.items():
        answer = written(spec)
        if answer not in distinct:
            distinct.append(answer)
        number = re.search(r"\.(\d+)\.", name)
        index = int(number[1]) if number else 0
        row = layers.setdefault(re.sub(r"\.\d+\.", ".N.", name, count=1), [])
        row += [None] * (index + 1 - len(row))
        row[index] = distinct.index(answer)
    return {"specs": distinct, "layers": layers}


def kept(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without keys that do not matter here."""
    return {key: kept(value) if key == "text_config" else value for key, value in config.items() if key not in DROPPED}


def published(folder: Path, source: str) -> Iterable[dict[str, Any]]:
    for path in sorted(folder.glob("*_config.json")):
        config = json.loads(path.read_bytes())
        if "model_type" in config:
            name = path.name.removesuffix("_config.json").replace("--", "/", 1)
            yield {"model": name, "origin": "published", "source": source, "config": kept(config)}


def defaults() -> Iterable[dict[str, Any]]:
    served = set(ModelRegistry.get_supported_archs())
    version = importlib.metadata.version("transformers")
    general = transformers.PretrainedConfig().to_dict()
    for model_type, architectures in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        architecture = architectures if isinstance(architectures, str) else architectures[0]
        if architecture not in served:
            continue
        full = transformers.AutoConfig.for_model(model_type).to_dict()
        if "text_config" in full:
            continue  # its class here is that of the text model alone
        own = {key: value for key, value in full.items() if key not in general or value != general[key]}
        config = {"model_type": model_type, "architectures": [architecture]} | own
        yield {
            "model": model_type, "origin": "defaults", "source": f"transformers {version}", "config": kept(config)
        }  # fmt: skip


def asked(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what vLLM is to be asked, of the table and of what is added to it; later ones replace earlier ones."""
    rows = json.loads(arguments.table.read_text())["models"] if arguments.table.exists() else []
    rows += published(arguments.add, arguments.source) if arguments.add else []
    rows += defaults() if arguments.defaults else []
    unique = {(row["origin"], row["model"]): row for row in rows}
    return [
        {key: row[key] for key in ("model", "origin", "source", "config")}
        for row in unique.values()
        if not arguments.only or row["model"] in arguments.only
    ]


def answers(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield each row with vLLM's answer, and name on standard error those that vLLM cannot build here."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle(Path(folder))
        for row in rows:
            try:
                name, specs = oracle.specs(row["config"])
            except Exception as error:  # noqa: BLE001 - each is of a model of its own, and is named
                print(f"left out: {row['model']}: {type(error).__name__}: {str(error)[:200]!r}", file=sys.stderr)
            else:
                yield row | {"class": name} | table(specs)


def main() -> int:
    """Write the table; 1 if a recorded model can no longer be built: then nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--output", type=Path, help="where to write it, if not there")
    parser.add_argument("--only", nargs="*", help="models; all if left out")
    parser.add_argument("--add", type=Path, help="folder of configs")
    parser.add_argument("--source", default="", help="where they come from")
    parser.add_argument("--defaults", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    before = json.loads(arguments.table.read_text())["models"] if arguments.table.exists() else []
    rows = asked(arguments)
    answered = list(answers(rows))
    lost = {row["model"] for row in before} & ({row["model"] for row in rows} - {row["model"] for row in answered})
    if lost:
        print(f"nothing is written: {sorted(lost)} are in the table already", file=sys.stderr)
        return 1
    about = {
        "about": "What vLLM keeps for a model, by its config: tests/vllm/specs_oracle.py says how it was asked.",
        "source": f"vllm-cpu {importlib.metadata.version('vllm-cpu')}",
        "dtype": DTYPE,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    rows_written = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in answered)
    output = arguments.output or arguments.table
    output.write_text("{\n " + ",\n ".join([*lines, f'"models": [\n  {rows_written}\n ]']) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
