"""kvflow as a connector of vLLM's v1 engine.

Named in ``--kv-transfer-config``: ``{"kv_connector": "KVFlowConnector", "kv_role": "kv_producer",
"kv_connector_extra_config": {...}}``. See docs/howto/vllm.md.

``scheduler`` decides, in the engine's scheduler process; ``worker`` does, once per rank; ``orders`` travel from one to
the other. ``plugin`` makes the name known to vLLM. Only ``connector``, ``metadata`` and ``stats`` import vLLM when they
are imported, because they subclass what is vLLM's.
"""

from typing import Any

__all__ = ["KVFlowConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it, after a look at vLLM's version: its base classes may not be there."""
    if name != "KVFlowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.integrations.vllm.versions import require_supported  # noqa: PLC0415 - see above

    require_supported()
    from kvflow.integrations.vllm.connector import KVFlowConnector  # noqa: PLC0415

    return KVFlowConnector
