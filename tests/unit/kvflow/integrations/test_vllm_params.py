"""What a client or a router may write into ``kv_transfer_params``: the ticket counts, and nothing else is believed."""

import json
import math
import random
import string
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow import RankAddress, TicketMint
from kvflow.errors import ReleaseMismatch, TicketInvalid
from kvflow.integrations.vllm.params import ticket_chars_max
from kvflow.routing import (
    HINTS_MAX,
    LoadWanted,
    OfferWanted,
    RendezvousWanted,
    hinted_sources,
    read_params,
)
from tests.helpers.loops import looped

from .vllm_like import SECRET, new_key, new_ticket

TICKET = new_ticket()
PARAMS = TICKET.to_router_params()
CHARS_MAX = ticket_chars_max([16], 1024)


def read(params, chars_max=CHARS_MAX):
    return read_params(params, new_key().read, chars_max)


def test_routers_find_the_fields_that_they_know():
    assert PARAMS["remote_block_ids"] == [[9]]  # the ticket has them all
    assert (PARAMS["remote_engine_id"], PARAMS["remote_request_id"]) == ("prefill-0", "request-1")
    assert (PARAMS["remote_host"], PARAMS["remote_port"], PARAMS["tp_size"]) == ("127.0.0.1", 5000, 1)
    assert (PARAMS["remote_num_tokens"], PARAMS["do_remote_prefill"]) == (48, True)


@looped("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": None}, {"other": 1}, {1: 2}])
def test_a_request_may_want_nothing(params):
    assert read(params) is None


def test_a_request_may_want_to_be_offered():
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    assert read(wanted) == OfferWanted()
    named = wanted | {"remote_host": "decode-0", "remote_port": 5600}
    assert read_params(named, new_key().read, 1000, meets=True) == OfferWanted()


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@looped(
    "change",
    [
        {"remote_engine_id": "another"},
        {"remote_request_id": "another"},
        {"remote_host": "10.0.0.66"},
        {"remote_host": "x" * 10_000},
        {"remote_host": nested(5000)},
        {"remote_port": 5001},
        {"remote_port": 5000.5},
        {"remote_port": -1},
        {"remote_port": 10**400},
        {"remote_port": math.nan},
        {"tp_size": 2},
        {"remote_num_tokens": 2**64},
    ],
)
def test_a_field_that_only_routers_use_is_named_and_changes_nothing(change):
    assert read(PARAMS | change) == LoadWanted(TICKET, tuple(change))


@looped(
    "change",
    [
        {"remote_block_ids": [[10]]},
        {"remote_block_ids": [[3, 4, 9]]},
        {"remote_block_ids": []},
        {"remote_block_ids": "3,4,9"},
        {"remote_block_ids": [[-5, 2**70]]},
        {"remote_block_ids": nested(5000)},
        {"remote_block_ids": [list(range(1_000_000))]},
        {"dcp_size": {}},
        {"remote_port": 5000.0, "tp_size": 1.0, "remote_num_tokens": 48.0},
        {"remote_host": None, "remote_port": None, "remote_engine_id": None},
        {"": nested(5000), "color": "green"},
    ],
)
def test_what_says_the_same_or_nothing_changes_nothing(change):
    assert read(PARAMS | change) == LoadWanted(TICKET)


@looped(
    "params",
    [
        "do_remote_prefill",
        ["do_remote_prefill"],
        7,
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": 1.0},
        {"do_remote_decode": 1},
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
        PARAMS | {"do_remote_decode": True},
        PARAMS | {"kvflow": None},
        PARAMS | {"kvflow": {}},
        PARAMS | {"kvflow": {"grants": nested(5000)}},
        PARAMS | {"kvflow": object()},
        PARAMS | {"kvflow": PARAMS["kvflow"] + "A"},
        PARAMS | {"kvflow": PARAMS["kvflow"] + "\ud800"},
        {"do_remote_prefill": object()},
    ],
)
def test_what_is_absurd_is_refused(params):
    with pytest.raises((TicketInvalid, ReleaseMismatch)):
        read(params)


def test_a_truncated_ticket_is_refused():
    for length in range(len(PARAMS["kvflow"]) - 2):
        with pytest.raises(TicketInvalid):
            read({"do_remote_prefill": True, "kvflow": PARAMS["kvflow"][:length]})


def test_a_ticket_of_another_secret_is_refused_before_it_is_decoded():
    forged = new_ticket(secret="another secret of the tests").to_params()
    garbage = PARAMS["kvflow"][: len("kvf3.") + 55] + "A" * 1000  # decoded, it would be malformed
    for text, words in ((forged["kvflow"], "another cluster secret"), (garbage, "wrong signature")):
        with pytest.raises(TicketInvalid, match=words):
            read({"do_remote_prefill": True, "kvflow": text})


