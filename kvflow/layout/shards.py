"""The part of the cache that a rank holds. Only this module handles tensor and decode context parallelism."""

import math
import operator
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from kvflow.errors import SpecInvalid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RANKS_MAX = 1 << 10  # ranks that divide tokens; engines use up to 16; each rank is a peer
TOKENS_MAX = 1 << 24  # consecutive tokens on one rank: as many as the largest block has

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


ALL_TOKENS = Stripe()  # a rank that holds every token


ShardRank = Annotated[int, Meta(ge=0, le=1 << 16)]


def whole_number(name: str, value: Any) -> int:
    """Return an integer as Python's ``int``, as a manifest can encode it; SpecInvalid names the field and the value."""
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise SpecInvalid(f"{name} is {value!r}: expected an integer", remedy="Pass an int.") from error


class Held(Struct, frozen=True):
    """The part of a global axis that one rank holds: ``[first, first + count)`` of ``total``."""

    first: int
    count: int
    total: int


class Shard(Struct, frozen=True, kw_only=True):
    """One rank's place in the parallel groups of its engine.

    Attributes:
        tp_rank: number of the rank among those that divide the heads.
        tp_size: number of ranks that divide the heads.
        dcp_rank: number of the rank among those that divide the tokens (decode context parallelism). Engines use ranks
            that would hold the same heads: ``tp_rank % dcp_size``.
        dcp_size: number of ranks that divide the tokens; 1 if every rank holds every token.
        dcp_interleave: consecutive tokens on one rank, a divisor of the block size.
    """

    tp_rank: ShardRank = 0
    tp_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    dcp_rank: Annotated[int, Meta(ge=0, le=RANKS_MAX - 1)] = 0
    dcp_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    dcp_interleave: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int:
                # The struct is frozen, but this value is still being set.
                force_setattr(self, name, whole_number(f"shard.{name}", value))
        for group, rank, size in (("tp", self.tp_rank, self.tp_size), ("dcp", self.dcp_rank, self.dcp_size)):
            if size < 1:
                raise SpecInvalid(f"shard.{group}_size is {size}: expected at least 1", remedy="Count this rank, too.")
            if not 0 <= rank < size:
                remedy = f"Ranks count from 0: give one from 0 to {size - 1}."
                raise SpecInvalid(f"shard.{group}_rank is {rank}, but {group}_size is {size}", remedy=remedy)
        for name, most in (("dcp_size", RANKS_MAX), ("dcp_interleave", TOKENS_MAX)):
            if not 1 <= getattr(self, name) <= most:
                remedy = "Give the value of the engine's own configuration."
                raise SpecInvalid(f"shard.{name} is {getattr(self, name)}: expected 1 to {most}", remedy=remedy)

    @property
    def stripe(self) -> Stripe:
        """The tokens that the rank holds, in groups whose tokens are divided."""
        return Stripe(self.dcp_rank, self.dcp_size, self.dcp_interleave)

    def heads(self, total: int) -> Held:
        """Return the heads held of ``total``.

        With at least as many heads as ranks, a rank holds a contiguous range, and the first ``total mod tp_size`` ranks
        hold one more. With fewer heads, rank r holds head ``r * total // tp_size``, which other ranks hold, too.
        """
        if total < self.tp_size:
            return Held(self.tp_rank * total // self.tp_size, 1, total)
        share, extra = divmod(total, self.tp_size)
        first = self.tp_rank * share + min(self.tp_rank, extra)
        return Held(first, share + (self.tp_rank < extra), total)
