"""vLLM's requests at the scheduler's side: what a client sends never raises, and a prompt is cut where it must be."""

from types import SimpleNamespace

import msgspec
import pytest

from kvflow import Ticket
from kvflow.integrations.vllm.messages import Cancel, Fail, GiveBack, Hold, Load, Reset
from tests.helpers.loops import looped

from .vllm_like import (
    OFFER,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    blocks_of,
    counted,
    matched,
    new_mint,
    new_request,
    new_ticket,
    offered,
    rank_address,
    scheduled,
    side,
)

LOAD = {"do_remote_prefill": True}

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_prefilled_request_is_offered_and_its_blocks_are_kept():
    producer = side(FullAttentionSpec())
    keep, params = offered(producer)
    assert keep
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[3]], 48)
    (command,) = producer.take_commands()
    assert isinstance(command, Hold)
    assert command.grant.block_ids == ((1, 2, 3),)
    producer.on_reported(None, {"r"})


@looped(
    "headers, carried",
    [
        ({"traceparent": TRACEPARENT, "tracestate": "x=y"}, TRACEPARENT),
        ({"traceparent": TRACEPARENT + "-more"}, ""),
        ({"traceparent": ["x"]}, ""),
        ({"tracestate": "x=y"}, ""),
        (None, ""),
    ],
)
def test_the_trace_of_a_request_is_in_its_ticket(headers, carried):
    producer = side(FullAttentionSpec())
    assert offered(producer, trace_headers=headers)[0]
    (command,) = producer.take_commands()
    assert command.grant.trace == carried


def test_ranks_that_slept_are_redialed_and_their_offers_are_forgotten():
    producer = side(FullAttentionSpec())
    offered(producer, "before")
    (before,) = producer.take_commands()
    producer.meet_ranks([msgspec.structs.replace(rank_address(), incarnation="b" * 32)])
    producer.on_reported(None, {"before"})
    offered(producer, "after")
    (after,) = producer.take_commands()
    incarnations = [command.grant.ranks[0].incarnation for command in (before, after)]
    assert incarnations == [rank_address().incarnation, "b" * 32]


def test_what_cannot_be_offered_is_computed_by_the_decode_engine():
    keep, params = offered(side(FullAttentionSpec(), met=False))
    assert (keep, params["do_remote_prefill"]) == (False, False)


@pytest.mark.parametrize("specs", [(FullAttentionSpec(), MambaSpec()), (SlidingWindowSpec(), FullAttentionSpec())])
def test_the_last_token_is_left_to_decode_where_the_cache_moves_on(specs):
    producer, consumer = side(*specs), side(*specs)
    request = new_request(OFFER, request_id="cut")
    prompt = request.prompt_token_ids
    producer.on_new_request(request)
    assert (request.num_prompt_tokens, len(request._all_token_ids), request.max_tokens) == (47, 47, 1)
    assert request.prompt_token_ids == prompt[:-1]
    assert len(prompt) == 48  # the caller's
    listed = ([1, 2, 3], [4] if isinstance(specs[1], MambaSpec) else [4, 5, 6])
    _, params = offered(producer, listed=listed)
    assert params["remote_num_tokens"] == 47
    second = new_request(params, request_id="s")
    consumer.on_new_request(second)
    assert consumer.matched(second, 0) == (47, True)


@looped("named, left", [({"prompt": 1}, 1), ({"skips": True}, 48)])
def test_a_prompt_of_one_token_or_not_read_from_caches_is_not_cut(named, left):
    request = new_request(OFFER, **named)
    side(FullAttentionSpec(), MambaSpec()).on_new_request(request)
    assert (request.num_prompt_tokens, request.max_tokens) == (left, 1)


