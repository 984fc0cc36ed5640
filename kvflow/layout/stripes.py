"""The tokens that a rank holds. Only this module handles decode context parallelism."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta, Struct

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RANKS_MAX = 1 << 10
"""Most ranks among which tokens are divided. Engines use up to 16. Each rank is a peer."""

TOKENS_MAX = 1 << 24
"""Most consecutive tokens on one rank: as many as the largest block has."""

Numbers = TypeVar("Numbers", int, "npt.NDArray[np.int64]")


class Stripe(Struct, frozen=True, array_like=True):
    """The tokens of a request that one rank holds: token ``t`` if ``t // width % size`` is ``rank``.

    The rank stores them without gaps: token ``t`` at local position ``t // (width * size) * width + t % width``. A
    block of ``block_size`` local tokens therefore stands for ``block_size * size`` tokens of the request.

    Attributes:
        rank: number of the rank among those that divide the tokens.
        size: number of ranks that divide the tokens; 1 if every rank holds every token.
        width: consecutive tokens on one rank; ignored if ``size`` is 1.
    """

    rank: Annotated[int, Meta(ge=0, le=RANKS_MAX - 1)] = 0
    size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    width: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, {self.width} at a time" if self.size > 1 else "all"

    @property
    def lattice(self) -> tuple[int, int]:
        """What the ranks of one group have in common: their number, and the width if it matters."""
        return self.size, self.width if self.size > 1 else 1

    def aligned(self, other: "Stripe") -> bool:
        """Return whether both hold the same tokens at the same local positions."""
        return self == other or (self.rank == other.rank and self.lattice == other.lattice)

    def holds(self, tokens: "npt.NDArray[np.int64]") -> "npt.NDArray[np.bool_]":
        """Return which tokens of a request this rank holds."""
        here: npt.NDArray[np.bool_] = tokens // self.width % self.size == self.rank
        return here

    def count(self, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens of a request this rank holds."""
        rounds, rest = divmod(num_tokens, self.width * self.size)
        return rounds * self.width + min(max(rest - self.rank * self.width, 0), self.width)

    def token(self, position: Numbers) -> Numbers:
        """Return the token of the request at a local position."""
        rounds, inside = position // self.width, position % self.width
        return (rounds * self.size + self.rank) * self.width + inside

    def position(self, token: Numbers) -> Numbers:
        """Return the local position of a token of the request, which this rank must hold."""
        return token // (self.width * self.size) * self.width + token % self.width

    def share_of(self, other: "Stripe") -> Fraction:
        """Return the part of another stripe's tokens that this rank holds, too: 0 if none, 1 if all.

        Both patterns repeat. A position in our period and one in the other's are the same token if they differ by a
        multiple of the periods' greatest common divisor, once per least common multiple.
        """
        if self.size == 1:
            return Fraction(1)
        ours, theirs = self.width * self.size, other.width * other.size
        common = math.gcd(ours, theirs)
        many, some = divmod(self.width, common)
        many_there, some_there = divmod(other.width, common)
        shift = (other.rank * other.width - self.rank * self.width) % common
        both = max(0, min(some, shift + some_there) - shift) + max(0, min(some, shift + some_there - common))
        pairs = common * many * many_there + many * some_there + many_there * some + both
        return Fraction(pairs * other.size, math.lcm(ours, theirs))


ALL_TOKENS = Stripe()
"""The stripe of a rank that holds every token."""
