"""The settings of one replica, by what its deployment says of all of them."""

import os
from typing import Any

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.settings import moved

SECRET_VARIABLE = "KVFLOW_CLUSTER_SECRET"  # noqa: S105 - the name of the variable, not a secret
EVERYWHERE = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104 - recognised, so that the node's address is advertised
ENDPOINTS = ("bind", "advertise", "tcp_bind", "tcp_advertise")


def complete(extra: dict[str, Any], *, host: str, port_offset: int) -> None:
    """Complete ``kv_connector_extra_config`` of one replica, in place.

    Without ``bind`` it listens at a free port of its node's address. Ports that are given are those of the first
    replica. What listens at all addresses is advertised at the node's.

    Args:
        extra: as the deployment has it.
        host: address of the node, as other nodes reach it.
        port_offset: added to ports that are given and not 0: replicas on one node need different ones.

    Raises:
        ConfigInvalid: there is no secret, an address is malformed, or a port is above 65535.
    """
    if not (extra.get("cluster_secret") or os.environ.get(SECRET_VARIABLE)):
        raise ConfigInvalid(
            f"{SECRET_VARIABLE} is missing in this replica: Ray copies no variable of the shell in which serve runs",
            remedy="Set it where `ray start` runs, on every node, or in env_vars of the runtime_env of LLMConfig.",
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
    raise ConfigInvalid(f"{name} is {endpoint!r}: expected tcp://HOST:PORT")
