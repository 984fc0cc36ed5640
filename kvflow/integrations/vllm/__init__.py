"""``KVFlowConnector``: kvflow as a KV connector of vLLM's v1 engine.

Name it in ``--kv-transfer-config``: ``{"kv_connector": "KVFlowConnector", "kv_role": "kv_producer",
"kv_connector_extra_config": {...}}``. See docs/howto/vllm.md.

The scheduler's side (``scheduler``, with ``loading`` and ``offering``) runs in the process of vLLM's scheduler and
decides what to transfer. It sends commands (``messages``) to the worker's side of each rank (``worker``), which
executes them. ``connector`` takes vLLM's calls for both sides, and ``plugin`` registers its name with vLLM. Only
``connector`` and ``stats`` load vLLM on import, because they have subclasses of vLLM's classes.
"""

from typing import Any

__all__ = ["KVFlowConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it, after a check of vLLM's release, which may lack its base classes."""
    if name != "KVFlowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.integrations.vllm.versions import require_supported  # noqa: PLC0415 - see above

    require_supported()
    from kvflow.integrations.vllm.connector import KVFlowConnector  # noqa: PLC0415

    return KVFlowConnector