def test_a_ticket_longer_than_this_engine_can_need_is_refused():
    with pytest.raises(TicketInvalid, match="characters"):
        read({"do_remote_prefill": True, "kvflow": "A" * (CHARS_MAX + 1)})


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens", "groups"), [(16, 16, 1024, 1), (128, 16, 32_768, 1), (16, 16, 131_072, 4)]
)
def test_the_longest_honest_ticket_is_read(ours, theirs, tokens, groups):
    blocks = -(-tokens // theirs)
    lists = [range(2**30, 2**30 + 2 * blocks, 2)] * groups
    ticket = new_ticket(tokens, lists, block_sizes=(theirs,) * groups)
    limit = ticket_chars_max([ours] * groups, tokens)
    text = ticket.to_params()["kvflow"]
    assert len(text) < limit
    assert read({"do_remote_prefill": True, "kvflow": text}, limit) == LoadWanted(ticket)


# How long they are.

BLOCK = 16
CONTEXTS = {"8k": 8 << 10, "128k": 128 << 10, "1M": 1 << 20}


def of_nixl_connector(block_ids, num_tokens):
    """What NixlConnector of vLLM 0.32 answers, with the names of a real run."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": block_ids,
        "remote_engine_id": "f5c6e1a0-7c1b-4a5e-9d0f-2f6f0a3b9c1d",
        "remote_request_id": "cmpl-3a55d276-91c2-4f0e-8f6c-0d6a7c0b1e2f-0-a55d276f",
        "remote_host": "10.0.12.34",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def of_kvflow(block_ids, num_tokens):
    """What kvflow answers for the same blocks."""
    theirs = of_nixl_connector(block_ids, num_tokens)
    address = RankAddress(0, "5" * 32, f"tcp://{theirs['remote_host']}:5600", 2**62, 4096, "a" * 64)
    groups = len(block_ids)
    mint = TicketMint(
        theirs["remote_engine_id"], [address], cluster_secret=SECRET, block_sizes=(BLOCK,) * groups, trace_offers=True
    )
    ends = [[b"a" * 16] * len(ids) for ids in block_ids]
    offer = {"block_ids": block_ids, "num_tokens": num_tokens, "digests": ends, "chained": True}
    return mint.offer(theirs["remote_request_id"], **offer)[0].to_router_params()


def lists_of(order, count, groups, pool):
    """Block ids of groups that share a pool of blocks, as an idle engine allots them or a busy one."""
    draw = random.Random(count)
    match order:
        case "in order":
            ids = list(range(1, 1 + count * groups))
        case "in short runs":  # of requests that have ended
            ids = [
                first + at
                for first in draw.sample(range(1, pool, 4), pool // 4)
                for at in range(draw.choice((2, 3, 4)))
            ]
        case _:
            ids = draw.sample(range(1, pool), count * groups)
    return [ids[at * count : (at + 1) * count] for at in range(groups)]


@looped("order", ["in order", "in short runs", "shuffled"])
@looped("context, groups", [("8k", 1), ("8k", 6), ("128k", 6), ("1M", 1)])
def test_parameters_are_about_as_long_as_those_of_nixl_connector(context, groups, order):
    """``pytest -s`` shows the table."""
    count = CONTEXTS[context] // BLOCK
    for pool in (4 * count * groups, max(4 * count * groups, 100_000)):
        block_ids = lists_of(order, count, groups, pool)
        assert {len(ids) for ids in block_ids} == {count}
        ours, theirs = (
            len(json.dumps(make(block_ids, CONTEXTS[context]), separators=(",", ":")))
            for make in (of_kvflow, of_nixl_connector)
        )
        sys.stdout.write(
            f"\n{context:>5} tokens, {groups} groups, {pool:9,} blocks {order:13}: {ours:9,} bytes, "
            f"NixlConnector {theirs:9,}: {ours / theirs:.2f}"
        )
        assert ours <= 1.2 * theirs


# What routers have been seen to do, and what JSON allows them to do.


def floats(value, draw):
    """Every integer as a double; every double one unit in the last place off."""
    if isinstance(value, list):
        return [floats(each, draw) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int):
        return float(value) if draw.random() < 0.5 else value
    return math.nextafter(value, draw.choice((-math.inf, math.inf)))


def escaped(text, draw):
    """The same JSON with other escapes."""

    def escape(character):
        plain = character in string.ascii_letters + string.digits + "._-"
        return f"\\u{ord(character):04x}" if plain and draw.random() < 0.3 else character

    parts = text.split('"')  # no text of ours has a quotation mark in it: every other part is inside of a string
    return '"'.join("".join(map(escape, part)) if number % 2 else part for number, part in enumerate(parts))


@given(
    seed=st.integers(0, 2**32),
    added=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name not in PARAMS and not name.startswith("do_remote")),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers()),
        max_size=4,
    ),
    nulled=st.sets(st.sampled_from([name for name in PARAMS if name.startswith(("remote", "tp", "dcp", "pp"))])),
)
def test_a_ticket_goes_through_any_router(seed, added, nulled):
    draw = random.Random(seed)
    sent = {name: floats(value, draw) for name, value in (PARAMS | added).items()} | dict.fromkeys(nulled)
    names = draw.sample(list(sent), len(sent))
    plain = json.dumps({name: sent[name] for name in names})
    text = plain if any('"' in str(value) or "\\" in plain for value in sent.values()) else escaped(plain, draw)
    assert read(json.loads(text)) == LoadWanted(TICKET)


@given(st.sampled_from(["kvflow", "do_remote_prefill"]), st.integers(0, 2**32))
def test_a_changed_ticket_is_refused_or_wants_nothing(name, seed):
    draw = random.Random(seed)
    text = PARAMS["kvflow"]
    place = draw.randrange(len(text))
    changed = text[:place] + draw.choice(string.ascii_letters + "=-_.") + text[place + 1 :]
    params = PARAMS | ({"kvflow": changed} if name == "kvflow" else {name: None})
    if changed == text or name != "kvflow":
        assert isinstance(read(params), LoadWanted | None)
        return
    try:
        found = read(params)
    except TicketInvalid:
        return
    assert found.ticket == TICKET  # base64 has bits that say nothing in its last character


def kv_hint(*endpoints, kind="kv.fetch", version="1.0"):
    """Return a message as Dynamo sends it."""
    actions = [
        {
            "action_id": str(number),
            "action_type": kind,
            "action_version": version,
            "payload": {"source_control_endpoint": endpoint, "block_hashes": [1, 2]},
        }
        for number, endpoint in enumerate(endpoints)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def test_hints_name_the_sources_of_a_prompt():
    envelope = kv_hint("tcp://c:3")
    as_vllm = SimpleNamespace(actions=[SimpleNamespace(**each) for each in envelope["actions"]])
    params = {"kv_hint": kv_hint("tcp://a:1", "tcp://b:2"), "remote_kv_source": {"remote_host": "d", "remote_port": 4}}
    assert hinted_sources(params, as_vllm) == ["tcp://a:1", "tcp://b:2", "tcp://c:3", "tcp://d:4"]
    assert hinted_sources(None, envelope) == ["tcp://c:3"]
    assert len(hinted_sources({"kv_hint": kv_hint(*["tcp://a:1"] * 99)})) == HINTS_MAX
    six = {"remote_kv_source": {"kv_request_id": "r", "remote_host": "fd00::7", "remote_port": 4}}
    assert hinted_sources(six) == ["tcp://[fd00::7]:4"]


@looped(
    "params",
    [
        None,
        "text",
        [],
        {"kv_hint": None, "remote_kv_source": None},
        {"kv_hint": "tcp://a:1", "remote_kv_source": "tcp://a:1"},
        {"kv_hint": kv_hint("tcp://a:1", version="2.0")},
        {"kv_hint": kv_hint("tcp://a:1", kind="kv.migrate")},
        {"kv_hint": kv_hint(7)},
        {"kv_hint": {"actions": {"payload": 1}}},
        {"remote_kv_source": {"remote_host": ["a"], "remote_port": 4}},
    ],
)
def test_what_is_no_hint_names_no_source(params):
    assert hinted_sources(params, params) == []


LARGE = 2_000_000  # characters, or digits


@looped("port", [5600, "5600", "05600"])
@looped("host", ["decode-0", "::1", "[::1]", "h" * 255])
def test_a_host_and_a_port_are_read_as_routers_write_them(host, port):
    endpoint = f"tcp://{'[::1]' if ':' in host else host}:5600"
    params = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
    assert read_params(params, new_key().read, 1000, meets=True) == RendezvousWanted(endpoint)
    assert hinted_sources({"remote_kv_source": params}) == [endpoint]


@looped(
    "change",
    [
        {"remote_port": "5" * LARGE},
        {"remote_port": 10**5000},
        {"remote_port": "123456"},
        {"remote_port": 65_536},
        {"remote_port": 0},
        {"remote_port": -1},
        {"remote_port": "0"},
        {"remote_port": "+5"},
        {"remote_port": "\u0661"},  # a digit of another script
        {"remote_port": "5\n"},
        {"remote_port": True},
        {"remote_port": 5600.0},
        {"remote_port": None},
        {"remote_port": ["x" * LARGE]},
        {"remote_port": {"x" * LARGE: 1}},
        {"remote_host": "h" * 256},
        {"remote_host": "h" * LARGE},
        {"remote_host": ""},
        {"remote_host": ["h"]},
    ],
)
def test_what_is_no_host_and_port_names_no_engine(change):
    params = {"do_remote_prefill": True, "remote_host": "decode-0", "remote_port": 5600} | change
    with pytest.raises(TicketInvalid, match="kv_transfer_params") as caught:
        read_params(params, new_key().read, 1000, meets=True)
    assert len(str(caught.value)) < 512
    assert hinted_sources({"remote_kv_source": params}) == []
