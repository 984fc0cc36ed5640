"""A pair of engines, which blocks are asked for, and what the plans say of it."""

from dataclasses import dataclass

import kvflow
from kvflow.planning.assignment import assign_sources

from .engines import Engine, Request

TOKENS = 192
"""A multiple of every block size, unless a combination says otherwise."""


@dataclass(frozen=True)
class Combination:
    """One pair of engines and what is asked for.

    Attributes:
        source: the prefill engine.
        target: the decode engine.
        shows: what is proven.
        num_tokens: of the request.
        prefix_tokens: of its beginning that the consumer has already: its lists begin behind them.
        source_window: whether the producer offers only the blocks of a window that the next token needs.
        target_window: whether the consumer asks only for those.
        absent: positions of target blocks that are not wanted, in every list.
        ascending: whether block ids ascend by one on both sides.
        joined: whether every source rank offers for itself, with block ids of its own, instead of one mint for all.
    """

    source: Engine
    target: Engine
    shows: str
    num_tokens: int = TOKENS
    prefix_tokens: int = 0
    source_window: bool = False
    target_window: bool = False
    absent: tuple[int, ...] = ()
    ascending: bool = False
    joined: bool = False

    def request(self, name, salt=0):
        """Return the request of this combination."""
        return Request(name, self.num_tokens, salt)

    def plans(self, sources, target, rank):
        """Return the plans by which one rank of the target reads, by the number of the source rank."""
        there, here = [source.cache.manifest() for source in sources], target.cache.manifest()
        return {
            share.source: kvflow.plan_transfer(there[share.source], here, head_ranges=share.head_ranges)
            for share in assign_sources(here, there, rotation=rank)
        }

    def source_lists(self, ranks):
        """Return the block ids of every rank of the source; all the same unless each offers for itself."""
        lists = []
        for number, rank in enumerate(ranks):
            counts = [self._count(rank, group, windowed=self.source_window) for group in rank.cache.groups]
            seed = f"source {number}" if self.joined else "source"
            lists.append(rank.scattered(counts, seed, ascending=self.ascending))
        return lists

    def target_lists(self, ranks):
        """Return the block ids that every rank of the target asks for; each has its own."""
        lists = []
        for number, rank in enumerate(ranks):
            groups = rank.cache.groups
            counts = [
                min(self._count(rank, group, windowed=self.target_window), self._behind_the_prefix(rank, group))
                for group in groups
            ]
            block_ids = rank.scattered(counts, f"target {number}", ascending=self.ascending)
            for ids in block_ids:
                for position in self.absent:
                    ids[position] = -1
            lists.append(block_ids)
        return lists

    def _count(self, rank, group, *, windowed):
        if group.kind == "mamba":
            return 1
        windowed = windowed and group.window
        return kvflow.window_blocks(group, self.num_tokens) if windowed else rank.num_blocks(group, self.num_tokens)

    def _behind_the_prefix(self, rank, group):
        block_tokens = group.block_size * rank.ranks_of_tokens(group)
        return rank.num_blocks(group, self.num_tokens) - self.prefix_tokens // block_tokens
