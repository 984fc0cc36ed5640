"""Tokens that ranks divide among themselves: who gives which, what is paired, what is lacking, what is said of it."""

import pytest

from kvflow.errors import BlockRangeMismatch, CapacityExceeded, LayoutMismatch
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA
from kvflow.memory.cache import allocate
from kvflow.planning.assignment import Assignment, assign_sources
from kvflow.planning.certificate import Missing
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import plan_transfer
from tests.helpers.loops import looped

from .helpers import full, ids, sliding


def latent(block_size=16):
    return MLA(block_size=block_size, head_size=8, dtype="float16")


def manifest(specs, dcp=(0, 1, 1), tp=(0, 1)):
    """The manifest of one rank: (number, ranks, interleave) among those that divide tokens."""
    shard = Shard(tp_rank=tp[0], tp_size=tp[1], dcp_rank=dcp[0], dcp_size=dcp[1], dcp_interleave=dcp[2])
    return allocate(specs, num_blocks=4, shard=shard, device="meta").manifest()


def latents(*dcp, block_size=16):
    return manifest({"a": latent(block_size)}, dcp)


def engine(specs, size, width, *, tp_size):
    """All ranks of an engine in which neighbors divide the tokens."""
    return [manifest(specs, (rank % size, size, width), (rank, tp_size)) for rank in range(tp_size)]


def paired(source, target, source_ids, target_ids, num_tokens):
    """Pair (unit of the target, unit of the source) of what one source gives, in order."""
    (group,) = plan_transfer(source, target).groups
    pairs = pair_units(group, ids(*source_ids), ids(*target_ids), num_tokens=num_tokens)
    assert list(pairs.source) == sorted(pairs.source)
    return sorted(zip(pairs.target, pairs.source, strict=True))


@looped(
    "source, target, unit, units",
    [
        ((0, 2, 1), (0, 1, 1), 1, (16, 16)),
        ((0, 2, 16), (0, 1, 1), 16, (1, 1)),
        ((0, 2, 8), (0, 1, 1), 8, (2, 2)),
        ((0, 2, 16), (0, 3, 8), 8, (2, 2)),
        ((0, 2, 4), (0, 2, 1), 1, (16, 16)),
        ((1, 2, 1), (1, 2, 1), 16, (1, 1)),  # the same tokens at the same places
        ((0, 1, 7), (0, 1, 1), 16, (1, 1)),  # a width that means nothing
    ],
)
def test_units_divide_what_lies_together(source, target, unit, units):
    (group,) = plan_transfer(latents(*source), latents(*target)).groups
    assert (group.unit_tokens, (group.source_units, group.target_units)) == (unit, units)


@looped(
    "source_ids, target_ids, num_tokens, expected",
    [
        ([7, 8], [1, 2], 64, [(1, 7), (2, 8)]),
        ([7, 8], [1, 2], 33, [(1, 7)]),  # tokens 32 and on are the other rank's
        ([7, 8], [2], 33, []),
        ([7, 8], [1, 2], 49, [(1, 7), (2, 8)]),
        ([8], [2], 64, [(2, 8)]),
        ([8], [-1, 2], 64, [(2, 8)]),
    ],
)
def test_lists_of_equal_stripes_name_blocks_of_all_ranks(source_ids, target_ids, num_tokens, expected):
    """Rank 1 of 2, 16 at a time: of a request of 33 tokens it holds 16, in a first block of two."""
    half = latents(1, 2, 16)
    assert paired(half, half, source_ids, target_ids, num_tokens) == expected


@pytest.mark.parametrize(
    ("source", "source_ids", "target_ids", "token"),
    [
        ((0, 2, 1), [8], [1, 2, 3, 0], 0),  # of 64 tokens, block 8 has the even ones from 32 on
        ((0, 2, 1), [8], [2, 3, 0], 16),
        ((1, 2, 1), [8], [2, 3, 0], 17),
        ((1, 2, 16), [7, -1], [1, 2, 3, 0], 48),
    ],
)
def test_a_token_that_a_ticket_lacks_is_named_rank_by_rank(source, source_ids, target_ids, token):
    with pytest.raises(BlockRangeMismatch) as caught:
        paired(latents(*source), latents(0, 1, 1), source_ids, target_ids, 64)
    assert caught.value.message.endswith(f"do not cover token {token}")


def test_a_list_that_reaches_before_token_0_is_refused():
    with pytest.raises(
        BlockRangeMismatch, match=r"source group 0: \d+ blocks? exceed 32 tokens: the list starts before token 0"
    ):
        paired(latents(0, 2, 1), latents(0, 1, 1), [7, 8], [1, 2], 32)
    with pytest.raises(
        BlockRangeMismatch, match=r"target group 0: \d+ blocks? exceed 32 tokens: the list starts before token 0"
    ):
        paired(latents(0, 1, 1), latents(0, 2, 1), [7, 8], [1, 2], 32)


def test_blocks_of_more_units_than_any_engine_has_are_refused():
    wide = latents(0, 2, 1, block_size=1 << 17)
    with pytest.raises(CapacityExceeded, match="units of one request"):
        paired(wide, latents(0, 1, 1), [0] * 33, [1], 1 << 23)
    assert plan_transfer(wide, wide).descriptors(33) == 33  # of equal stripes a block is one unit
    plan = plan_transfer(latents(0, 1, 1, block_size=1 << 17), wide)
    with pytest.raises(CapacityExceeded, match="units of one request"):
        plan.descriptors(33)


def given(sources, target, rotation=0):
    return [share.source for share in assign_sources(target, sources, rotation=rotation)]


