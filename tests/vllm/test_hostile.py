"""Whatever a client writes into ``kv_transfer_params``: that request fails, and the engine serves the next one."""

import json
import socket

import pytest

from handshake.security import ClusterSecurity, sign
from tests.simulation.tickets import forge

from .checks import LENGTH, failed, reason_of, serves
from .engines import PREFILL_PARAMS
from .prompts import prompt_of
from .tampering import (
    at_address,
    changed,
    in_grant,
    nested,
    only,
    signed_with,
    with_mac,
    with_text,
    without,
)

OTHER_SECRET = "0123456789abcdef" * 4

FORGED = {
    "other blocks": in_grant(block_ids=[[1001, 1002, 1003]]),
    "more tokens than there is memory for": in_grant(num_tokens=[2**40]),
    "another format": with_text(lambda text: f"kvf1{text[4:]}"),
    "no signature": with_mac(b""),
    "half a surrogate pair": with_text(lambda text: f"{text}\ud800"),
    "another secret": lambda params: signed_with(params, OTHER_SECRET),
}
TRUNCATED = {
    "no ticket": without("kvflow"),
    "no grants": changed(kvflow={"grants": []}),
    "an empty ticket": changed(kvflow={}),
    "a ticket of text": changed(kvflow="ticket"),
    "a ticket of nothing": changed(kvflow=None),
    "no grant": with_text(lambda text: text.split(".")[0]),
    "half a mac": with_mac(b"ab" * 8),
}
ABSURD = {
    "nothing but the request": only(do_remote_prefill=True),
    "block ids and no engine": only(do_remote_prefill=True, remote_block_ids=[[1, 2, 3]]),
    "what vLLM's own connector needs, and no ticket": only(
        do_remote_prefill=True,
        remote_block_ids=[[1, 2, 3]],
        remote_engine_id="engine",
        remote_request_id="request",
        remote_host="192.0.2.1",
        remote_port=5600,
        tp_size=1,
    ),
    "both wishes": changed(do_remote_decode=True),
    "a request of text": changed(do_remote_prefill="yes"),
    "a request of a number": changed(do_remote_prefill=7),
    "a ticket that is a nest": changed(kvflow=nested(50)),
    "a ticket that is a deep nest": changed(kvflow=nested(500)),
    "a number beyond all numbers": changed(remote_num_tokens=10**400),
    "a deep nest": changed(remote_block_ids=nested(500)),
    "a ticket of a million letters": changed(kvflow="kvf3." + "a" * 1_000_000),
}
BESIDE = {
    "block ids of no group": changed(remote_block_ids=[]),
    "too many groups": changed(remote_block_ids=[[1], [2], [3], [4], [5], [6], [7], [8]]),
    "block ids below zero": changed(remote_block_ids=[[-5, -6]]),
    "block ids beyond all pools": changed(remote_block_ids=[[1 << 62]]),
    "half a rank": changed(tp_size=0.5),
    "a nest": changed(remote_block_ids=nested(50)),
    "a host of a million letters": changed(remote_host="a" * 1_000_000),
    "a million block ids": changed(remote_block_ids=[list(range(1_000_000))]),
}
NOT_OBJECTS = {"a text": "kvflow", "a number": 7, "a list": [1, 2], "a switch": True}
NOTHING_ASKED = {
    "an empty object": {},
    "no request": {"do_remote_prefill": False, "do_remote_decode": False},
    "no request and a field that nobody knows": {"do_remote_prefill": None, "color": "green"},
}
REFUSED = FORGED | TRUNCATED | ABSURD
SMALL_BODY = 1024
"""Bytes. A ticket that ended the engine took fewer."""


