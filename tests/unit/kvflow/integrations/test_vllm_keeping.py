"""Kept leases of the scheduler's side: what is kept, and that it ends when vLLM's block pool hands a block out.

``tests/vllm/test_keeping.py`` runs the same tests with vLLM's own block pool.
"""

import threading
from types import SimpleNamespace

import msgspec
import pytest

from kvflow.errors import CapacityExceeded
from kvflow.integrations.vllm.admission import Contact
from kvflow.integrations.vllm.messages import Hold, KeepBlocks, Reset
from kvflow.integrations.vllm.worker import RankWorker

from .test_vllm_worker import FakeWorker
from .vllm_like import (
    NUM_BLOCKS,
    OFFER,
    FullAttentionSpec,
    LikePool,
    MambaSpec,
    SlidingWindowSpec,
    await_jobs,
    counted,
    new_contents,
    new_request,
    rank_address,
    side,
    step_output,
)

SLOTS = rank_address().slots


@pytest.fixture
def new_pool():
    return LikePool


@pytest.fixture
def pool(new_pool):
    return new_pool()


def keeper(pool, *specs, **named):
    found = side(*(specs or [FullAttentionSpec()]), keep=True, **named)
    found.bind_pool(pool)
    return found


def filled(pool, number):
    """Take blocks from a pool and fill them."""
    blocks = pool.get_new_blocks(number)
    for block in blocks:
        if block.block_hash is None:
            pool.hash(block)
    return blocks


def end(found, pool, blocks, name="r", *, tokens=None, status="FINISHED_STOPPED", params=None, **named):
    """End a request as vLLM does: tell the connector, then free its blocks, the last one first."""
    groups = blocks if isinstance(blocks[0], list) else [blocks]
    request = new_request(params, 16 * len(groups[0]) if tokens is None else tokens, request_id=name, **named)
    found.on_new_request(request)
    request.status = SimpleNamespace(name=status)
    held, _ = found.on_finished(request, tuple([block.block_id if block else 0 for block in group] for group in groups))
    if not held:
        pool.free_blocks([block for group in groups for block in reversed(group) if block])
    return request


def commands(found):
    """Return the commands when all that was submitted is signed."""
    await_jobs(found)
    return found.take_commands()


def kept(found):
    """Return the names of the leases that ranks are told to hold."""
    return [each.request_id for each in commands(found) if isinstance(each, KeepBlocks)]


def test_the_whole_blocks_of_an_ended_request_are_kept(pool):
    found = keeper(pool)
    blocks = filled(pool, 3)
    found.on_scheduled(step_output({"r": 1}), 7)
    request = end(found, pool, blocks, tokens=47)
    assert found.keeping.is_signing
    (command,) = commands(found)
    assert not found.keeping.is_signing
    ids = tuple([block.block_id for block in blocks[:2]])
    grant = command.grant
    assert (command.request_id, grant.request_id, grant.kind) == ("kept:r", "kept:r", "kept")
    assert (grant.block_ids, grant.num_tokens, command.step) == ((ids,), (32,), 7)
    assert command.digests == new_contents().digests(request, (ids,), (16,), 32)
    assert [content.digests for content in grant.contents] == [command.digests[0][-1:]]


def test_no_step_without_tokens_is_waited_for(pool):
    found = keeper(pool)
    found.on_scheduled(step_output({"r": 1}), 7)
    found.on_scheduled(step_output({}), 8)  # while the device computes; vLLM 0.30 marks no end of it
    end(found, pool, filled(pool, 2))
    assert [command.step for command in commands(found)] == [7]


def test_what_a_step_in_flight_computes_is_not_kept(pool):
    found = keeper(pool)
    blocks = filled(pool, 3)
    request = new_request(None, 48)
    request.num_in_flight_tokens = 1
    found.on_new_request(request)
    found.on_finished(request, ([block.block_id for block in blocks],))
    (command,) = commands(found)
    assert command.grant.num_tokens == (32,)


def test_what_a_draft_model_has_not_computed_is_not_kept(pool):
    found = keeper(pool, lookahead=3)
    end(found, pool, filled(pool, 3), tokens=49)
    (command,) = commands(found)
    assert command.grant.num_tokens == (32,)


