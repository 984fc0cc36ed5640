"""Two blocks have one digest if everything up to their ends is the same: compared with lists of that everything."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.integrations.vllm.blocks import ABSENT, Contents

from .vllm_like import extra_keys, new_request

PLACES = (1, 5, 17, 18, 40)
pictures = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from("ab")), max_size=3, unique_by=lambda each: each[0]
)
named = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(
            [tuple(range(48)), (*range(47), 0), (*range(20), 0, *range(21, 48)), tuple(range(50))]
        ),
        "media": pictures.map(sorted).map(tuple),
        "lora": st.sampled_from(("", "", "x", "y")),
        "cache_salt": st.sampled_from((None, None, "s", "t")),
    }
)
sizes = st.sampled_from([(16,), (16, 0), (8, 16, 32), (0,), (48,), (7,)])


def up_to_each_block(request, size, num_tokens):
    """Return what vLLM tells apart up to the end of each block: the token ids, and the keys of every block."""
    ends = [*range(size, num_tokens, size), num_tokens] if size else [num_tokens]
    keys, found = [], []
    for first, end in zip([0, *ends], ends, strict=False):
        their_keys, _ = extra_keys(request, first, end, 0)
        keys.append([key[:2] if key[0] == "lora" else key for key in their_keys or ()])
        found.append((request.all_token_ids[:end], keys.copy()))
    return found


@given(one=named, other=named, sizes=sizes, num_tokens=st.integers(33, 48))
def test_digests_are_the_same_where_all_before_is_the_same(one, other, sizes, num_tokens):
    requests = [new_request(None, **one), new_request(None, **other)]
    block_ids = [range(1, 1 + (-(-num_tokens // size) if size else 1)) for size in sizes]
    ours, theirs = (Contents(extra_keys).digests(request, block_ids, sizes, num_tokens) for request in requests)
    for group, size in enumerate(sizes):
        expected = [
            a == b for a, b in zip(*(up_to_each_block(each, size, num_tokens) for each in requests), strict=True)
        ]
        assert [a == b for a, b in zip(ours[group], theirs[group], strict=True)] == expected
        assert len(set(ours[group])) == len(expected)


@given(named, st.lists(st.booleans(), max_size=3))
def test_the_last_blocks_have_the_last_digests_and_missing_ones_none(named, there):
    request = new_request(None, **named)
    (whole,) = Contents(extra_keys).digests(request, [(1, 2, 3)], [16], 48)
    ids = [7 if each else ABSENT for each in there]
    (found,) = Contents(extra_keys).digests(request, [ids], [16], 48)
    expected = whole[len(whole) - len(there) :]
    assert found == tuple(digest if each else b"" for each, digest in zip(there, expected, strict=True))
