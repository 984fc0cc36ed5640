"""The entry point by which an installed kvflow registers its connector with vLLM."""

NAME = "KVFlowConnector"


def register() -> None:
    """Make ``"kv_connector": "KVFlowConnector"`` known to vLLM without ``kv_connector_module_path``.

    vLLM calls this function in the API server, in the engine core and in each worker, once or more. The connector
    itself is imported when vLLM creates it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - vLLM calls us

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - a second registration would raise
        KVConnectorFactory.register_connector(NAME, "kvflow.integrations.vllm", NAME)
