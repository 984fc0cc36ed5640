"""Two blocks have one digest if everything up to their ends is the same: compared with lists of that everything."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow import Ticket
from kvflow.contents import Chains
from kvflow.errors import ContentMismatch
from kvflow.ids import ABSENT

from .vllm_like import extra_keys, new_contents, new_mint, new_request, new_ticket

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
    ours, theirs = (new_contents().digests(request, block_ids, sizes, num_tokens) for request in requests)
    for group, size in enumerate(sizes):
        expected = [
            a == b for a, b in zip(*(up_to_each_block(each, size, num_tokens) for each in requests), strict=True)
        ]
        assert [a == b for a, b in zip(ours[group], theirs[group], strict=True)] == expected
        assert len(set(ours[group])) == len(expected)


@given(named=named, sizes=sizes, steps=st.lists(st.integers(1, 48), max_size=4).map(sorted))
def test_digests_that_grow_with_steps_are_those_of_the_whole(named, sizes, steps):
    request, contents = new_request(None, **named), new_contents()
    chains = Chains()
    for num_tokens in steps:
        contents.grow(request, chains, sizes, num_tokens)
    for num_tokens in (48, *steps):  # also of fewer tokens than are computed
        ids = [range(-(-num_tokens // size) if size else 1) for size in sizes]
        grown = contents.digests(request, ids, sizes, num_tokens, chains=chains)
        assert grown == contents.digests(request, ids, sizes, num_tokens)


@given(named, st.lists(st.booleans(), max_size=3))
def test_the_last_blocks_have_the_last_digests_and_missing_ones_none(named, there):
    request = new_request(None, **named)
    (whole,) = new_contents().digests(request, [(1, 2, 3)], [16], 48)
    ids = [7 if each else ABSENT for each in there]
    (found,) = new_contents().digests(request, [ids], [16], 48)
    expected = whole[len(whole) - len(there) :]
    assert found == tuple(digest if each else b"" for each, digest in zip(there, expected, strict=True))


def test_without_the_secret_nobody_computes_a_digest():
    request = new_request(None, 48)
    found = [new_contents(secret).digests(request, [(1, 2, 3)], [16], 48) for secret in ("a" * 16, "b" * 16)]
    assert not {*found[0][0]} & {*found[1][0]}


OTHERS = [(*range(47), 99), (99, *range(1, 48)), (*range(16), 99, *range(17, 48))]
GROUPS = {"one group": ([(3, 4, 9)], (16,)), "a window, a state": ([(3, 4, 9), (ABSENT, 8), (7,)], (16, 32, 0))}


@pytest.mark.parametrize("groups", GROUPS)
def test_a_ticket_is_for_its_own_prompt(groups):
    block_ids, sizes = GROUPS[groups]
    ticket = new_ticket(48, block_ids, block_sizes=sizes)
    assert sum(len(content.digests) for content in ticket.grants[0].contents) == len(block_ids)
    new_contents().require(new_request(None, 48), ticket)
    new_contents().require(new_request(None, (*range(48), 1, 2)), ticket)
    for other in OTHERS:
        with pytest.raises(ContentMismatch):
            new_contents().require(new_request(None, other), ticket)


def test_a_ticket_of_a_second_secret_is_compared_with_its_key():
    old, new = "an old secret, long enough", "a new secret, long enough"
    contents = new_contents(new, old)
    for secret in (old, new):
        ticket = new_ticket(secret=secret)
        contents.require(new_request(None, 48), ticket)
        with pytest.raises(ContentMismatch):
            contents.require(new_request(None, OTHERS[1]), ticket)
    with pytest.raises(ContentMismatch):
        new_contents(new).require(new_request(None, 48), new_ticket(secret=old))


def test_a_signed_ticket_without_the_digest_of_its_last_block_is_refused():
    """An engine of its own may sign anything; unnamed blocks are not believed."""
    ticket = new_mint(block_sizes=(16,)).offer(
        "r", block_ids=[(3, 4, 9)], num_tokens=48, digests=[(b"a", b"b", b"c")], chained=True
    )[0]
    (grant,) = ticket.grants
    for digests in ((), (b"",)):
        content = msgspec.structs.replace(grant.contents[0], digests=digests)
        other = msgspec.structs.replace(grant, contents=(content,))
        with pytest.raises(ContentMismatch):
            new_contents().require(new_request(None, 48), Ticket(grants=(other,), signed=ticket.signed))