def test_a_prefill_makes_one_token_on_every_kind_of_model():
    for specs in [(FullAttentionSpec(),), (FullAttentionSpec(), MambaSpec()), (SlidingWindowSpec(),)]:
        producer = side(*specs)
        for params, most in [(OFFER, 1), ({"do_remote_decode": False}, 16), (None, 16)]:
            request = new_request(params)
            producer.on_new_request(request)
            assert request.max_tokens == most


@pytest.mark.proves("draft models", engine="stand-in")
def test_tokens_that_a_draft_model_looks_ahead_are_left_to_decode():
    producer = side(FullAttentionSpec(), lookahead=4)
    request = new_request(OFFER)
    producer.on_new_request(request)
    assert request.num_prompt_tokens == 45


@looped(
    "role, params",
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
    assert engine.matched(request, 0) == (48, True)
    engine.allocated(request, blocks_of([1, 2, 3]), 48)
    command = engine.take_commands()[-1]
    assert (type(command), command.code) == (Fail, "ticket_invalid")
    engine.on_reported({"r"}, None)
    assert engine.on_finished(request, ([1, 2, 3],)) == (False, None)


# What a ticket's blocks hold.

ADAPTER = {"lora": "sql"}
PICTURE = {"media": ((17, "a picture"),)}
SALT = {"cache_salt": "mine"}


def prefilled(spec=None, **named):
    """Return the parameters that a producer answers."""
    return offered(side(spec or FullAttentionSpec()), **named)[1]


def outcome(params, spec=None, **named):
    """Code of the error with which a consumer refuses a request, empty if it loads; whether its ticket is returned."""
    consumer = side(spec or FullAttentionSpec())
    scheduled(consumer, params, **named)
    commands = consumer.take_commands()
    return commands[-1].code if isinstance(commands[-1], Fail) else "", GiveBack in map(type, commands)


@looped("theirs, ours", [({}, {"prompt": range(1, 49)}), (SALT, {}), (ADAPTER, {"lora": "xml"}), ({}, PICTURE)])
def test_a_ticket_of_something_else_is_refused_and_given_back(theirs, ours):
    assert outcome(prefilled(**theirs), **ours) == ("content_mismatch", True)


def test_engines_with_other_block_sizes_agree_about_a_prompt():
    params = prefilled(FullAttentionSpec(block_size=16))
    assert outcome(params, FullAttentionSpec(block_size=64)) == ("", False)
    assert outcome(params, FullAttentionSpec(block_size=64), prompt=range(1, 49)) == ("content_mismatch", True)


def test_a_ticket_that_does_not_say_what_its_blocks_hold_is_refused():
    ticket, _ = new_mint().offer("r", block_ids=[[1, 2, 3]], num_tokens=48)
    assert outcome({"do_remote_prefill": True, **ticket.to_params()}) == ("content_mismatch", True)


def test_only_the_first_prompt_of_a_call_reads_the_ticket():
    params, consumer = prefilled(), side(FullAttentionSpec())
    for number, prompt in enumerate((range(48), range(1, 49), range(48))):
        request = new_request(params, prompt, request_id=f"cmpl-call-{number}-0123abcd")
        consumer.on_new_request(request)
        assert consumer.matched(request, 0)[0] == (0 if number else 48)
        assert request.kv_transfer_params == ({} if number else params)
    assert counted(consumer, "untagged") == {"another_prompt": 2}
    assert GiveBack not in map(type, consumer.take_commands())


def test_a_ticket_that_another_request_loads_is_not_released():
    params, consumer = prefilled(), side(FullAttentionSpec())
    honest, other = new_request(params), new_request(params, range(1, 49), request_id="other")
    consumer.on_new_request(honest)
    consumer.on_new_request(other)
    consumer.matched(honest, 0)
    consumer.allocated(honest, blocks_of([7, 8, 9]), 48)
    assert [type(command) for command in consumer.take_commands()] == [Load]


def test_a_request_that_the_server_rejects_releases_its_ticket(caplog):
    consumer = side(FullAttentionSpec())
    request = new_request(prefilled(), prompt=[0], abort_immediately=True)
    consumer.on_new_request(request)
    assert consumer.on_finished(request, ([],)) == (False, None)
    assert [type(command) for command in consumer.take_commands()] == [GiveBack]
    assert not caplog.records


def test_a_field_that_a_router_writes_is_told_once_in_a_process(caplog):
    params, consumer = prefilled(), side(FullAttentionSpec())
    with caplog.at_level("INFO", logger="vllm.kvflow"):
        for number, host in enumerate(("10.0.0.1", "10.0.0.2")):
            consumer.on_new_request(new_request(params | {"remote_host": host}, request_id=f"r{number}"))
            assert consumer.loading.matched("r0", 0) == 48
    assert [record.message for record in caplog.records].count(
        "kvflow: a router has rewritten remote_host in kv_transfer_params. kvflow ignores it and uses the ticket"
    ) == 1


# What a client chooses, and how long it may be.

HOSTILE = "\x1b[2J\n" + "x" * 1_000_000


def hint(endpoint):
    payload = {"source_control_endpoint": endpoint}
    return {"actions": [{"action_type": "kv.fetch", "action_version": "1.0", "payload": payload}]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"remote_host": HOSTILE},
        {"remote_host": HOSTILE[:255]},
        {"remote_port": HOSTILE},
        {"remote_port": 10**5000},
        {"remote_port": {HOSTILE: HOSTILE}},
        {"remote_engine_id": HOSTILE, "remote_request_id": HOSTILE},
        {"kvflow": HOSTILE},
        {"kvflow": "kvf3." + HOSTILE},
        {"kvflow": {HOSTILE: HOSTILE}},
        {HOSTILE: HOSTILE},
        {"do_remote_prefill": HOSTILE},
        {"do_remote_decode": HOSTILE},
        {"kv_hint": hint(HOSTILE), "remote_kv_source": {"remote_host": HOSTILE, "remote_port": HOSTILE}},
        new_ticket().to_params() | {"remote_host": HOSTILE, "remote_port": 7, "tp_size": HOSTILE},
        new_ticket(prompt=range(7, 100)).to_params(),
        OFFER | {"do_remote_prefill": False, "remote_engine_id": HOSTILE},
        OFFER | {"kv_hint": hint(HOSTILE), "do_remote_prefill": None},
        HOSTILE,
        {"do_remote_prefill": None, "kv_hint": hint(HOSTILE)},
    ],
)
@pytest.mark.parametrize("name", ["r", HOSTILE, f"0_{HOSTILE}"], ids=["r", "hostile", "sample"])
def test_what_a_client_chooses_is_logged_in_short_and_goes_to_no_rank(changes, name, caplog):
    caplog.set_level("DEBUG", "vllm.kvflow")
    address = {"rendezvous_from": ["tcp://127.0.0.1:1"], "sources": ["tcp://127.0.0.1:1"]}
    found = side(FullAttentionSpec(), **address, rendezvous_s=0.001, connect_s=0.001)
    named = {"remote_host": "127.0.0.9", "remote_port": 1}
    params = {"do_remote_prefill": True} | named | changes if isinstance(changes, dict) else changes
    request = new_request(params, request_id=name, trace_headers={"traceparent": HOSTILE})
    found.on_new_request(request)
    num_tokens, _ = matched(found, request)
    found.allocated(request, blocks_of([1, 2, 3]), num_tokens)
    found.on_finished(request, ([1, 2, 3],))
    found.close()
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 1024
    assert "x" * 257 not in caplog.text
    for command in found.take_commands():
        texts = [text for text in msgspec.structs.astuple(command)[1:] if isinstance(text, str)]
        assert all(len(text) < 1024 and text.isprintable() for text in texts)