@pytest.mark.parametrize(
    ("status", "params", "is_kept"),
    [
        ("FINISHED_LENGTH_CAPPED", None, True),
        ("FINISHED_ABORTED", None, True),
        ("FINISHED_ABORTED", OFFER, True),
        ("FINISHED_STOPPED", OFFER, True),
        ("FINISHED_ERROR", None, False),
    ],
)
def test_requests_that_have_computed_something_right_are_kept(pool, status, params, is_kept):
    found = keeper(pool)
    end(found, pool, filled(pool, 2), status=status, params=params)
    told = [type(each) for each in commands(found)]
    assert (KeepBlocks in told, Hold in told) == (is_kept, params is not None and status == "FINISHED_STOPPED")


@pytest.mark.parametrize("computed", [-1, 0, 15])
def test_a_request_without_a_whole_block_is_not_kept(pool, computed):
    found = keeper(pool)
    request = new_request(None, 16)
    found.on_new_request(request)
    request.num_computed_tokens = computed
    assert found.on_finished(request, ([1],)) == (False, None)
    assert commands(found) == []


def test_nothing_is_kept_before_the_ranks_have_reported(pool):
    found = keeper(pool, met=False)
    end(found, pool, filled(pool, 2))
    assert (commands(found), found.keeping.is_signing) == ([], False)


def test_blocks_that_are_reused_first_are_not_kept(pool):
    found = keeper(pool)
    blocks = pool.get_new_blocks(2)
    pool.hash(blocks[0])
    end(found, pool, blocks)
    assert commands(found) == []


def test_the_last_token_of_an_answer_is_not_computed(pool):
    found = keeper(pool, lookahead=0)  # what vLLM says without a draft model
    blocks = pool.get_new_blocks(3)
    for block in blocks[:2]:
        pool.hash(block)
    end(found, pool, blocks, tokens=47)  # the 48th would end the third block
    (command,) = commands(found)
    assert command.grant.num_tokens == (32,)


def windowed(pool, cached):
    """Return a side that keeps windows of three blocks, and the blocks of a request, some cached.

    ``cached``: of each block of the window, whether vLLM has cached it; None: the request has it no more.
    """
    window = [None if each is None else pool.get_new_blocks(1)[0] for each in cached]
    for block, is_cached in zip(window, cached, strict=True):
        if is_cached:
            pool.hash(block)
    return keeper(pool, FullAttentionSpec(), SlidingWindowSpec(sliding_window=49)), filled(pool, len(cached)), window


@pytest.mark.parametrize(
    ("cached", "listed", "tokens"),
    [
        ((1, 1, 1, 1, 1, 1), "xxxxxx", 96),
        ((None, 1, 0, 1, 1, 1), "x-xxx", 96),
        ((None, 1, None, 1, 1, 1), "x-xxx", 96),
        ((0, 0, 1, 1, 1, 0), "xxx", 80),
        ((1, 1, 0, 1, 1, None), "xx", 32),
        ((None, 1, 1, 0, 1, 1), "", 0),
        ((None, None, 1, 1, 1), "xxx", 80),
        ((None, None, None, 1, 1), "", 0),
    ],
)
def test_a_window_lists_the_cached_blocks_up_to_where_all_of_it_is_there(pool, cached, listed, tokens):
    found, full, window = windowed(pool, cached)
    request = end(found, pool, [full, window])
    told = commands(found)
    assert len(told) == bool(tokens)
    for command in told:
        blocks, last = tokens // 16, window[tokens // 16 - len(listed) : tokens // 16]
        ids = tuple([block.block_id if each == "x" else -1 for block, each in zip(last, listed, strict=True)])
        assert command.grant.block_ids == (tuple([block.block_id for block in full[:blocks]]), ids)
        assert command.grant.num_tokens == (tokens, tokens)
        assert command.digests == new_contents().digests(request, command.grant.block_ids, (16, 16), tokens)


@pytest.mark.parametrize("at", range(6))
def test_a_lease_ends_with_the_first_of_its_blocks_also_of_a_window_before(pool, at):
    found, full, window = windowed(pool, [1] * 6)
    pool.touch([*full, *window[:at], *window[at + 1 :]])  # others still use them
    end(found, pool, [full, window])
    assert kept(found) == ["kept:r"]
    pool.get_new_blocks(len(pool.order()) - 1)
    assert found.keeping.take_revoked() == ()
    assert pool.get_new_blocks(1) == [window[at]]
    assert found.keeping.take_revoked() == ("kept:r",)


