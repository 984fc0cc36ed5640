"""Derives the settings of one replica from those that its deployment gives to all replicas."""

import os
from typing import Any

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.settings import moved

SECRET_VARIABLE = "KVFLOW_CLUSTER_SECRET"  # noqa: S105 - the name of the variable, not a secret
EVERYWHERE = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104 - recognized, so that the node's address is advertised
ENDPOINTS = ("bind", "advertise", "tcp_bind", "tcp_advertise")


def complete(extra: dict[str, Any], *, host: str, port_offset: int) -> None:
    """Complete ``kv_connector_extra_config`` of one replica, in place.

    Without ``bind``, the replica listens at a free port of its node's address. Ports in the settings are those of the
    first replica. A replica that listens at all addresses advertises the address of its node.

    Args:
        extra: ``kv_connector_extra_config`` of the deployment.
        host: address of the node, as other nodes reach it.
        port_offset: added to each port that is not 0, because replicas on one node need different ports.

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
            extra[name] = moved(_checked(name, extra[name]), port_offset)
    bound, _, port = extra["bind"].removeprefix("tcp://").rpartition(":")
    if bound in EVERYWHERE:
        extra.setdefault("advertise", f"tcp://{host}:{port}")


def _checked(name: str, endpoint: Any) -> str:
    if isinstance(endpoint, str) and endpoint.startswith("tcp://") and endpoint.rpartition(":")[2].isdecimal():
        return endpoint
    raise ConfigInvalid(f"{name} must be tcp://HOST:PORT, not {endpoint!r}")
