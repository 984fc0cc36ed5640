"""vLLM's requests at the scheduler's side: what a client sends never raises, and a prompt is cut where it must be."""

from types import SimpleNamespace

import msgspec
import pytest

from kvflow.integrations.vllm.orders import Admit, Fail, Pull
from kvflow.integrations.vllm.scheduler import SchedulerSide
from kvflow.integrations.vllm.settings import EngineFacts, read_settings

from .vllm_like import (
    SECRET,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cache_config,
    group,
    new_ticket,
    rank_address,
)

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


def side(*specs, role="kv_both", met=True, lookahead=1):
    settings = read_settings({"cluster_secret": SECRET}, EngineFacts(engine_id="engine", kv_role=role))
    config = cache_config(*(group(spec, f"layer.{index}") for index, spec in enumerate(specs)))
    found = SchedulerSide(settings, SimpleNamespace(num_prefill_lookahead_tokens=lookahead), config)
    if met:
        found.meet_ranks([rank_address()])
    return found


def new_request(params, prompt=48, request_id="r", skips=False):
    tokens = list(range(prompt))
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        prompt_embeds=None,
        _all_token_ids=tokens.copy(),
        num_prompt_tokens=prompt,
        max_tokens=16,
        num_computed_tokens=prompt,
        num_in_flight_tokens=0,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        get_skip_reading_prefix_cache=lambda: skips,
    )


def finished(found, request, listed):
    request.num_computed_tokens = request.num_prompt_tokens
    return found.on_finished(request, listed)


def test_a_prefilled_request_is_offered_and_its_blocks_are_kept():
    producer = side(FullAttentionSpec())
    request = new_request(OFFER)
    producer.on_new_request(request)
    keep, params = finished(producer, request, ([1, 2, 3],))
    assert keep
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[1, 2, 3]], 48)
    (order,) = producer.take_orders()
    assert isinstance(order, Admit)
    assert order.grant.block_ids == ((1, 2, 3),)
    producer.offering.sent("r")


def test_ranks_that_have_slept_are_met_anew_and_what_they_had_offered_is_forgotten():
    producer = side(FullAttentionSpec())
    request = new_request(OFFER, request_id="before")
    producer.on_new_request(request)
    finished(producer, request, ([1, 2, 3],))
    (before,) = producer.take_orders()
    producer.meet_ranks([msgspec.structs.replace(rank_address(), incarnation="b" * 32)])
    producer.offering.sent("before")
    request = new_request(OFFER, request_id="after")
    producer.on_new_request(request)
    finished(producer, request, ([1, 2, 3],))
    (after,) = producer.take_orders()
    incarnations = [order.grant.ranks[0].incarnation for order in (before, after)]
    assert incarnations == [rank_address().incarnation, "b" * 32]


def test_a_consumer_reads_what_a_producer_has_answered():
    producer, consumer = side(FullAttentionSpec()), side(FullAttentionSpec())
    first, second = new_request(OFFER), new_request(None, request_id="s")
    producer.on_new_request(first)
    _, second.kv_transfer_params = finished(producer, first, ([1, 2, 3],))
    consumer.on_new_request(second)
    assert consumer.loading.matched("s", 0) == 48
    consumer.loading.allocated("s", [[7, 8, 9]], 48)
    (order,) = consumer.take_orders()
    assert (type(order), order.block_ids) == (Pull, ((7, 8, 9),))


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_an_aborted_request_is_not_offered(status):
    producer = side(FullAttentionSpec())
    request = new_request(OFFER)
    producer.on_new_request(request)
    request.status = SimpleNamespace(name=status)
    assert finished(producer, request, ([1, 2, 3],)) == (False, None)
    assert producer.take_orders() == []


def test_a_request_that_wants_nothing_is_left_alone():
    both = side(FullAttentionSpec())
    request = new_request(None)
    both.on_new_request(request)
    assert finished(both, request, ([1, 2, 3],)) == (False, None)
    assert both.take_orders() == []


def test_what_cannot_be_offered_is_computed_by_the_decode_engine():
    producer = side(FullAttentionSpec(), met=False)
    request = new_request(OFFER)
    producer.on_new_request(request)
    keep, params = finished(producer, request, ([1, 2, 3],))
    assert (keep, params["do_remote_prefill"]) == (False, False)


@pytest.mark.parametrize("specs", [(FullAttentionSpec(), MambaSpec()), (SlidingWindowSpec(), FullAttentionSpec())])
def test_the_last_token_is_left_to_decode_where_the_cache_moves_on(specs):
    producer, consumer = side(*specs), side(*specs)
    request = new_request(OFFER)
    prompt = request.prompt_token_ids
    producer.on_new_request(request)
    assert (request.num_prompt_tokens, len(request._all_token_ids), request.max_tokens) == (47, 47, 1)
    assert request.prompt_token_ids == prompt[:-1]
    assert len(prompt) == 48  # the caller's
    listed = ([1, 2, 3], [4] if isinstance(specs[1], MambaSpec) else [4, 5, 6])
    _, params = finished(producer, request, listed)
    assert params["remote_num_tokens"] == 47
    second = new_request(params, request_id="s")
    consumer.on_new_request(second)
    assert consumer.loading.matched("s", 0) == 47


def test_a_prompt_of_one_token_is_not_cut():
    producer = side(FullAttentionSpec(), MambaSpec())
    request = new_request(OFFER, prompt=1)
    producer.on_new_request(request)
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 16)


def test_a_prompt_that_is_not_read_from_caches_is_not_cut():
    producer = side(FullAttentionSpec(), MambaSpec())
    request = new_request(OFFER, skips=True)
    producer.on_new_request(request)
    assert request.num_prompt_tokens == 48


def test_tokens_that_a_draft_model_looks_ahead_are_left_to_decode():
    producer = side(FullAttentionSpec(), lookahead=4)
    request = new_request(OFFER)
    producer.on_new_request(request)
    assert request.num_prompt_tokens == 45


@pytest.mark.parametrize(
    ("role", "params"),
    [
        ("kv_both", "absurd"),
        ("kv_both", {"do_remote_prefill": True}),
        ("kv_both", {"do_remote_decode": "yes"}),
        ("kv_producer", {"do_remote_prefill": True, **new_ticket().to_params()}),
        ("kv_consumer", OFFER),
    ],
)
def test_a_request_that_is_refused_fails_by_itself(role, params):
    engine = side(FullAttentionSpec(), role=role)
    request = new_request(params)
    engine.on_new_request(request)
    assert request.kv_transfer_params == {}
    assert engine.loading.matched("r", 0) == 48
    engine.loading.allocated("r", [[1, 2, 3]], 48)
    (order,) = engine.take_orders()
    assert (type(order), order.code) == (Fail, "ticket_invalid")
    engine.loading.received("r")
    assert finished(engine, request, ([1, 2, 3],)) == (False, None)


def test_slots_are_given_back_when_the_workers_have_sent():
    producer = side(FullAttentionSpec())
    for number in range(9):  # one more than there are slots
        request = new_request(OFFER, request_id=f"r{number}")
        producer.on_new_request(request)
        keep, _ = finished(producer, request, ([1, 2, 3],))
        assert keep is (number < 8)
    producer.offering.sent("r0")
    request = new_request(OFFER, request_id="again")
    producer.on_new_request(request)
    assert finished(producer, request, ([1, 2, 3],))[0]
