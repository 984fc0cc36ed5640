"""What was done to simulated hosts, and between them: notes that explain later errors."""

from collections.abc import Iterable
from typing import Literal

Trouble = Literal[
    "killed",
    "left",
    "hung",
    "stopped",
    "reset",
    "parted",
    "cut",
    "clogged",
    "doubled",
    "failed",
    "slow",
    "waited",
    "unsealed",
]
"""To a host: its process was killed, has closed, hung, was stopped, or had to reset its reader. Between two hosts: they
were parted, a connection was cut, held back, or had a message twice, or a read has failed. Anywhere: all of it is slow
beside the budgets; and of one call: its lease was admitted later, or never sealed."""


class Troubles:
    """What was done to hosts, and between them, since the world began."""

    def __init__(self) -> None:
        self._made: dict[frozenset[str], set[Trouble]] = {}

    def note(self, trouble: Trouble, *hosts: str) -> None:
        """Note what was done to a host, between two, or, without any, to all."""
        self._made.setdefault(frozenset(hosts), set()).add(trouble)

    def between(self, one: str, others: Iterable[str]) -> set[Trouble]:
        """Return what was done to a host, to any of some others, or between it and one of them."""
        made = self._made
        found = made.get(frozenset(), set()) | made.get(frozenset((one,)), set())
        for other in others:
            found = found | made.get(frozenset((other,)), set()) | made.get(frozenset((one, other)), set())
        return found
