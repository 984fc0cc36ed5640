"""The one reader of addresses as settings, tickets and flags write them."""

import re
from ipaddress import ip_address
from typing import Final

PORT_MAX: Final = 65535


class AddressMalformed(ValueError):
    """A text is no address, or its port is out of range."""


def host_and_port(address: str, *, port_min: int = 0) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``tcp://HOST:PORT``. An IPv6 address keeps its brackets.

    Raises:
        AddressMalformed: it is something else, or the port is below ``port_min`` or above ``PORT_MAX``, of which the
            system would dial the lower 16 bits.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and port_min <= int(port) <= PORT_MAX):
        raise AddressMalformed(f"{address!r} is not HOST:PORT with a port from {port_min} to {PORT_MAX}")
    return host, int(port)


def place_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint in digits. Raises: AddressMalformed."""
    try:
        host, port = host_and_port(endpoint, port_min=1)
        return str(ip_address(host.removeprefix("[").removesuffix("]"))), port
    except ValueError as error:
        raise AddressMalformed(f"the peer serves TCP at no address: {endpoint!r}") from error
