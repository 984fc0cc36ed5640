"""Where a rank is: ``{host}`` in an address -> the host that it runs on, and what to say of an address."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from kvflow import WorkerConfig
from kvflow.errors import ConfigInvalid

HOST = "{host}"
ENDPOINTS = ("bind", "advertise", "tcp_bind", "tcp_advertise")
"""Settings that may name it."""

HOST_VARIABLE = "KVFLOW_ADVERTISE_HOST"
HOST_VARIABLES = (HOST_VARIABLE, "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP", "POD_IP")
"""Variables that say what it is, the first that is set and not empty. All of them belong to one node."""

NAME = re.compile(r"([A-Za-z0-9_-]+\.)*(?![0-9]+\.?$)[A-Za-z0-9_-]+\.?")
"""A word that ends with a number alone is a mistyped address."""


def with_host(extra: Mapping[str, Any], find_host: Callable[[], str]) -> dict[str, Any]:
    """Return the settings with this host's address or name in place of ``{host}``.

    A name stays a name: each peer looks it up when it dials.

    Args:
        extra: the connector's extra configuration.
        find_host: returns the host where no variable tells it.

    Raises:
        ConfigInvalid: the host is unknown, is no address and no name, or cannot be listened at though it must.
    """
    endpoints = {key: extra[key] for key in ENDPOINTS if isinstance(extra.get(key), str) and HOST in extra[key]}
    if not endpoints:
        return dict(extra)
    source, found = _told_or_found(find_host)
    address = _address(found)
    if address is None and not NAME.fullmatch(found):
        raise ConfigInvalid(f"{source} is {found!r}: expected an address or a name, without a port")
    if address is not None and (address.is_unspecified or "%" in found):
        raise ConfigInvalid(
            f"{source} is {found!r}, which no peer can dial",
            remedy=f"Set {HOST_VARIABLE} to the address at which peers reach this host.",
        )
    for key, endpoint in endpoints.items():
        if key.endswith("bind") and (address is None or not is_here(address)):
            raise ConfigInvalid(
                f"{key} is {endpoint!r}, but {source} is {found!r}, which is no address of this host",
                remedy=f"Set {key} to tcp://0.0.0.0 and its port, and leave {HOST} to advertise.",
            )
    written = f"[{address}]" if isinstance(address, IPv6Address) else found
    return {**extra, **{key: endpoint.replace(HOST, written) for key, endpoint in endpoints.items()}}


def remark(endpoint: str) -> str:
    """Return what to add to an address of this rank, so that its reader sees who cannot reach it; mostly nothing."""
    if _is_loopback(endpoint):
        return ", only on this host"
    return ", which is no address of this host" if _is_elsewhere(endpoint) else ""


def doubts(config: WorkerConfig) -> Iterator[str]:
    """Say which addresses of a rank peers on other hosts may not reach, though it listens for them."""
    bound = {"bind": config.bind, "tcp_bind": config.tcp().bind}
    reached = {"advertise": config.advertise or config.bind, "tcp_advertise": config.tcp().advertise}
    listens = next((f"{name} is {each}" for name, each in bound.items() if not _is_loopback(each)), "")
    for name, endpoint in reached.items():
        if listens and _is_loopback(endpoint):
            yield f"{name} is {endpoint}, which only this host reaches, but {listens}"
        elif _is_elsewhere(endpoint):
            yield (
                f"{name} is {endpoint}, which is no address of this host. That is right where addresses are "
                f"translated. Otherwise set {HOST_VARIABLE} on each node to its own; Ray copies it from one node to "
                "all if VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY names KVFLOW_"
            )


def is_here(address: IPv4Address | IPv6Address) -> bool:
    """Tell whether this host has an address: whether a socket can be bound to it."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _told_or_found(find_host: Callable[[], str]) -> tuple[str, str]:
    """Return the host, after where that is known from."""
    for name in HOST_VARIABLES:
        if value := os.environ.get(name, "").strip():
            return name, value
    return "the address that vLLM has found", find_host()


def _is_loopback(endpoint: str) -> bool:
    host = _host_of(endpoint)
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _is_elsewhere(endpoint: str) -> bool:
    """Tell whether an address is known to be another host's; of a name it is not known."""
    address = _address(_host_of(endpoint))
    return address is not None and not is_here(address)


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