@pytest.mark.parametrize("tamper", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_the_request_fails_and_the_engine_serves_the_next(pair, tamper):
    prompt = prompt_of(LENGTH)
    ticket = pair.ticket(prompt)
    answer = pair.decode.generate(prompt, tamper(ticket))
    assert failed(answer), answer
    # vLLM itself refuses what it could not send to another process, before any connector sees it.
    assert "error" in answer or reason_of(pair, answer) in ("ticket_invalid", "release_mismatch")
    serves(pair, ticket)


@pytest.mark.parametrize("tamper", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_what_stands_beside_the_ticket_changes_nothing(pair, tamper):
    serves(pair, tamper(pair.ticket(prompt_of(LENGTH))))


@pytest.mark.parametrize("num_tokens", [2**30, 2**40])
@pytest.mark.parametrize("signed", [False, True], ids=["a stranger", "a member"])
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_small_request_does_not_end_an_engine(pair, signed, num_tokens):
    prompt = prompt_of(40)
    ticket = pair.ticket(prompt)
    key = ClusterSecurity.from_secret(pair.secret).ticket_key

    def enlarge(grant):
        grant["contents"] = None
        grant["num_tokens"] = [num_tokens]

    forged = forge(ticket, enlarge, sign=(lambda payload: sign(key, payload)) if signed else None)
    body = {"do_remote_prefill": True, "kvflow": forged["kvflow"]}
    assert len(json.dumps(body)) < SMALL_BODY
    answer = pair.decode.generate(prompt, body)
    assert failed(answer), answer
    assert reason_of(pair, answer) == ("content_mismatch" if signed else "ticket_invalid")
    if not signed:  # what a member signed was given back
        assert pair.decode.generate(prompt, ticket)["tokens"] == pair.monolithic(prompt)
    serves(pair)


@pytest.mark.parametrize("method", ["_read_params", "loading.announce", "loading.matched", "loading.allocated"])
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_defect_of_the_connector_costs_one_request(pair, method):
    prompt = prompt_of(LENGTH)
    ticket = pair.ticket(prompt)
    pair.decode.sabotage(method, "RecursionError")
    answer = pair.decode.generate(prompt, ticket)
    assert failed(answer), answer
    assert reason_of(pair, answer) == "defect_found"
    serves(pair, ticket if method in ("_read_params", "loading.announce") else None)  # later it was given back


@pytest.mark.parametrize("method", ["offering.finished", "_contents", "offering.take_commands"])
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_defect_of_the_prefill_side_costs_one_ticket(pair, method):
    prompt = prompt_of(LENGTH)
    if method == "_contents":
        pair.prefill.sabotage("_contents.digests", "MemoryError")
    else:
        pair.prefill.sabotage(method, "MemoryError")
    answer = pair.prefill.generate(prompt, PREFILL_PARAMS, max_tokens=1)
    assert answer["finish_reason"] == "length"
    if answer["kv_transfer_params"]:  # the order comes a step later
        serves(pair, answer["kv_transfer_params"])
    serves(pair)


@pytest.mark.parametrize("params", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_parameters_that_are_no_object_fail(pair, params):
    assert failed(pair.decode.generate(prompt_of(LENGTH), params))
    assert failed(pair.prefill.generate(prompt_of(LENGTH), params))
    serves(pair)


@pytest.mark.parametrize("params", NOTHING_ASKED.values(), ids=NOTHING_ASKED)
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_who_asks_for_nothing_is_served_by_one_engine(pair, params):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    assert pair.decode.generate(prompt, params)["tokens"] == alone
    assert pair.prefill.generate(prompt, params)["tokens"] == alone


@pytest.mark.parametrize(
    "fields",
    [{"do_remote_decode": "yes"}, {"remote_block_ids": "x"}, {"remote_port": -1}, {"kvflow": 7}],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_prefill_engine_outlives_absurd_parameters(pair, fields):
    answer = pair.prefill.generate(prompt_of(LENGTH), PREFILL_PARAMS | fields, max_tokens=1)
    ticket = answer.get("kv_transfer_params") or {}
    assert failed(answer) or ticket.get("kvflow"), answer  # what it does not look at does not matter to it
    if ticket.get("kvflow"):
        serves(pair, ticket)
    serves(pair)


@pytest.mark.parametrize("where", ["beside the ticket", "in the ticket", "without a ticket"])
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_nobody_but_a_member_is_dialed(pair, where):
    prompt = prompt_of(LENGTH)
    ticket = pair.ticket(prompt)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        port = trap.getsockname()[1]
        tamper = {
            "beside the ticket": changed(remote_host="127.0.0.1", remote_port=port),
            "in the ticket": at_address(f"tcp://127.0.0.1:{port}"),
            "without a ticket": only(
                do_remote_prefill=True, remote_host="127.0.0.1", remote_port=port, remote_block_ids=[[1, 2, 3]]
            ),
        }[where]
        answer = pair.decode.generate(prompt, tamper(ticket))
        if where == "beside the ticket":
            assert answer["tokens"] == pair.monolithic(prompt)
        else:
            assert failed(answer)
            serves(pair, ticket)
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize("length", [40, 128, 200])
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_ticket_of_the_beginning_of_a_prompt_serves_as_far_as_it_goes(pair, length):
    prompt = prompt_of(LENGTH)
    answer = pair.decode.generate(prompt, pair.ticket(prompt[:length]))
    assert answer["tokens"] == pair.monolithic(prompt)
