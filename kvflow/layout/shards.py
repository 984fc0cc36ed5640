"""The part of the cache that a rank holds. Only this module handles tensor parallelism."""

import operator
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from kvflow.errors import SpecInvalid
from kvflow.layout.stripes import RANKS_MAX, TOKENS_MAX, Stripe

Rank = Annotated[int, Meta(ge=0, le=1 << 16)]


def whole_number(name: str, value: Any) -> int:
    """Return an integer as Python's ``int``. NumPy's integers are accepted, but a manifest cannot encode them.

    Raises:
        SpecInvalid: names the field and the value.
    """
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

    tp_rank: Rank = 0
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
        if not (1 <= self.dcp_size <= RANKS_MAX and 1 <= self.dcp_interleave <= TOKENS_MAX):
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
