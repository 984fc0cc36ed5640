"""An engine that is used as a script does it: by ``LLM.generate``, and not stepped between two calls."""

import queue
from collections.abc import Iterator
from typing import Any

from . import engine_process


class Served(engine_process.Served):
    """An engine that steps only inside ``LLM.generate``; see ``engine_process``."""

    def generate(self, command: dict[str, Any]) -> None:
        from vllm import SamplingParams

        params = command["kv_transfer_params"]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=command["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        (output,) = self.llm.generate({"prompt_token_ids": command["prompt"]}, sampling, use_tqdm=False)
        self.answer(
            id=command["id"],
            tokens=list(output.outputs[0].token_ids),
            finish_reason=output.outputs[0].finish_reason,
            kv_transfer_params=output.kv_transfer_params,
        )

    def pending(self, commands: "queue.Queue[dict[str, Any]]") -> Iterator[dict[str, Any]]:
        """Yield commands as they come, and nothing between them."""
        while True:
            yield commands.get()
