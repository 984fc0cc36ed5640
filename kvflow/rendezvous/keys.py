"""Drawing secrets and keys, for whoever sets up a cluster."""

from handshake import CurveKeys
from handshake.security import draw_secret

__all__ = ["draw_pair", "draw_secret", "public_key"]


def draw_pair() -> tuple[str, str]:
    """Draw a key pair for one worker; return the private and the public key, 64 hexadecimal digits each."""
    keys = CurveKeys.draw()
    return keys.private_key, keys.public_key


def public_key(private: bytes) -> str:
    """Return the public key, 64 hexadecimal digits, that belongs to the 32 bytes of a private one."""
    return CurveKeys.from_private(private).public_key
