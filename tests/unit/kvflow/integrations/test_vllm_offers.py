"""Which requests of a prefill engine are offered: one of several samples, the first of several prompts, or all."""

import re
from types import SimpleNamespace

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.messages import Hold

from .vllm_like import (
    ABORTED,
    NUM_BLOCKS,
    OFFER,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    counted,
    new_contents,
    new_request,
    side,
)


class Prefill:
    """A prefill engine that is asked and told, and the leases that it holds."""

    def __init__(self, *specs, params=OFFER, **settings):
        self.side = side(*(specs or (FullAttentionSpec(),)), **settings)
        self.params = params
        self.held = set()
        self.requests = {}

    def arrive(self, *names, **named):
        for name in names:
            self.requests[name] = new_request(self.params, request_id=name, **named)
            self.side.on_new_request(self.requests[name])

    def end(self, name, blocks=(1, 2, 3), *, made=0, status=None):
        """End a request that has made some tokens of which the last is not computed; return its parameters."""
        request = self.requests.pop(name)
        request.num_computed_tokens = request.num_prompt_tokens + made
        request.all_token_ids.extend(range(made + 1))
        request.status = status or request.status
        keeps, params = self.side.on_finished(request, (list(blocks),))
        admitted = [command.request_id for command in self.side.take_commands() if isinstance(command, Hold)]
        assert admitted == ([name] if keeps else [])
        self.held |= set(admitted)
        return params

    def sent(self, name):
        self.held.remove(name)
        self.side.on_reported(None, {name})


SAMPLES = [f"{number}_cmpl-x-0-01234567" for number in range(4)]


def test_a_sample_that_arrives_behind_the_ticket_answers_the_same_one():
    prefill = Prefill()
    prefill.arrive(SAMPLES[0])
    first = prefill.end(SAMPLES[0])
    prefill.arrive(*SAMPLES[1:])
    assert [prefill.end(name) for name in SAMPLES[1:]] == [None, None, first]
    assert prefill.held == {SAMPLES[0]}


def test_a_sample_that_ends_behind_the_lease_is_offered_itself():
    prefill = Prefill()
    prefill.arrive(SAMPLES[0])
    first = prefill.end(SAMPLES[0])
    prefill.sent(SAMPLES[0])
    prefill.arrive(SAMPLES[1])
    assert prefill.end(SAMPLES[1])["kvflow"] != first["kvflow"]
    assert prefill.held == {SAMPLES[1]}


@pytest.mark.parametrize("aborted", range(4))
def test_samples_that_are_aborted_leave_one_ticket_at_most(aborted):
    prefill = Prefill()
    prefill.arrive(*SAMPLES)
    answered = [prefill.end(name, status=ABORTED if number == aborted else None) for number, name in enumerate(SAMPLES)]
    # vLLM answers what the last one says: a ticket, unless that one was aborted.
    assert [params is not None for params in answered] == [False, False, False, aborted != 3]
    assert len(prefill.held) == (aborted != 3)


def test_samples_of_other_requests_are_offered_beside_them():
    prefill = Prefill()
    prefill.arrive(*SAMPLES, "0_cmpl-x-0-89abcdef", "cmpl-x-0-fedcba98", "chatcmpl-1-01234567")
    for name in ("0_cmpl-x-0-89abcdef", "cmpl-x-0-fedcba98", "chatcmpl-1-01234567"):
        assert prefill.end(name)["remote_request_id"] == name


def test_a_ticket_of_samples_holds_the_prompt_and_no_sample():
    prefill = Prefill()
    prefill.arrive(*SAMPLES[:2])
    prefill.end(SAMPLES[0], [1, 2, 3, 4], made=16)
    params = prefill.end(SAMPLES[1], [5, 6, 7, 8], made=16)
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (48, [[7]])


def test_a_ticket_of_one_sample_holds_what_it_has_made():
    prefill = Prefill()
    prefill.arrive("cmpl-x-0-01234567")
    assert prefill.end("cmpl-x-0-01234567", [1, 2, 3, 4], made=16)["remote_num_tokens"] == 64


@pytest.mark.parametrize("early", [True, False])
def test_of_several_prompts_the_first_one_is_offered(early):
    prefill = Prefill()
    prompts = [f"cmpl-x-{number}-0123456{number}" for number in range(3)]
    prefill.arrive(prompts[0])
    first = prefill.end(prompts[0]) if early else None
    prefill.arrive(*prompts[1:])
    assert [prefill.end(name) for name in prompts[1:]] == [None, None]
    first = first or prefill.end(prompts[0])
    assert first["remote_request_id"] == prompts[0]
    assert prefill.held == {prompts[0]}


def test_of_several_prompts_with_samples_one_ticket_is_out():
    prefill = Prefill()
    names = [f"{sample}_cmpl-x-{prompt}-0123456{prompt}" for prompt in range(2) for sample in range(2)]
    prefill.arrive(*names)
    assert [prefill.end(name) is None for name in names] == [True, False, True, True]
    assert prefill.held == {names[1]}


