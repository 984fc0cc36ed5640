"""The versions of the wire protocol that this release speaks, and how two peers choose one.

A version is a number for the whole conversation after ``Welcome``. What comes before it, ``Hello`` and
``Refuse``, keeps its meaning in every version, so that peers of any two releases can tell each other why they
do not get along.
"""

from typing import NamedTuple

WIRE_VERSION = 1
"""The newest version that this release speaks."""


class VersionRange(NamedTuple):
    """All versions from ``lowest`` to ``highest``, both included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest}..{self.highest}"


SUPPORTED = VersionRange(lowest=1, highest=WIRE_VERSION)


def choose(ours: VersionRange, theirs: VersionRange) -> int | None:
    """Return the highest version in both ranges, or None if there is none."""
    highest = min(ours.highest, theirs.highest)
    return highest if highest >= max(ours.lowest, theirs.lowest) else None
