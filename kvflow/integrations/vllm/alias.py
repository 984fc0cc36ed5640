"""``KVFlowConnector`` under the name ``NixlConnector``, for charts and routers that accept known connectors only.

Name it in ``--kv-transfer-config``: ``{"kv_connector": "NixlConnector", "kv_connector_module_path":
"kvflow.integrations.vllm.alias"}``. It is the same class, not a subclass: ``MultiConnector`` looks up the statistics of
a child by the name of its class, and would find vLLM's own connector under ``NixlConnector``. See docs/howto/vllm.md.
"""

from typing import Any

import kvflow.integrations.vllm as package


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it, as the package does."""
    if name != "NixlConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return package.KVFlowConnector
