"""kvflow under Ray Serve LLM: each replica listens at the address of its node. See docs/howto/routers.md.

This module imports Ray only where a function is called. Ray loads ``KVFlowConnectorBackend`` in each replica.
"""

import os
from functools import cache
from typing import Any

from kvflow.addresses import AddressMalformed, host_and_port
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import NAME
from kvflow.integrations.vllm.settings import ENDPOINTS, moved

__all__ = ["build_pd_openai_app", "register_backend"]

SECRET_VARIABLE = "KVFLOW_CLUSTER_SECRET"  # noqa: S105 - the name of the variable, not a secret
EVERYWHERE = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104 - recognized, so that the node's address is advertised


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """Register kvflow's backend and return Ray's application for prefill and decode.

    In a Serve configuration, name this function as ``import_path: kvflow.integrations.ray:build_pd_openai_app``. It
    takes and returns what ``ray.serve.llm.build_pd_openai_app`` does.
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
        KVConnectorBackendFactory.register_backend(NAME, "kvflow.integrations.ray:KVFlowConnectorBackend")


def __getattr__(name: str) -> Any:
    """Make the backend when Ray asks for it, because it is a subclass of Ray's classes."""
    if name != "KVFlowConnectorBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend_class()


@cache
def _backend_class() -> type:
    import ray  # noqa: PLC0415 - see above
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (  # noqa: PLC0415
        BaseConnectorBackend,
        DefaultPDProtocolMixin,
    )

    class KVFlowConnectorBackend(DefaultPDProtocolMixin, BaseConnectorBackend):  # type: ignore[misc]  # Ray is not installed where types are checked
        """Makes the engine of a replica listen at the address of its node. Requests are those of ``NixlConnector``."""

        def setup(self) -> None:
            """Complete the settings of the connector. Raises ConfigInvalid as ``complete`` does."""
            # In place: Ray has made shallow copies of the configuration already.
            extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
            complete(extra, host=ray.util.get_node_ip_address(), port_offset=self._compute_port_offset())

    return KVFlowConnectorBackend


def complete(extra: dict[str, Any], *, host: str, port_offset: int) -> None:
    """Complete ``kv_connector_extra_config`` of one replica, in place.

    Without ``bind``, the replica listens at a free port of its node's address. Ports in the settings are those of the
    first replica: others on one node need different ones. A replica that listens at all addresses advertises ``host``,
    the address at which other nodes reach its node.

    Raises:
        ConfigInvalid: the secret is missing, an address is malformed, or a port is above 65535.
    """
    if not (extra.get("cluster_secret") or os.environ.get(SECRET_VARIABLE)):
        raise ConfigInvalid(
            f"{SECRET_VARIABLE} is not set in this replica: Ray does not copy variables of the shell that runs serve",
            remedy="Set it on every node where `ray start` runs, or in env_vars of runtime_env in LLMConfig.",
        )
    host = f"[{host}]" if ":" in host else host
    extra.setdefault("bind", f"tcp://{host}:0")
    for name in ENDPOINTS:
        if name in extra:
            extra[name] = _moved(name, extra[name], port_offset)
    bound, port = host_and_port(extra["bind"])
    if bound in EVERYWHERE:
        extra.setdefault("advertise", f"tcp://{host}:{port}")


def _moved(name: str, endpoint: Any, offset: int) -> str:
    fault = f"{name} must be tcp://HOST:PORT, not {endpoint!r}"
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        raise ConfigInvalid(fault)
    try:
        return moved(endpoint, offset)
    except AddressMalformed as error:
        raise ConfigInvalid(fault) from error
