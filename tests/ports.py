"""Ports for those that must say in advance where they will listen."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that is free and stays so: the kernel gives none below 32768 to who asks for any."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
