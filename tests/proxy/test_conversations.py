"""A prefill server is told which engine has answered the beginning of a text last."""

import json

import msgspec

from kvflow.routing import hinted_sources
from kvflow.tools.proxy import conversations
from kvflow.tools.proxy.conversations import Conversations, digests_of

from .test_server import open_rig
from .upstream import DECODED, text

ENDPOINT = "tcp://10.0.0.5:5600"


def chat(*turns):
    return [{"role": "user", "content": each * 2000} for each in turns]


def digests(**fields):
    return digests_of(msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw]))


async def said(rig, *turns):
    """Send a chat; return what the prefill server was asked for."""
    status, _ = await rig.send("/v1/chat/completions", messages=chat(*turns))
    assert status == 200
    return json.loads(rig.prefill[0].bodies[-1])["kv_transfer_params"]


async def test_the_next_turn_is_read_from_who_has_answered_the_last():
    keepers = {}
    async with open_rig(keepers=keepers) as rig:
        keepers[rig.decode[0].url] = ENDPOINT
        assert hinted_sources(await said(rig, "a")) == []
        assert hinted_sources(await said(rig, "a", "b")) == [ENDPOINT]
        assert hinted_sources(await said(rig, "b")) == []
        assert hinted_sources(await said(rig, "a", "c")) == [ENDPOINT]  # a fork


async def test_who_keeps_nothing_or_has_failed_is_not_named():
    keepers = {}
    async with open_rig(decode=[text("{}", 400)], keepers=keepers) as rig:
        keepers[rig.decode[0].url] = ENDPOINT
        for _ in range(2):
            await rig.send("/v1/completions", prompt="a" * 5000)
            assert "kv_hint" not in json.loads(rig.prefill[0].bodies[-1])["kv_transfer_params"]
    async with open_rig(decode=[DECODED]) as rig:
        for _ in range(2):
            assert "kv_hint" not in await said(rig, "a")


def test_a_text_begins_as_another_if_its_digests_do():
    first, longer = digests(messages=chat("a", "b")), digests(messages=chat("a", "b", "c"))
    assert len(first) == 3
    assert longer[: len(first)] == first
    assert digests(messages=chat("b", "a", "c"))[0] != first[0]
    assert digests(prompt="short") == []
    assert len(digests(prompt="a" * (1 << 21))) == conversations.PIECES_MAX


def test_the_text_that_was_asked_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(conversations, "CONVERSATIONS_MAX", 2)
    known = Conversations()
    for number in (b"1", b"2"):
        known.note([b"0", number], number.decode())
    assert known.find([b"1", b"9"]) == "1"
    known.note([b"3"], "3")
    assert [known.find([each]) for each in (b"1", b"2", b"3", b"0")] == ["1", "", "3", ""]
    known.note([], "nobody")
    assert known.find([]) == ""
