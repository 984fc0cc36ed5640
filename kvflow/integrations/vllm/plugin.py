"""The entry point by which an installed kvflow registers its connector with vLLM."""

import logging

NAME = "KVFlowConnector"

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name


def register() -> None:
    """Make ``"kv_connector": "KVFlowConnector"`` known to vLLM without ``kv_connector_module_path``.

    vLLM calls this function in the API server, in the engine core and in each worker, once or more, also if the
    user has chosen another connector. So it never raises. The connector itself is imported when vLLM creates it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - vLLM calls us
    except ImportError as error:
        logger.warning("kvflow: this release of vLLM has no registry of connectors: %s", error)
        return
    try:
        KVConnectorFactory.register_connector(NAME, "kvflow.integrations.vllm", NAME)
    except ValueError as error:
        logger.debug("kvflow: %s", error)  # a second call