def begin(found, name, tokens, *groups, computed=0, count=None):
    """Have a request arrive and be scheduled, so far that its prompt is computed, with these blocks."""
    request = new_request(None, tokens, request_id=name)
    found.on_new_request(request)
    run(found, request, *groups, computed=computed, count=tokens - computed if count is None else count)
    return request


def run(found, request, *groups, computed, count):
    listed = tuple([[block.block_id if block else 0 for block in group] for group in groups])
    name = request.request_id
    output = step_output(
        {name: count}, {name: (computed, listed)} if not computed else {}, {name: (computed, None)} if computed else {}
    )
    output.kv_connector_block_state = SimpleNamespace(get_block_ids={name: listed}.get)
    found.on_scheduled(output, 1)


def finish(found, pool, request, *groups, tokens):
    """End a request that has computed so many tokens."""
    answered = new_request(None, tokens, request_id=request.request_id)
    answered.status = SimpleNamespace(name="FINISHED_STOPPED")
    found.on_finished(answered, tuple([block.block_id if block else 0 for block in group] for group in groups))
    pool.free_blocks([block for group in groups for block in reversed(group) if block])


def moved_on(pool, *, cached=6):
    """Return a side, a request whose window has moved on, its blocks of both groups, and those that it has no more."""
    found, full, window = windowed(pool, [1] * cached + [0] * (6 - cached))
    request = begin(found, "r", 96, full, window)
    groups = [*full, *filled(pool, 5)], [None] * 6 + filled(pool, 5)
    pool.free_blocks(reversed(window))
    return found, request, groups, window


def ids_of(blocks):
    return tuple([-1 if block is None else block.block_id for block in blocks])


def test_the_windows_of_a_prompt_are_kept_though_they_have_moved_on(pool):
    found, request, groups, window = moved_on(pool)
    order = pool.order()
    finish(found, pool, request, *groups, tokens=176)
    assert pool.order()[: len(order)] == order
    (command,) = commands(found)
    assert command.grant.block_ids[1] == ids_of([*window, *groups[1][6:]])
    pool.get_new_blocks(pool.order().index(window[-1].block_id))
    assert found.keeping.take_revoked() == ()
    pool.get_new_blocks(1)
    assert found.keeping.take_revoked() == ("kept:r",)


def test_a_window_that_has_moved_on_is_listed_no_more_once_it_is_reused(pool):
    found, request, groups, window = moved_on(pool)
    reuse(pool, window[4])  # the last one first
    finish(found, pool, request, *groups, tokens=176)
    (command,) = commands(found)
    assert command.grant.block_ids[1] == ids_of([*window[:4], None, None, *groups[1][6:]])


def test_what_another_request_has_put_into_a_window_is_not_listed(pool):
    found, request, groups, window = moved_on(pool)
    reuse(pool, window[0])
    for block in window:
        pool.hash(block)
    begin(found, "other", 96, groups[0][:6], window)
    finish(found, pool, request, *groups, tokens=176)
    (command,) = commands(found)
    assert command.grant.block_ids[1] == ids_of(groups[1][6:])


@pytest.mark.parametrize("cached", [0, 3, 6])
def test_of_a_prompt_only_what_is_cached_is_noted(pool, cached):
    found, request, groups, window = moved_on(pool, cached=cached)
    finish(found, pool, request, *groups, tokens=176)
    (command,) = commands(found)
    before = [*window[:cached], *[None] * (6 - cached)] if cached else []
    assert command.grant.block_ids[1] == ids_of([*before, *groups[1][6:]])


def test_a_prompt_is_noted_in_the_step_that_completes_it(pool):
    found, full, window = windowed(pool, [1] * 6)
    request = begin(found, "r", 96, full[:2], window[:2], count=32)
    run(found, request, full, window, computed=32, count=64)
    pool.free_blocks(window)
    finish(found, pool, request, [*full, *filled(pool, 5)], [None] * 6 + (last := filled(pool, 5)), tokens=176)
    (command,) = commands(found)
    assert command.grant.block_ids[1] == tuple([block.block_id for block in [*window, *last]])


