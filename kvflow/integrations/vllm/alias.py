"""``KVFlowConnector`` under the name ``NixlConnector``, for charts and routers that decide by the connector's name.

Named in ``--kv-transfer-config``: ``{"kv_connector": "NixlConnector", "kv_connector_module_path":
"kvflow.integrations.vllm.alias"}``. It is the same class and not a subclass: under ``MultiConnector`` vLLM looks a
child's statistics up by the name of its class, and would find its own connector under ``NixlConnector``. See
docs/howto/vllm.md.
"""

from typing import Any

import kvflow.integrations.vllm as package


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it, as the package does, after a look at vLLM's version."""
    if name != "NixlConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return package.KVFlowConnector
