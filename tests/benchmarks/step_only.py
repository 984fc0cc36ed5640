"""``KVFlowConnector`` whose scheduler reaches its ranks with the engine's steps alone, for comparison."""

from typing import Any

from kvflow.integrations.vllm.connector import KVFlowConnector, RankIntroduction


class StepOnlyConnector(KVFlowConnector):
    """A lease is held when the next step orders it, and not before."""

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        ranks = [each.address for each in metadata.values() if isinstance(each, RankIntroduction)]
        self._scheduler_side.meet_ranks(ranks)