@pytest.mark.parametrize("status", ["FINISHED_ERROR", "FINISHED_ABORTED"])
def test_nothing_of_an_ended_request_stays(pool, status):
    found, full, window = windowed(pool, [1] * 6)
    waiting = new_request(None, 32, request_id="waiting")
    found.on_new_request(waiting)
    for request in (begin(found, "r", 96, full, window), waiting):
        request.status = SimpleNamespace(name=status)
        found.on_finished(request, ([0] * 6, [0] * 6))
    assert (found.keeping._prompts, found.keeping._windows) == ({}, {})


def test_a_request_that_adds_no_window_takes_no_further_slot(pool):
    found, full, window = windowed(pool, [1] * 6)
    pool.touch([*full, *window[3:]])
    end(found, pool, [full, window], "first")
    end(found, pool, [full, [None] * 3 + window[3:]], "again")
    assert kept(found) == ["kept:first"]


def test_groups_with_blocks_of_several_sizes_are_kept_up_to_a_common_end(pool):
    found = keeper(pool, FullAttentionSpec(), FullAttentionSpec(block_size=64))
    end(found, pool, [filled(pool, 7), filled(pool, 2)], tokens=112)
    (command,) = commands(found)
    assert (command.grant.num_tokens, [len(ids) for ids in command.grant.block_ids]) == ((64, 64), [4, 1])


def test_a_request_that_extends_what_is_kept_replaces_it(pool):
    found = keeper(pool)
    first, other = filled(pool, 2), filled(pool, 2)
    end(found, pool, first, "first")
    end(found, pool, other, "other")
    assert kept(found) == ["kept:first", "kept:other"]
    pool.touch(first)
    end(found, pool, [*first, *filled(pool, 1)], "second")
    assert found.keeping.take_revoked() == ()  # not before its successor is held
    assert kept(found) == ["kept:second"]
    assert found.keeping.take_revoked() == ("kept:first",)
    pool.touch(first[:1])
    end(found, pool, [*first[:1], *filled(pool, 2)], "fork")
    assert kept(found) == ["kept:fork"]
    assert found.keeping.take_revoked() == ()
    assert [*found.keeping._entries] == ["kept:other", "kept:second", "kept:fork"]


def test_what_has_ended_is_not_replaced(pool):
    found = keeper(pool)
    first = filled(pool, 2)
    end(found, pool, first, "first")
    assert kept(found) == ["kept:first"]
    pool.touch(first)
    end(found, pool, [*first, *filled(pool, 1)], "second")
    found.on_refused(["kept:first"])
    assert found.keeping.take_revoked() == ("kept:first",)
    assert kept(found) == ["kept:second"]
    assert found.keeping.take_revoked() == ()


def test_a_window_that_has_moved_on_is_not_replaced(pool):
    found = keeper(pool, FullAttentionSpec(), SlidingWindowSpec(sliding_window=17))
    full, window = filled(pool, 2), filled(pool, 2)
    end(found, pool, [full, window], "first")
    assert kept(found) == ["kept:first"]
    pool.touch(full)
    end(found, pool, [[*full, *filled(pool, 1)], [None, None, *filled(pool, 1)]], "second")
    assert kept(found) == ["kept:second"]
    assert found.keeping.take_revoked() == ()


def reuse(pool, block):
    """Have the pool hand blocks out until it has handed one out."""
    while block not in pool.get_new_blocks(1):
        pass


