"""Which part of the cache a rank holds: the only place that reasons about tensor parallelism."""

import operator
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from kvflow.errors import SpecInvalid
from kvflow.layout.stripes import RANKS_MAX, TOKENS_MAX, Stripe

Rank = Annotated[int, Meta(ge=0, le=1 << 16)]


def whole_number(name: str, value: Any) -> int:
    """Return a whole number as Python's own; numpy's are whole numbers too, but no manifest can be encoded with them.

    Raises:
        SpecInvalid: names the field and the value.
    """
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise SpecInvalid(f"{name} is {value!r}: expected an integer") from error


class Held(Struct, frozen=True):
    """The part of a global axis that one rank holds: ``[first, first + count)`` of ``total``."""

    first: int
    count: int
    total: int


class Shard(Struct, frozen=True, kw_only=True):
    """One rank's place in the parallel groups of its engine.

    Attributes:
        tp_rank: in the group of ranks that divide the heads.
        tp_size: ranks of that group.
        dcp_rank: in the group of ranks that divide the tokens (decode context parallelism). Engines take ranks that
            would hold the same heads: ``tp_rank % dcp_size``.
        dcp_size: ranks of that group; 1 if every rank holds every token.
        dcp_interleave: consecutive tokens that lie on one of them, a divisor of the block size.
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
                # Frozen for others: what stands here was given in the same moment.
                force_setattr(self, name, whole_number(f"shard.{name}", value))
        for group, rank, size in (("tp", self.tp_rank, self.tp_size), ("dcp", self.dcp_rank, self.dcp_size)):
            if not 0 <= rank < size:
                raise SpecInvalid(f"shard.{group}_rank is {rank}, but {group}_size is {size}")
        if not (1 <= self.dcp_size <= RANKS_MAX and 1 <= self.dcp_interleave <= TOKENS_MAX):
            for name, most in (("dcp_size", RANKS_MAX), ("dcp_interleave", TOKENS_MAX)):
                if not 1 <= getattr(self, name) <= most:
                    raise SpecInvalid(f"shard.{name} is {getattr(self, name)}: expected 1 to {most}")

    @property
    def stripe(self) -> Stripe:
        """The tokens that the rank holds, in caches whose tokens are divided at all."""
        return Stripe(self.dcp_rank, self.dcp_size, self.dcp_interleave)

    def heads(self, total: int) -> Held:
        """Return the heads held of ``total``.

        With at least as many heads as ranks, a rank holds a contiguous range and the first ``total mod
        tp_size`` ranks hold one more; with fewer, rank r holds head ``r * total // tp_size``, replicated.
        """
        if total < self.tp_size:
            return Held(self.tp_rank * total // self.tp_size, 1, total)
        share, extra = divmod(total, self.tp_size)
        first = self.tp_rank * share + min(self.tp_rank, extra)
        return Held(first, share + (self.tp_rank < extra), total)
