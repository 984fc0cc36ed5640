"""The life of a request that reads its prompt: announced, loading, gone; at each stage it may end."""

import pickle

import msgspec
import pytest

from kvflow.errors import BlockIdsInvalid, TicketInvalid
from kvflow.integrations.vllm import loading as loading_module
from kvflow.integrations.vllm.blocks import loaded_blocks, offered_blocks
from kvflow.integrations.vllm.loading import Loading
from kvflow.integrations.vllm.messages import Cancel, Fail, Found, GiveBack, Hold, Load, RenewLeases, pack, unpack
from tests.helpers.loops import looped

from .vllm_like import TOKENS_MAX, FullAttentionSpec, MambaSpec, SlidingWindowSpec, groups_of, new_ticket

FULL = groups_of(FullAttentionSpec())
HYBRID = groups_of(SlidingWindowSpec(), MambaSpec(), FullAttentionSpec())
"""Blocks of 16 tokens, a window of 64."""
TICKET = new_ticket(num_tokens=48)


def loading(*, wanted=48, ticket=TICKET, groups=FULL):
    found = Loading(groups, TOKENS_MAX)
    found.announce("r", ticket, wanted=wanted)
    return found


def test_blocks_that_are_not_loaded_are_absent_by_the_size_of_their_group():
    groups = groups_of(FullAttentionSpec(), FullAttentionSpec(block_size=64))
    found = loaded_blocks(groups, [[1, 2], [3]], end=20, num_tokens=200)
    assert found == ((1, 2, *[-1] * 11), (3, *[-1] * 3))


def samples(*names):
    requests = Loading(FULL, TOKENS_MAX)
    for name in names:
        requests.announce(name, TICKET, wanted=48)
    return requests


@pytest.mark.parametrize("aborted", [False, True])
def test_a_sample_that_comes_when_its_leader_is_through_is_computed(aborted):
    requests = samples("0_cmpl-r")
    if aborted:
        requests.finished("0_cmpl-r")
    else:
        requests.matched("0_cmpl-r", 0)
        requests.allocated("0_cmpl-r", [[1, 2, 3]], 48)
        requests.received("0_cmpl-r")
    requests.take_commands()
    requests.announce("1_cmpl-r", TICKET, wanted=48)
    assert requests.matched("1_cmpl-r", 0) == 0
    requests.allocated("1_cmpl-r", [[1, 2, 4]], 0)
    requests.finished("1_cmpl-r")
    assert requests.take_commands() == []


def test_samples_of_another_prompt_are_no_late_ones():
    requests = samples("0_cmpl-r")
    requests.finished("0_cmpl-r")
    requests.announce("1_cmpl-s", TICKET, wanted=48)
    assert requests.matched("1_cmpl-s", 0) == 48


def test_the_prompts_whose_samples_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(loading_module, "SAMPLED_MAX", 2)
    requests = Loading(FULL, TOKENS_MAX)
    for prompt in ("a", "b", "c"):
        requests.announce(f"0_{prompt}", TICKET, wanted=48)
        requests.finished(f"0_{prompt}")
    found = []
    for prompt in ("b", "c", "a"):
        requests.announce(f"1_{prompt}", TICKET, wanted=48)
        found.append(requests.matched(f"1_{prompt}", 0))
    assert found == [0, 0, 48]


@looped("listed", [[], [0], [0, 0, 0]])
def test_a_state_that_has_no_block_to_be_loaded_into_fails(listed):
    with pytest.raises(BlockIdsInvalid, match="state"):
        loaded_blocks(groups_of(MambaSpec()), [listed], end=47, num_tokens=47)


@looped(
    "listed, scratch, state",
    [([7], 0, 7), ([6, 7], 0, 7), ([0, 7, 8, 9], 2, 7), ([7], 2, 7), ([7, 8], 2, 7)],
)
def test_a_state_is_in_the_last_block_before_those_for_speculation(listed, scratch, state):
    groups = groups_of(MambaSpec(num_speculative_blocks=scratch))
    assert loaded_blocks(groups, [listed], end=47, num_tokens=47) == ((state,),)


@looped("retained, loaded", [(0, (10, 11, 12, 13)), (1, (10, 11, 12, 13)), (2, (9, 10, 11, 12, 13))])
def test_tokens_before_the_window_are_loaded_if_draft_layers_use_them(retained, loaded):
    spec = SlidingWindowSpec()
    spec.extra_retained_tokens = retained
    listed = [list(range(1, 14))]
    assert loaded_blocks(groups_of(spec), listed, end=208, num_tokens=208) == (loaded,)


def test_a_state_of_a_later_token_is_refused():
    ticket = new_ticket(num_tokens=48, block_ids=((3,), (4,), (5,)))
    requests = loading(wanted=47, ticket=ticket, groups=HYBRID)
    assert requests.matched("r", 0) == 47
    requests.allocated("r", [[1, 2, 3], [4], [5, 6, 7]], 47)
    release, command = requests.take_commands()
    assert release == GiveBack("r", ticket)
    assert (type(command), command.code) == (Fail, "block_range_mismatch")


