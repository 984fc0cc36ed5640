"""Short texts for messages and ``repr``, however long the names and values are that peers and callers choose."""

import reprlib

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 40


def quoted(text: str, length: int = 80) -> str:
    """Return text in quotes; text of more characters than ``length`` without its middle."""
    if len(text) > length:
        half = (length - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return repr(text)


def shown(value: object) -> str:
    """Return a value as a message shows it: its ``repr``, cut where it is long."""
    return _SHOWN.repr(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 block``, ``2 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
