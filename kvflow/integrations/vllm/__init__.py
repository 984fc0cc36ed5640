"""``KVFlowConnector``: kvflow as a KV connector of vLLM's v1 engine.

Name it in ``--kv-transfer-config``: ``{"kv_connector": "KVFlowConnector", "kv_role": "kv_producer",
"kv_connector_extra_config": {...}}``. See docs/howto/vllm.md.

The scheduler's side (``scheduler``, with ``loading`` and ``offering``) runs in the process of vLLM's scheduler and
decides what to transfer. It sends commands (``messages``) to the worker's side of each rank (``worker``), which
executes them. ``connector`` takes vLLM's calls for both sides. Only ``connector`` and ``stats`` load vLLM on import,
because they have subclasses of vLLM's classes.
"""

import logging
from typing import Any

__all__ = ["KVFlowConnector", "NixlConnector", "register"]

NAME = "KVFlowConnector"

ALIAS = "NixlConnector"
"""A name for charts and routers that accept known connectors only, with ``"kv_connector_module_path":
"kvflow.integrations.vllm"``. It names the same class, not a subclass: ``MultiConnector`` looks up the statistics of a
child by the name of its class, and would find vLLM's own connector."""

logger = logging.getLogger("vllm.kvflow")  # vLLM shows the records of loggers below its own name


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it, after a check of vLLM's release, which may lack its base classes."""
    if name not in {NAME, ALIAS}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.integrations.vllm.versions import features  # noqa: PLC0415 - see above

    features()  # refuses a release that is not supported
    from kvflow.integrations.vllm.connector import KVFlowConnector  # noqa: PLC0415

    return KVFlowConnector


def register() -> None:
    """Register ``KVFlowConnector`` with vLLM, so that users need no ``kv_connector_module_path``.

    This is the entry point in the group ``vllm.general_plugins``. vLLM calls it in the API server, in the engine core
    and in each worker, once or several times, even if the user has chosen another connector. So it never raises. vLLM
    imports the connector itself when it creates it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - vLLM calls us
    except ImportError as error:
        logger.warning("kvflow: this release of vLLM has no registry of connectors: %s", error)
        return
    try:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    except ValueError as error:
        logger.debug("kvflow: %s", error)  # the name is registered already