@pytest.mark.parametrize(("number", "signed"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_a_shared_block_that_is_reused_ends_all_its_leases_signed_or_not(pool, number, signed):
    found = keeper(pool)
    shared, *own = filled(pool, 1 + number)
    names = [f"kept:{at}" for at in range(number)]
    signing = threading.Event()
    pool.touch(own)  # others still use them, so the shared block is reused first
    for at in range(number):
        if at:
            pool.touch([shared])
        if at == signed:
            told = kept(found)
            found.offering.submit(signing.wait)
        end(found, pool, [own[at], shared], str(at))
    if signed == number:
        told = kept(found)
    assert told == names[:signed]
    pool.free_blocks(own)
    pool.get_new_blocks(pool.order().index(shared.block_id))
    assert found.keeping.take_revoked() == ()
    reuse(pool, shared)
    assert sorted(found.keeping.take_revoked()) == names, "the next step writes the block"
    signing.set()
    assert kept(found) == []
    assert not found.keeping.is_signing
    pool.get_new_blocks(len(pool.order()))
    assert found.keeping.take_revoked() == (), "each ends once"


def test_a_block_is_watched_again_after_it_was_reused(pool):
    found = keeper(pool)
    end(found, pool, filled(pool, 2), "first")
    assert kept(found) == ["kept:first"]
    again = pool.get_new_blocks(NUM_BLOCKS - 1)[-2:]
    assert found.keeping.take_revoked() == ("kept:first",)
    for block in again:
        pool.hash(block)
    end(found, pool, again, "second")
    assert kept(found) == ["kept:second"]
    pool.get_new_blocks(1)
    assert found.keeping.take_revoked() == ("kept:second",)


def test_leases_with_other_blocks_outlive_a_shared_one_that_is_reused(pool):
    found = keeper(pool)
    both, later, *own = filled(pool, 5)
    end(found, pool, [own[0], both], "first")
    pool.touch([both])
    end(found, pool, [own[1], later, both], "second")
    pool.touch([later])
    end(found, pool, [own[2], later], "third")
    reuse(pool, both)
    assert sorted(found.keeping.take_revoked()) == ["kept:first", "kept:second"]
    assert kept(found) == ["kept:third"]
    reuse(pool, later)
    assert found.keeping.take_revoked() == ("kept:third",)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_request_that_is_kept_again_has_the_lease_of_its_new_blocks_only(pool, is_signed):
    found = keeper(pool)
    shared, old, new, beside = filled(pool, 4)
    signing = threading.Event()
    end(found, pool, [old, shared], "r")
    pool.touch([shared])
    end(found, pool, [beside, shared], "beside")
    if is_signed:
        assert kept(found) == ["kept:r", "kept:beside"]
    found.offering.submit(signing.wait)
    end(found, pool, [new], "r")
    assert found.keeping.take_revoked() == ("kept:r",), "before the ranks hold the other"
    reuse(pool, shared)
    assert found.keeping.take_revoked() == ("kept:beside",)
    signing.set()
    [again] = [each for each in commands(found) if isinstance(each, KeepBlocks)]
    assert (again.request_id, again.grant.block_ids) == ("kept:r", ((new.block_id,),))
    reuse(pool, new)
    assert found.keeping.take_revoked() == ("kept:r",)


def test_a_request_that_adds_nothing_takes_no_further_slot(pool):
    found = keeper(pool)
    blocks = filled(pool, 2)
    end(found, pool, blocks, "first")
    pool.touch(blocks)
    end(found, pool, blocks, "again")
    assert kept(found) == ["kept:first"]


def test_the_oldest_leases_end_when_there_is_no_slot(pool):
    found = keeper(pool)
    names = [f"r{number}" for number in range(SLOTS + 3)]
    for name in names:
        end(found, pool, filled(pool, 2), name)
    assert found.keeping.take_revoked() == tuple([f"kept:{name}" for name in names[:3]])
    assert kept(found) == [f"kept:{name}" for name in names[3:]]


@pytest.mark.parametrize("refusing", [[0], [1], [0, 1]])
def test_a_lease_that_one_rank_refuses_ends_on_all(pool, refusing):
    found, fakes = keeper(pool), [FakeWorker(rank) for rank in range(2)]
    ranks = [RankWorker(fake) for fake in fakes]
    shared, *own = filled(pool, 3)
    end(found, pool, [own[0], shared], "r")
    pool.touch([shared])
    end(found, pool, [own[1], shared], "other")
    for rank in refusing:
        fakes[rank].refusal = CapacityExceeded("leases", 8)
    signed = commands(found)
    for rank in ranks:
        rank.execute(signed[:1])
    for fake in fakes:
        fake.refusal = None
    for rank in ranks:
        rank.execute(signed[1:])
    found.on_refused([name for rank in ranks for name in rank.take_refused()])
    gone = found.keeping.take_revoked()
    assert gone == ("kept:r",)
    for rank in ranks:
        rank.revoke(gone)
    assert all(fake.revoked[-1] == "kept:r" for fake in fakes)
    assert [[each.request_id for each in fake.admitted] for fake in fakes] == [
        ["kept:other"] if rank in refusing else ["kept:r", "kept:other"] for rank in range(2)
    ]
    pool.touch([own[0], shared])
    end(found, pool, [own[0], shared], "r")
    assert kept(found) == ["kept:r"], "it is kept again"
    reuse(pool, shared)
    assert sorted(found.keeping.take_revoked()) == ["kept:other", "kept:r"]


def test_a_rank_may_refuse_what_is_not_kept_any_longer(pool):
    found = keeper(pool)
    blocks = filled(pool, 2)
    end(found, pool, blocks, "r")
    assert kept(found) == ["kept:r"]
    reuse(pool, blocks[0])
    assert found.keeping.take_revoked() == ("kept:r",)
    found.on_refused(["kept:r", "kept:of nobody"])
    assert found.keeping.take_revoked() == ()
    assert counted(found, "defects") == {}


def test_a_lease_that_cannot_be_signed_is_forgotten(pool):
    found = keeper(pool)
    blocks = filled(pool, 2)
    end(found, pool, blocks, "r" * 300)  # no name of a lease is as long
    assert (kept(found), found.keeping.take_revoked(), found.keeping.is_signing) == ([], (), False)
    pool.touch(blocks)
    end(found, pool, blocks, "r")
    assert kept(found) == ["kept:r"]


def test_a_lease_that_nobody_signs_is_not_waited_for(pool, monkeypatch):
    def fails(*_):
        raise RuntimeError("can't start new thread")

    found = keeper(pool)
    with monkeypatch.context() as patch:
        patch.setattr(found.offering, "submit", fails)
        end(found, pool, filled(pool, 2))
    assert not found.keeping.is_signing, "vLLM would take steps without end"
    assert counted(found, "defects") == {"_keep": 1}


def test_a_reset_ends_all_leases_at_once(pool):
    found = keeper(pool)
    found.meet_ranks([rank_address()], [Contact("on another host", "", bytes(32))])
    end(found, pool, filled(pool, 2))
    assert kept(found) == ["kept:r"]
    assert not found.end_kept(), "the rank learns of it with the next step"
    assert found.keeping.take_revoked() == ("kept:r",), "before that step writes: a GPU executes commands after that"
    assert pool.reset_prefix_cache()
    assert [(type(each), each.void) for each in found.take_commands()] == [(Reset, ("kept:r",))]
    assert found.end_kept()


def test_ranks_that_slept_hold_none_of_the_leases_before(pool):
    found = keeper(pool)
    end(found, pool, filled(pool, 2), "before")
    found.meet_ranks([msgspec.structs.replace(rank_address(), incarnation="b" * 32)])
    assert commands(found) == []
    end(found, pool, filled(pool, 2), "after")
    (command,) = commands(found)
    assert (command.request_id, command.grant.ranks[0].incarnation) == ("kept:after", "b" * 32)


def test_an_engine_that_does_not_keep_watches_no_block(pool):
    found = side(FullAttentionSpec())
    found.bind_pool(pool)
    end(found, pool, filled(pool, 2))
    assert commands(found) == []


@pytest.mark.parametrize(
    ("specs", "engine", "reason"),
    [
        ((FullAttentionSpec(), MambaSpec()), {}, "states"),
        ((FullAttentionSpec(),), {"hisparse_host_num_blocks": 8}, "HiSparse"),
        ((FullAttentionSpec(),), {"needs_kv_cache_zeroing": True}, "clears new blocks"),
        ((FullAttentionSpec(),), {"enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_an_engine_that_cannot_keep_says_why_once(pool, caplog, specs, engine, reason):
    found = keeper(pool, *specs, engine=engine)
    (line,) = [each.getMessage() for each in caplog.records if "keeps no blocks" in each.getMessage()]
    assert reason in line
    end(found, pool, [filled(pool, 2) for _ in specs])
    assert commands(found) == []


@pytest.mark.parametrize(("interval", "told"), [(0, True), (16, False), (None, False)])
@pytest.mark.parametrize("windows", [True, False])
def test_an_engine_whose_answers_are_not_kept_says_so(caplog, interval, told, windows):
    specs = [FullAttentionSpec(), SlidingWindowSpec()] if windows else [FullAttentionSpec()]
    side(*specs, keep=True, engine={"prefix_cache_retention_interval": interval})
    lines = [
        each.getMessage() for each in caplog.records if "--prefix-cache-retention-interval 16" in each.getMessage()
    ]
    assert len(lines) == (told and windows)
