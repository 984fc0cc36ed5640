"""The backend that Ray Serve LLM creates in each replica before its engine starts."""

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin

from kvflow.integrations.ray.replica import complete


class KVFlowConnectorBackend(DefaultPDProtocolMixin, BaseConnectorBackend):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Makes the engine of a replica listen at the address of its node. Requests are those of vLLM's NixlConnector."""

    def setup(self) -> None:
        """Complete the settings of the connector.

        Raises:
            ConfigInvalid: see ``replica.complete``.
        """
        # In place: Ray has made shallow copies of the configuration already.
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        complete(extra, host=ray.util.get_node_ip_address(), port_offset=self._compute_port_offset())
