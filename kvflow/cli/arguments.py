"""What several commands read from their arguments."""

import argparse


def address(text: str) -> str:
    """Check ``host:port`` and return it.

    Raises:
        ArgumentTypeError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port with a port from 1 to 65535")
    return text
