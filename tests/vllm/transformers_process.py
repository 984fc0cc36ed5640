"""One transformers engine of docs/examples/transformers in this process, driven by lines of JSON on its input.

The one argument is an object: ``model``, a folder; ``config``, fields of ``WorkerConfig``; ``batching``, fields of
``ContinuousBatchingConfig``; ``transfers``, arguments of ``Transfers``. The first line of output has ``endpoint``.
Commands have an ``op``; answers carry the ``id`` of theirs.

========  ==========================================  ==================================================================
op        fields                                      answer
========  ==========================================  ==================================================================
generate  id, prompt, max_tokens, kv_transfer_params  id, kv_transfer_params as soon as they are known; then id, tokens
state     id                                          id, free: share of the cache, once what is only cached is dropped;
                                                      read: tokens that were read since the last call
zero      id                                          id; the first block of the next read is zeroed
========  ==========================================  ==================================================================
"""

import json
import sys
import threading
from importlib import util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

import kvflow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "transformers" / "engine.py"


def load_example() -> Any:
    """Import the example, which is no package."""
    spec = util.spec_from_file_location("transformers_engine", EXAMPLE)
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Process:
    """The engine, and what it answers."""

    def __init__(self, manager: Any, transfers: Any) -> None:
        self._manager, self._transfers = manager, transfers
        self._cache = manager.batch_processor.cache
        self._lock = threading.Lock()
        self._read_tokens, self._zeroes = 0, False
        self._end_read = transfers._end_read
        transfers._end_read = self._note_read
        threading.Thread(target=self._deliver, daemon=True).start()

    def answer(self, **fields: Any) -> None:
        with self._lock:
            print(json.dumps(fields), flush=True)  # noqa: T201

    def generate(self, command: dict[str, Any]) -> None:
        name, prompt = command["id"], command["prompt"]
        offered = self._transfers.ask(name, prompt, command["kv_transfer_params"])
        offered.add_done_callback(lambda _: self.answer(id=name, kv_transfer_params=offered.result()))
        self._manager.add_request(prompt, name, command["max_tokens"])

    def state(self, command: dict[str, Any]) -> None:
        with self._manager.pause():
            self._cache.evict_cached_blocks()
            self._cache.pool.try_to_free_sectors()
            self.answer(id=command["id"], free=self._cache.compute_free_capacity(), read=self._read_tokens)
            self._read_tokens = 0

    def zero(self, command: dict[str, Any]) -> None:
        self._zeroes = True
        self.answer(id=command["id"])

    def _note_read(self, state: Any, blocks: Any, *, is_read: bool) -> None:
        if is_read:
            self._read_tokens += len(blocks.initial_tokens) - blocks.position_offset
            if self._zeroes:
                full = self._cache.cache_allocators["full_attention"]
                full._copy_view[full.block_table[blocks.request_id][0]] = 0
                self._zeroes = False
        self._end_read(state, blocks, is_read=is_read)

    def _deliver(self) -> None:
        while True:
            if output := self._manager.get_result(timeout=60.0):
                self.answer(id=output.request_id, tokens=output.generated_tokens, error=output.error)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    engine = load_example()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, attn_implementation="sdpa")
    config = kvflow.WorkerConfig(**settings["config"])
    batching = ContinuousBatchingConfig(num_blocks=256, **settings["batching"])
    with engine.serve(model, config, batching, **settings["transfers"]) as (manager, transfers):
        process = Process(manager, transfers)
        process.answer(endpoint=transfers.worker.endpoint)
        for line in sys.stdin:
            command = json.loads(line)
            getattr(process, command["op"])(command)


if __name__ == "__main__":
    main()