def test_ranks_give_the_tokens_that_they_have():
    sources = [latents(rank, 4, 1) for rank in range(4)]
    assert given(sources, latents(0, 1, 1)) == [0, 1, 2, 3]
    assert given(sources, latents(1, 2, 1)) == [1, 3]
    assert given(sources, latents(0, 2, 2)) == [0, 1]
    assert given(sources, latents(2, 4, 1)) == [2]
    assert given(sources[::-1], latents(2, 4, 1)) == [1]
    assert given([latents(0, 1, 1)], latents(2, 4, 1)) == [0]
    assert assign_sources(latents(1, 2, 1), sources) == (Assignment(1, None), Assignment(3, None))


def test_replicas_take_turns_among_those_who_ask_for_the_same_tokens():
    sources = engine({"a": latent()}, 2, 1, tp_size=4)
    assert [given(sources, latents(0, 1, 1), rotation=rotation) for rotation in range(3)] == [[0, 1], [2, 3], [0, 1]]
    targets = engine({"a": latent()}, 2, 1, tp_size=4)
    assert [given(sources, target, rotation=rank) for rank, target in enumerate(targets)] == [[0], [1], [2], [3]]


def test_a_rank_that_holds_everything_is_preferred_to_several():
    sources = [latents(0, 2, 1), latents(1, 2, 1), latents(0, 1, 1)]
    assert given(sources, latents(0, 1, 1)) == [2]
    assert given(sources, latents(1, 2, 1)) == [1]


def test_tokens_that_no_rank_has_are_named():
    tokens = "tokens of rank 1 of 2, 1 at a time"
    lacking = f"a.latent differs: source has 'no head of 1, {tokens}', target has 'head 0 of 1, {tokens}'"
    with pytest.raises(LayoutMismatch, match=lacking):
        given([latents(0, 2, 1)], latents(0, 1, 1))
    with pytest.raises(LayoutMismatch, match="tokens of rank 0 of 2"):
        given([latents(1, 2, 1), latents(1, 2, 1)], latents(0, 1, 1))
    assert given([latents(0, 2, 1)], latents(0, 2, 1)) == [0]


def test_parts_of_two_ways_to_divide_tokens_do_not_complete_each_other():
    """Even tokens and odd pairs: together all but a quarter, and some twice."""
    with pytest.raises(LayoutMismatch, match="tokens of rank 1 of 2, 1 at a time"):
        given([latents(0, 2, 1), latents(1, 2, 2)], latents(0, 1, 1))


def test_heads_and_tokens_are_covered_at_once():
    """Two heads on four ranks that divide the tokens in pairs: every rank has a quarter."""
    specs = {"a": full(num_kv_heads=2), "s": sliding(num_kv_heads=2)}
    sources = engine(specs, 2, 4, tp_size=4)
    shares = assign_sources(manifest(specs), sources)
    window = {share.source for share in shares if share.head_ranges is None or ("s", "k") in share.head_ranges}
    assert [share.source for share in shares] == [0, 1, 2, 3]
    assert window == {0, 2}, "each half of the window is on two ranks, and read once"
    assert given(sources, manifest({"a": specs["a"]}, (1, 2, 4), (2, 4))) == [3]
    assert given(sources, manifest(specs, (1, 2, 4), (2, 4))) == [3]


def test_a_certificate_names_the_tokens_of_other_ranks():
    proof = plan_transfer(latents(1, 2, 1), latents(0, 1, 1)).certificate
    assert not proof.complete
    assert proof.missing == (Missing("a", "latent", 0, 1, "tokens"),)
    assert proof.written_bytes * 2 == proof.page_bytes
    nothing = plan_transfer(latents(1, 2, 1), latents(0, 2, 1))
    assert (nothing.groups, nothing.certificate.written_bytes) == ((), 0)
    assert nothing.certificate.missing == (Missing("a", "latent", 0, 1, "whole"),)
    assert plan_transfer(latents(0, 1, 1), latents(1, 2, 1)).certificate.complete
    assert plan_transfer(latents(1, 2, 1), latents(3, 4, 1)).certificate.complete


@looped(
    "source, target, block_size, blocks, counts",
    [
        ((0, 1, 1), (0, 2, 1), 16, 2, (32, 32)),  # neighbors here are every other token there
        ((0, 2, 1), (0, 1, 1), 16, 2, (16, 16)),
        ((0, 2, 16), (0, 1, 1), 16, 4, (2, 2)),
        ((0, 2, 16), (0, 1, 1), 8, 8, (4, 2)),  # two blocks in a row of every four
        ((0, 2, 16), (0, 1, 1), 8, 0, (0, 0)),
        ((1, 2, 16), (0, 1, 1), 8, 2, (0, 0)),
        ((0, 1, 1), (0, 2, 16), 16, 4, (4, 4)),
        ((0, 2, 1), (0, 2, 2), 16, 1, (8, 8)),
        ((0, 4, 8), (0, 2, 4), 16, 2, (2, 2)),
        ((1, 2, 1), (1, 2, 1), 16, 3, (3, 1)),
    ],
)
def test_descriptors_are_counted_for_the_tokens_that_this_source_gives(source, target, block_size, blocks, counts):
    plan = plan_transfer(latents(*source), latents(*target, block_size=block_size))
    assert (plan.descriptors(blocks), plan.descriptors(blocks, consecutive=True)) == counts


def test_an_explanation_says_who_gives_what():
    text = plan_transfer(latents(1, 2, 16), latents(0, 3, 8)).explain()
    assert "tokens are divided among ranks: source has rank 1 of 2, 16 at a time" in text
    assert "target has rank 0 of 3, 8 at a time, and 1 of 2 of them from this source" in text
    assert "not transferred: tokens of other source ranks of a.latent" in text
    assert "divided" not in plan_transfer(latents(1, 2, 16), latents(1, 2, 16)).explain()
