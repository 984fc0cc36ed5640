"""The entry point (group ``vllm.general_plugins``) that registers the connector with vLLM."""

import logging

NAME = "KVFlowConnector"

logger = logging.getLogger("vllm.kvflow")  # vLLM shows the records of loggers below its own name


def register() -> None:
    """Register ``KVFlowConnector`` with vLLM, so that users need no ``kv_connector_module_path``.

    vLLM calls this function in the API server, in the engine core and in each worker, once or several times, even if
    the user has chosen another connector. So it never raises. vLLM imports the connector itself when it creates it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - vLLM calls us
    except ImportError as error:
        logger.warning(
            "kvflow: this release of vLLM has no registry of connectors: %s",
            error,
        )
        return
    try:
        KVConnectorFactory.register_connector(NAME, "kvflow.integrations.vllm", NAME)
    except ValueError as error:
        logger.debug("kvflow: %s", error)  # the name is registered already
