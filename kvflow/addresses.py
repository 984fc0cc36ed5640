"""The one reader of addresses as settings, tickets and flags write them."""

from ipaddress import ip_address
from typing import Final

PORT_MAX: Final = 65535


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``tcp://HOST:PORT``. An IPv6 address keeps its brackets.

    Raises:
        ValueError: it is something else. The port may be any number.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def place_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint in digits. Raises: ValueError."""
    try:
        host, number = host_and_port(endpoint)
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        number = 0
    if not 1 <= number <= PORT_MAX:
        raise ValueError(f"the peer serves TCP at no address: {endpoint!r}")
    return str(address), number