# What nobody has foreseen.


class Broken:
    """Fails, whatever is asked of it."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


UNFORESEEN = [MemoryError(), RecursionError("deep"), OverflowError("large"), KeyError("r"), ValueError("x" * 500)]


@pytest.fixture(params=UNFORESEEN, ids=lambda error: type(error).__name__)
def broken(request):
    return Broken(request.param)


def test_a_request_that_cannot_be_read_fails_and_the_next_is_served(broken, caplog):
    params, engine = prefilled(), side(FullAttentionSpec())
    contents, engine._contents = engine._contents, broken
    for name in ("r", "s"):
        assert scheduled(engine, params, name).kv_transfer_params == {}
    assert [command.code for command in engine.take_commands() if isinstance(command, Fail)] == ["defect_found"] * 2
    assert counted(engine, "defects") == {"on_new_request": 2}
    assert [bool(record.exc_info) for record in caplog.records if " failed: " in record.message] == [True, False]
    engine._contents = contents
    assert engine.on_new_request(new_request(params, request_id="next")) is None
    assert engine.matched(new_request(params, request_id="next"), 0) == (48, True)
    assert counted(engine, "defects") == {}


def test_a_request_whose_blocks_cannot_be_looked_at_fails(broken):
    engine = side(FullAttentionSpec())
    request = new_request(prefilled())
    engine.on_new_request(request)
    engine.matched(request, 0)
    engine.allocated(request, broken, 48)
    release, fail = engine.take_commands()
    assert (type(release), fail.code) == (GiveBack, "defect_found")
    engine.on_reported({"r"}, None)
    assert engine.on_finished(request, ([1, 2, 3],)) == (False, None)
    assert counted(engine, "defects") == {"allocated": 1}


def test_a_request_that_waits_for_nothing_is_not_reported_when_it_fails(broken):
    engine = side(FullAttentionSpec())
    engine.allocated(new_request(None), broken, 0)  # vLLM does not wait for it: a report would end the engine
    assert engine.take_commands() == []


def test_a_load_that_is_under_way_is_cancelled(broken, monkeypatch):
    engine = side(FullAttentionSpec())
    request = scheduled(engine, prefilled())
    monkeypatch.setattr(engine.loading, "matched", lambda *_: broken.anything)
    assert engine.matched(request, 0) == (0, False)
    assert [type(command) for command in engine.take_commands()] == [Load, Cancel]


def test_a_prompt_that_cannot_be_offered_is_not_kept(broken, monkeypatch):
    producer = side(FullAttentionSpec())
    monkeypatch.setattr(Ticket, "to_router_params", lambda *_: broken.anything)
    for number in range(9):  # one more than there are slots
        assert offered(producer, f"r{number}") == (False, None)
    assert producer.take_commands() == []
    assert counted(producer, "defects") == {"on_finished": 9}
    monkeypatch.undo()
    assert offered(producer, "r0")[0]


def test_reports_go_on_behind_one_that_cannot_be_noted(broken, monkeypatch):
    engine = side(FullAttentionSpec())
    scheduled(engine, {"do_remote_prefill": True})
    monkeypatch.setattr(engine, "offering", broken)
    engine.on_reported(["r"], ["s"])
    assert engine.loading.matched("r", 0) == 0
    assert counted(engine, "defects") == {"_sent": 1}
    assert [type(command) for command in engine.take_commands()] == [Fail]
    assert counted(engine, "defects") == {"_take_commands": 1}


# A reset.


class Scheduler:
    """What of vLLM's scheduler a reset changes."""

    def __init__(self, found, *requests, loaded=(), multi=False):
        self.connector = SimpleNamespace(_connectors=[]) if multi else SimpleNamespace(_scheduler=found)
        self.requests = {request.request_id: request for request in requests}
        self.finished_recving_kv_req_ids = set(loaded)
        self.failed_recving_kv_req_ids = set()
        self.freed = []

    def _free_request_blocks(self, request):
        self.freed.append(request.request_id)


