"""An engine that counts the tokens of its draft model."""

from typing import Any

from . import engine_process


class Served(engine_process.Served):
    """An engine that also obeys ``drafts``: how many tokens were drafted, and how many of them accepted, so far."""

    ops = engine_process.Served.ops | {"drafts"}

    def drafts(self, command: dict[str, Any]) -> None:
        counts = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        names = {name: f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")}
        self.answer(id=command["id"], **{name: counts.get(metric, 0) for name, metric in names.items()})
