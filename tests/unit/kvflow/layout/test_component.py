"""A component reaches exactly the bytes that its strides say."""

from tests.helpers.loops import looped

from .helpers import component, state

APART = {"extents": (2, 4, 8), "strides": (100, 20, 2), "total": 2}
"""Two heads of four tokens of 16 bytes, with gaps behind tokens and heads."""


@looped(
    "part, nbytes, span",
    [
        (component(), 64, 64),
        (component(**APART), 128, 100 + 3 * 20 + 16),
        (component(dtype="float32", strides=(64, 16, 4)), 128, 3 * 16 + 7 * 4 + 4),
        (component(strides=(0, 0, 2)), 64, 16),  # tokens that alias
        (state(), 48, 48),
        (state(extents=(1, 1), total=1, strides=(1 << 40, 1 << 40)), 4, 4),  # strides that nothing is reached by
    ],
)
def test_a_span_reaches_from_the_first_to_the_last_byte(part, nbytes, span):
    assert (part.nbytes, part.span) == (nbytes, span)


@looped(
    "part, num_blocks, kernel_blocks, end",
    [
        (component(), 1, 1, 64),
        (component(), 3, 1, 2 * 64 + 64),
        (component(offset=5, block_stride=1000, **APART), 3, 1, 5 + 2 * 1000 + 176),
        (component(block_stride=1000, kernel_stride=200), 1, 4, 3 * 200 + 64),
        (component(block_stride=1000, kernel_stride=200), 3, 4, 2 * 1000 + 3 * 200 + 64),
        (state(offset=8), 2, 1, 8 + 64 + 48),
    ],
)
def test_the_end_is_behind_the_last_byte_of_the_last_block(part, num_blocks, kernel_blocks, end):
    assert part.end(num_blocks, kernel_blocks) == end


@looped(
    "part, block_size, kernel_blocks",
    [(component(), 4, 1), (component(), 8, 2), (component(), 64, 16), (state(), 1, 1), (state(), 64, 1)],
)
def test_a_block_has_as_many_kernel_blocks_as_its_tokens_fill(part, block_size, kernel_blocks):
    assert part.kernel_blocks(block_size) == kernel_blocks


@looped(
    "part, held, num_tokens",
    [
        (component(extents=(2, 4, 8), first=3, total=8), (3, 2, 8), 4),
        (component(shard_axis=-1), (0, 1, 1), 4),
        (state(), (0, 3, 3), 0),
        (state(shard_axis=1, first=4, total=12), (4, 4, 12), 0),
        (state(shard_axis=-1, total=1), (0, 1, 1), 0),
    ],
)
def test_what_is_held_lies_along_the_sharded_axis(part, held, num_tokens):
    assert (part.held.first, part.held.count, part.held.total) == held
    assert part.num_tokens == num_tokens
