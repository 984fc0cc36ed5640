"""kvflow under Ray Serve LLM: each replica listens at the address of its node. See docs/howto/ray-serve.md.

Nothing here imports Ray before it is called; ``backend`` is what Ray loads in each replica.
"""

from typing import Any

from kvflow.integrations.vllm.plugin import NAME

__all__ = ["build_pd_openai_app", "register_backend"]


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """Return Ray's application for prefill and decode, with ``KVFlowConnector`` known to Ray.

    Takes and returns what ``ray.serve.llm.build_pd_openai_app`` does. The builder of a Serve configuration may be named
    as ``import_path: kvflow.integrations.ray:build_pd_openai_app``.
    """
    from ray.serve.llm import build_pd_openai_app as build  # noqa: PLC0415 - see above

    register_backend()
    return build(pd_serving_args)


def register_backend() -> None:
    """Make kvflow's backend known to all processes of the Ray cluster, once; ``build_pd_openai_app`` does so itself."""
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import (  # noqa: PLC0415 - see above
        KVConnectorBackendFactory,
    )

    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, "kvflow.integrations.ray.backend:KVFlowConnectorBackend")
