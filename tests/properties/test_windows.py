"""What a sliding window needs arrives byte for byte, or the pull is refused; what it needs no more may be missing."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.errors import BlockRangeMismatch
from kvflow.layout.specs import SlidingWindow
from kvflow.planning.plan import plan_transfer

from .caches import ROLES, Side, execute, fill_with_noise, mark_free, spans, thorough, write_tags

LAYER = "model.layers.0.attn"
HEADS = 2
SIZES = (1, 2, 3, 4, 6, 8, 12)


@st.composite
def requests(draw):
    """Return both block sizes, the window, the tokens, and how many of the last blocks each side lists."""
    sizes, num_tokens = (draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))), draw(st.integers(1, 40))
    listed = tuple(draw(st.integers(0, math.ceil(num_tokens / size))) for size in sizes)
    return sizes, draw(st.integers(2, 30)), num_tokens, listed


def side_of(block_size, window):
    spec = SlidingWindow(block_size=block_size, num_kv_heads=HEADS, head_size=8, dtype="float16", window=window)
    return Side({LAYER: spec}, None, "BLHNC", "content", 0, 1)


def tokens_of(ids, size, num_tokens):
    """Return token -> block and place of it."""
    return {first + at: (block, at) for block, first, count in spans(ids, size, num_tokens) for at in range(count)}


@thorough
@given(requests())
@example(((4, 12), 14, 20, (3, 2)))  # from token 7 on, the last of a unit that the source does not list
@example(((4, 12), 13, 20, (3, 2)))  # from token 8 on: that unit lies before it
def test_a_window_is_filled_byte_for_byte_or_the_pull_is_refused(request):
    (theirs, ours), window, num_tokens, listed = request
    source_side, target_side = side_of(theirs, window), side_of(ours, window)
    source, target = source_side.cache(42), target_side.cache(42)
    source_ids, target_ids = (list(range(count, 0, -1)) for count in listed)
    fill_with_noise(source, 1)
    fill_with_noise(target, 2)
    write_tags(source_side, source, [source_ids], num_tokens, lambda _: range(HEADS))
    there, here = tokens_of(source_ids, theirs, num_tokens), tokens_of(target_ids, ours, num_tokens)
    lacking = [token for token in here if token not in there]
    first = max(0, num_tokens - (window - 1))  # the first token that the next one looks at
    noise = target.backing.clone()

    def pull():
        plan = plan_transfer(source.manifest(), target.manifest())
        execute(plan, source, target, source_ids=[source_ids], target_ids=[target_ids], num_tokens=num_tokens)

    if any(token >= first or token // ours != first // ours for token in lacking):
        with pytest.raises(BlockRangeMismatch):
            pull()
        assert torch.equal(target.backing, noise)
        return
    pull()
    mark_free(target_side, target, [target_ids], num_tokens)
    found = target.backing.clone()
    target.backing.copy_(noise)
    kept = {
        (role, token): target_side.cells(target, LAYER, role, block)[:, at].clone()
        for role in ROLES
        for token in lacking
        for block, at in [here[token]]
    }
    write_tags(target_side, target, [target_ids], num_tokens, lambda _: range(HEADS))
    for (role, token), cells in kept.items():
        block, at = here[token]
        target_side.cells(target, LAYER, role, block)[:, at] = cells
    mark_free(target_side, target, [target_ids], num_tokens)
    assert torch.equal(found, target.backing)