def test_a_number_in_the_name_of_a_request_is_none_of_a_prompt():
    prefill = Prefill()
    prefill.arrive("cmpl-x-1-01234567", "cmpl-x-2-01234567")  # there is no cmpl-x-0
    assert prefill.end("cmpl-x-1-01234567")["remote_request_id"] == "cmpl-x-1-01234567"
    assert prefill.end("cmpl-x-2-01234567")["remote_request_id"] == "cmpl-x-2-01234567"


def test_nothing_is_remembered_of_requests_that_have_ended():
    prefill = Prefill()
    prefill.arrive(*SAMPLES, "cmpl-y-0-01234567", "cmpl-y-1-01234567", "cmpl-z-0-01234567")
    for name in [*SAMPLES, "cmpl-y-1-01234567", "cmpl-y-0-01234567"]:
        prefill.end(name)
    prefill.end("cmpl-z-0-01234567", status=ABORTED)
    for name in list(prefill.held):
        prefill.sent(name)
    offering = prefill.side.offering
    assert not any((offering._wanted, offering._held, offering._answered))


# Offers that no client asked for.


def always(*specs, params=None, **settings):
    return Prefill(*specs, params=params, role="kv_producer", offer="always", **settings)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (None, {"max_tokens": 2}),
        (None, {"max_tokens": 1, "pooling_params": object()}),
        ({"do_remote_decode": False}, {"max_tokens": 1}),
        ({"do_remote_prefill": False, "do_remote_decode": False}, {"max_tokens": 1}),
    ],
)
def test_what_is_no_prefill_or_declines_is_neither_offered_nor_cut(params, named):
    prefill = always(FullAttentionSpec(), MambaSpec(), params=params)
    prefill.arrive("r", **named)
    assert prefill.requests["r"].num_prompt_tokens == 48
    assert prefill.requests["r"].max_tokens == named["max_tokens"]
    assert prefill.end("r") is None


def test_without_the_setting_nothing_is_offered_that_nobody_asked_for():
    prefill = Prefill(params=None, role="kv_producer")
    prefill.arrive("r", max_tokens=1)
    assert prefill.end("r") is None


@pytest.mark.parametrize("spec", [MambaSpec(), SlidingWindowSpec()])
def test_a_prefill_that_nobody_asked_for_leaves_the_last_token_to_decode(spec):
    prefill = always(spec)
    prefill.arrive("r", max_tokens=1)
    assert prefill.requests["r"].num_prompt_tokens == 47


def offered(prefill, name, first, num_blocks):
    """Prefill a prompt into blocks of these numbers, and tell whether it is offered."""
    prefill.arrive(name, max_tokens=1, prompt=num_blocks * 16)
    return prefill.end(name, range(first, first + num_blocks))["do_remote_prefill"]


