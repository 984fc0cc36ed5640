"""The one reader of addresses as settings, tickets and flags write them."""

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
