"""What a client may write into ``kv_transfer_params``: the ticket counts, and nothing else is believed."""

import json

import pytest

from kvflow.errors import TicketInvalid
from kvflow.integrations.vllm.params import LoadWanted, Nothing, OfferWanted, read_params, ticket_params

from .vllm_like import new_ticket

TICKET = new_ticket()
PARAMS = ticket_params(TICKET)


def test_what_a_producer_answers_is_understood_by_a_consumer_after_json():
    assert read_params(json.loads(json.dumps(PARAMS))) == LoadWanted(TICKET)


def test_routers_find_the_fields_that_they_know():
    assert PARAMS["remote_block_ids"] == [[3, 4, 9]]
    assert (PARAMS["remote_engine_id"], PARAMS["remote_request_id"]) == ("prefill-0", "request-1")
    assert (PARAMS["remote_host"], PARAMS["remote_port"], PARAMS["tp_size"]) == ("127.0.0.1", 5000, 1)
    assert (PARAMS["remote_num_tokens"], PARAMS["do_remote_prefill"]) == (48, True)


def test_the_ticket_alone_is_enough():
    assert read_params({"do_remote_prefill": True, **TICKET.to_params()}) == LoadWanted(TICKET)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": None}, {"other": 1}])
def test_a_request_may_want_nothing(params):
    assert read_params(params) == Nothing()


def test_a_request_may_want_to_be_offered():
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    assert read_params(wanted) == OfferWanted()


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": "another"},
        {"remote_request_id": "another"},
        {"remote_host": "10.0.0.66"},
        {"remote_port": 5001},
        {"tp_size": 2},
        {"remote_num_tokens": 47},
        {"remote_block_ids": [[3, 4, 10]]},
        {"remote_block_ids": [[3, 4, 9], []]},
        {"remote_block_ids": []},
    ],
    ids=str,
)
def test_a_field_that_contradicts_the_ticket_is_refused(change):
    with pytest.raises(TicketInvalid, match=next(iter(change))):
        read_params(PARAMS | change)


@pytest.mark.parametrize(
    "params",
    [
        "do_remote_prefill",
        ["do_remote_prefill"],
        7,
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_decode": 1},
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
        PARAMS | {"do_remote_decode": True},
        PARAMS | {"remote_block_ids": "3,4,9"},
        PARAMS | {"remote_block_ids": [[3, 4, 2**70]]},
        PARAMS | {"remote_block_ids": [[-5]]},
        PARAMS | {"remote_block_ids": nested(5000)},
        PARAMS | {"remote_port": -1},
        PARAMS | {"remote_port": 2**64},
        PARAMS | {"remote_host": "x" * 10_000},
        PARAMS | {"kvflow": None},
        PARAMS | {"kvflow": {}},
        PARAMS | {"kvflow": {"grants": []}},
        PARAMS | {"kvflow": {"grants": nested(5000)}},
        PARAMS | {"kvflow": object()},
        {1: 2},
        {"do_remote_prefill": object()},
    ],
)
def test_what_is_absurd_is_refused(params):
    with pytest.raises(TicketInvalid):
        read_params(params)


def test_a_truncated_ticket_is_refused():
    for length in range(len(PARAMS["kvflow"]) - 2):
        with pytest.raises(TicketInvalid):
            read_params({"do_remote_prefill": True, "kvflow": PARAMS["kvflow"][:length]})
