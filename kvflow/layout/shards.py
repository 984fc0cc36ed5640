"""Which heads a rank holds: the only place that reasons about tensor parallelism."""

import operator
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid

Rank = Annotated[int, Meta(ge=0, le=1 << 16)]


def require_integer(name: str, value: Any) -> None:
    """Refuse what is no whole number; numpy's are.

    Raises:
        SpecInvalid: names the field and the value.
    """
    try:
        operator.index(value)
    except TypeError as error:
        raise SpecInvalid(f"{name} is {value!r}: expected an integer") from error


class Held(Struct, frozen=True):
    """The part of a global axis that one rank holds: ``[first, first + count)`` of ``total``."""

    first: int
    count: int
    total: int


class Shard(Struct, frozen=True, kw_only=True):
    """One rank's place in the parallel group of its engine."""

    tp_rank: Rank = 0
    tp_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            require_integer(f"shard.{name}", getattr(self, name))
        if not 0 <= self.tp_rank < self.tp_size:
            raise SpecInvalid(f"shard.tp_rank is {self.tp_rank}, but tp_size is {self.tp_size}")

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