def test_offers_that_nobody_asked_for_hold_half_of_the_blocks(caplog):
    prefill, half = always(), NUM_BLOCKS // 2
    assert offered(prefill, "first", 1, half - 2)
    assert offered(prefill, "last", half - 1, 2)
    assert not offered(prefill, "more", half + 1, 1)
    assert not offered(prefill, "again", half + 1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once
    assert f"hold {half} of at most {half} blocks, and 2 leases" in caplog.text
    assert offered(prefill, "shared", 1, 16)  # the prefix cache holds these already
    prefill.sent("last")
    assert not offered(prefill, "wide", half + 1, 3)
    assert offered(prefill, "narrow", half + 1, 2)
    prefill.sent("first")  # and 16 of its blocks are still held by another
    assert not offered(prefill, "fifteen", half + 3, 15)
    assert offered(prefill, "fourteen", half + 3, 14)
    for name in list(prefill.held):
        prefill.sent(name)
    assert not offered(prefill, "beyond", 1, half + 1)
    assert offered(prefill, "whole", 1, half)


def test_offers_that_nobody_asked_for_hold_half_of_the_slots():
    prefill = always()
    assert [offered(prefill, f"r{number}", 1, 1) for number in range(6)] == [True] * 4 + [False] * 2
    prefill.params = OFFER  # what was asked for takes the other half
    assert [offered(prefill, f"asked-{number}", 1, 40) for number in range(5)] == [True] * 4 + [False]
    prefill.params = None
    prefill.sent("r0")
    assert offered(prefill, "next", 1, 1)


def test_an_offer_that_fails_holds_nothing_of_the_share():
    prefill = always()
    for number in range(4):
        prefill.arrive(f"r{number}", max_tokens=1)
        prefill.end(f"r{number}", [1])  # too few blocks for the prompt
    prefill.arrive("r", max_tokens=1)
    assert prefill.end("r")["do_remote_prefill"]


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_an_engine_that_clients_ask_does_not_offer_always(role):
    with pytest.raises(ConfigInvalid, match="kv_role"):
        side(FullAttentionSpec(), role=role, offer="always")


# Requests of which no router has said anything.

LOGGER = "vllm.kvflow"


def messages(caplog):
    return [(record.levelname, record.message) for record in caplog.records]


def ask(engine, count, params=None, **named):
    for number in range(count):
        engine.on_new_request(new_request(params, request_id=f"r{number}", **named))


@pytest.mark.parametrize(
    ("role", "lack", "remedy"),
    [
        ("kv_producer", "has asked for a ticket (", True),
        ("kv_consumer", "has brought a ticket (", False),
        ("kv_both", "has asked for a ticket or brought a ticket (", False),
    ],
)
def test_an_engine_whose_first_requests_carry_nothing_says_so_once(role, lack, remedy, caplog):
    engine = side(FullAttentionSpec(), role=role)
    ask(engine, 19)
    assert not caplog.records
    ask(engine, 100)
    [(level, text)] = messages(caplog)
    assert level == "WARNING"
    assert lack in text
    for setting in ("--vllm-pd-disaggregation", "kv_connector=NixlConnector", "build_pd_openai_app", "kvflow proxy"):
        assert setting in text
    assert ('set "offer": "always"' in text) is remedy
    assert counted(engine, "untagged") == {"absent": 119}
    assert counted(engine, "untagged") == {}


@pytest.mark.parametrize(
    "params", [OFFER, {"do_remote_prefill": False}, {"do_remote_decode": False}, {"do_remote_prefill": "odd"}, "odd"]
)
def test_an_engine_that_sees_parameters_now_and_then_says_nothing(params, caplog):
    engine = side(FullAttentionSpec())
    ask(engine, 19)
    for _ in range(2):
        ask(engine, 1, params)
        ask(engine, 99)
    assert not [text for _, text in messages(caplog) if "none of the last" in text]
    declines = isinstance(params, dict) and not any(params.values())
    assert counted(engine, "untagged") == {"absent": 217} | ({"decline": 2} if declines else {})


def test_keys_of_another_protocol_are_named(caplog):
    engine = side(FullAttentionSpec())
    ask(engine, 1, {"do_remote_offloading": True, "x" * 1000: 1, **dict.fromkeys(range(100))})
    ask(engine, 1, OFFER)  # what came before is forgotten
    ask(engine, 50, {"role": "prefill", "x" * 1000: 1, **dict.fromkeys(range(100))})
    ask(engine, 50)
    [(_, text)] = messages(caplog)
    assert f"; one of them had other keys: 'role', '{'x' * 40}', '0', '1', '2', '3', '4', '5')" in text


@pytest.mark.parametrize(
    ("params", "kind", "told"), [(OFFER, "DELTA", 1), (OFFER, "FINAL_ONLY", 0), (OFFER, None, 0), (None, "DELTA", 0)]
)
def test_a_streamed_answer_that_has_no_ticket_is_named_once(params, kind, told, caplog):
    engine = side(FullAttentionSpec())
    with caplog.at_level("INFO", logger=LOGGER):
        ask(engine, 3, params, sampling_params=kind and SimpleNamespace(output_kind=SimpleNamespace(name=kind)))
    assert len([text for _, text in messages(caplog) if '"stream": false' in text]) == told


def test_a_router_that_stops_to_ask_is_named_each_time(caplog):
    engine = side(FullAttentionSpec())
    with caplog.at_level("INFO", logger=LOGGER):
        ask(engine, 25)
        ask(engine, 3, OFFER)
        ask(engine, 250)
        ask(engine, 3, OFFER)
        ask(engine, 99)
    assert [level for level, _ in messages(caplog)] == ["WARNING", "INFO"] * 2
    texts = [text for _, text in messages(caplog)]
    assert [int(re.search("the last ([0-9]+) requests", text)[1]) for text in texts[::2]] == [20, 100]
    assert [text.partition("arrived, ")[2] for text in texts[1::2]] == ["after 25 without", "after 250 without"]


def test_an_engine_that_offers_always_need_not_be_asked(caplog):
    engine = side(FullAttentionSpec(), role="kv_producer", offer="always")
    ask(engine, 100)
    assert not caplog.records
    assert counted(engine, "untagged") == {"absent": 100}


def test_a_request_that_the_server_has_turned_down_does_not_count():
    engine = side(FullAttentionSpec())
    ask(engine, 3, abort_immediately=True)
    assert counted(engine, "untagged") == {}


def test_prompts_that_differ_in_their_second_picture_have_other_digests():
    one, other = (
        new_contents().digests(new_request(None, media=((1, "a"), (17, second))), [(1, 2, 3)], [16], 48)[0]
        for second in "bc"
    )
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]
