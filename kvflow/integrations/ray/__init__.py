"""kvflow under Ray Serve LLM: each replica listens at the address of its node. See docs/howto/routers.md.

This module imports Ray only when a function is called. Ray loads ``backend`` in each replica.
"""

from typing import Any

from kvflow.integrations.vllm import NAME

__all__ = ["build_pd_openai_app", "register_backend"]


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """Register kvflow's backend and return Ray's application for prefill and decode.

    In a Serve configuration, name this function as ``import_path: kvflow.integrations.ray:build_pd_openai_app``.

    Args:
        pd_serving_args: arguments of ``ray.serve.llm.build_pd_openai_app``.

    Returns:
        The result of ``ray.serve.llm.build_pd_openai_app``.
    """
    from ray.serve.llm import build_pd_openai_app as build  # noqa: PLC0415 - see above

    register_backend()
    return build(pd_serving_args)


def register_backend() -> None:
    """Register kvflow's backend with all processes of the Ray cluster, once. ``build_pd_openai_app`` calls this."""
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import (  # noqa: PLC0415 - see above
        KVConnectorBackendFactory,
    )

    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, "kvflow.integrations.ray.backend:KVFlowConnectorBackend")