@pytest.mark.parametrize("tokens_max", [47, 48])
def test_a_ticket_of_more_tokens_than_any_request_is_refused(tokens_max):
    requests = Loading(FULL, tokens_max)
    requests.announce("r", TICKET, wanted=47)
    assert requests.matched("r", 0) == 47
    requests.allocated("r", [[1, 2, 3]], 47)
    if tokens_max == 48:
        assert requests.take_commands() == [Load("r", TICKET, ((1, 2, 3),))]
        return
    release, command = requests.take_commands()
    assert release == GiveBack("r", TICKET)
    assert (type(command), command.code) == (Fail, "block_range_mismatch")
    assert command.reason == "the ticket has 48 tokens, but max_model_len of this engine is 47"
    assert "max_model_len of both engines" in command.remedy


def test_a_refused_request_fails_as_a_load_does():
    requests = Loading(FULL, TOKENS_MAX)
    requests.refuse("r", TicketInvalid("forged"), wanted=48)
    assert requests.matched("r", 16) == 32
    requests.allocated("r", [[1, 2, 3]], 32)
    assert requests.take_commands() == [Fail("r", "ticket_invalid", "forged", TicketInvalid.default_remedy)]
    requests.received("r")
    assert requests.matched("r", 0) == 0


def test_requests_that_nobody_announced_have_nothing_to_load():
    requests = Loading(FULL, TOKENS_MAX)
    assert requests.matched("other", 0) == 0
    requests.allocated("other", [[1]], 0)
    requests.received("other")
    requests.finished("other")
    assert requests.take_commands() == []


def test_too_few_blocks_fail_the_request():
    requests = loading()
    requests.matched("r", 0)
    requests.allocated("r", [[1, 2]], 48)
    failure, given_back = requests.take_commands()
    assert (type(failure), failure.code) == (Fail, "block_ids_invalid")
    assert given_back == GiveBack("r", TICKET)


@pytest.mark.parametrize(
    ("tokens", "listed", "offered"),
    [
        (48, [[1, 2, 3], [9], [4, 5, 6]], ((1, 2, 3), (9,), (4, 5, 6))),
        # The next token looks at the last 63: blocks from token 97 on.
        (160, [[0, 0, 0, 0, 0, 0, 1, 2, 3, 4], [9], list(range(11, 21))], ((1, 2, 3, 4), (9,), tuple(range(11, 21)))),
        # vLLM has not let go yet of what it needs no more.
        (160, [list(range(21, 31)), [0, 9], list(range(11, 21))], ((27, 28, 29, 30), (9,), tuple(range(11, 21)))),
        # Blocks behind the last token hold nothing.
        (16, [[1, 2], [9], [3, 4]], ((1,), (9,), (3,))),
    ],
)
def test_a_producer_offers_what_the_next_token_needs(tokens, listed, offered):
    assert offered_blocks(HYBRID, listed, tokens) == offered


def test_blocks_that_are_not_there_are_absent():
    full = [[0, 2, 0, 4]]
    assert loaded_blocks(FULL, full, end=64, num_tokens=64) == ((2, -1, 4),)
    assert offered_blocks(HYBRID, [[0], [0], [1]], 16) == ((-1,), (-1,), (1,))


def test_a_producer_without_enough_blocks_offers_none():
    with pytest.raises(BlockIdsInvalid, match="48 tokens need 3 blocks, but the list has 2"):
        offered_blocks(FULL, [[1, 2]], 48)


@looped("name", ["r", "half of a character \ud83d"])
def test_orders_are_the_same_in_another_process(name):
    commands = [
        Hold(name, TICKET.grants[0]),
        Load(name, TICKET, ((1, -1), ())),
        RenewLeases(name, TICKET),
        Cancel(name),
        GiveBack(name, TICKET),
        Fail(name, "ticket_invalid", "why", "what to do"),
    ]
    packed = pack(commands)
    assert isinstance(packed, bytes) == (name == "r")
    assert unpack(pickle.loads(pickle.dumps(packed))) == commands


@looped("covered, matched", [(TOKENS_MAX, 32), (TOKENS_MAX + 1, 0), (1 << 40, 0)])
def test_of_what_is_longer_than_any_prompt_no_part_is_fetched(covered, matched):
    requests = Loading(FULL, TOKENS_MAX)
    ticket = new_ticket(num_tokens=48)
    longer = msgspec.structs.replace(ticket.grants[0], num_tokens=(covered,))
    found = Found("tcp://127.0.0.1:1", msgspec.structs.replace(ticket, grants=(longer,)), 32, 0.001)
    requests.fetch("r", found)
    assert requests.matched("r", 0) == matched