class Ranks:
    """Ranks that end what they are told to end, or cannot."""

    def __init__(self, found, done=True):
        self.told, self.done = [], done
        found._early.reset = self.reset

    def reset(self, request_ids):
        self.told.append(request_ids)
        return self.done


def loading(found, name):
    """A request whose load the ranks have begun."""
    params = LOAD | new_ticket(request_id=name).to_params()
    return scheduled(found, params, name, is_finished=lambda: False)


def offering(found, name):
    """A request that has ended and whose blocks are kept."""
    request = new_request(OFFER, request_id=name, is_finished=lambda: True)
    found.on_new_request(request)
    assert found.on_finished(request, ([1, 2, 3],))[0]
    return request


def test_a_reset_ends_offers_and_loads_once_and_frees_their_blocks():
    found = side(FullAttentionSpec())
    ranks, load, offer = Ranks(found), loading(found, "load"), offering(found, "offer")
    scheduler = Scheduler(found, load, offer)
    found.take_commands()
    assert found.reset(scheduler)
    assert ranks.told == [("load", "offer")]
    assert sorted(scheduler.freed) == ["load", "offer"]
    assert (load.num_computed_tokens, scheduler.failed_recving_kv_req_ids) == (0, {"load"})
    assert found.take_commands() == [Reset(("load", "offer"))]
    assert found.reset(), "vLLM asks again"
    assert len(ranks.told) == 1
    found.on_reported({"load"}, {"offer"})
    assert (found._ended, found.take_commands()) == (set(), [])
    assert found.matched(load, 0) == (0, False), "it is computed"


@pytest.mark.parametrize("multi", [False, True])
def test_blocks_that_a_rank_or_another_connector_may_use_are_not_freed(multi):
    found = side(FullAttentionSpec())
    ranks, load, offer = Ranks(found, done=multi), loading(found, "load"), offering(found, "offer")
    scheduler = Scheduler(found, load, offer, multi=multi)
    assert found.reset(scheduler) is found.reset() is multi
    assert scheduler.freed == (["load"] if multi else [])
    assert (load.num_computed_tokens, scheduler.failed_recving_kv_req_ids) == (0, {"load"}), "never used in any case"
    ranks.done = True
    assert found.reset(scheduler)


def test_a_reset_without_a_scheduler_ends_offers_and_lets_loads_go_on():
    found = side(FullAttentionSpec())
    ranks, load = Ranks(found), loading(found, "load")
    assert not found.reset()
    assert ranks.told == []
    offered(found, "offer")
    assert not found.reset()
    assert ranks.told == [("offer",)]
    found.on_reported({"load"}, ())
    assert found.reset()
    assert load.num_computed_tokens == 48


def test_what_was_loaded_before_a_reset_is_computed():
    found = side(FullAttentionSpec())
    ranks, load = Ranks(found), loading(found, "load")
    found.on_reported({"load"}, ())
    scheduler = Scheduler(found, load, loaded=["load", "gone"])
    assert found.reset(scheduler)
    assert (ranks.told, scheduler.freed, load.num_computed_tokens) == ([], ["load"], 0)


def test_a_load_that_has_not_begun_is_dropped_and_its_ticket_given_back():
    found = side(FullAttentionSpec())
    ticket = new_ticket(request_id="waits")
    request = new_request(LOAD | ticket.to_params(), request_id="waits")
    found.on_new_request(request)
    assert found.reset(Scheduler(found, request))
    assert found.take_commands() == [GiveBack("waits", ticket)]
    assert found.matched(request, 0) == (0, False)


def test_a_ticket_of_before_a_reset_answers_no_later_sample():
    found = side(FullAttentionSpec())
    Ranks(found)
    first = offering(found, "0_r")
    assert found.reset(Scheduler(found, first))
    keep, params = offered(found, "1_r", ([4, 5, 6],))
    assert keep
    assert params["remote_block_ids"] == [[6]]  # the last of each group
