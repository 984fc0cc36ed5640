"""Chats of several turns over three engines, as docs/howto/share-prefixes.md starts them, with a small prefill cache.

From the second turn on the prefill engines compute only what no engine holds, and the answers are those of one server.
"""

from itertools import product

import pytest

from .chats import ANSWER, TURNS, WORDS, Chats, Kind
from .clients import text_of
from .howto import SHARING_PAGE, command
from .pairs import FULL, model_folder
from .routers import STARTS

CHATS_MAX = 8
"""Chats, until each turn after the first has had an answer in time in one of them."""

FRONTS = ("kvflow proxy", "vllm-router")
LLAMA, GPTOSS = Kind("llama-chat", 32, 32), Kind("gptoss-chat", 32, 32)
if FULL:
    KINDS = [
        LLAMA,
        GPTOSS,
        Kind("llama-chat", 128, 128),
        Kind("llama-chat", 128, 32, keeping_ranks=2),
        Kind("llama-chat", 32, 128, asking_ranks=2),
        Kind("gptoss-chat", 128, 128, keeping_ranks=2),
        Kind("gptoss-chat", 32, 128, asking_ranks=2),
    ]
    TALKS, KILLED = list(product(KINDS, FRONTS)), KINDS
else:  # ``test_windows`` has engines of a model with windows, and ``test_chat`` the proxy
    TALKS, KILLED = [(LLAMA, "vllm-router")], [LLAMA]


@pytest.fixture(scope="module")
def chats(request, pairs, tmp_path_factory):
    pairs.stop()
    with Chats(request.param, model_folder(request.param.model), tmp_path_factory.mktemp("chats")) as chats:
        for server in (chats.prefill, chats.second):  # one that started before its source asks again later
            server.wait_logged("is engine")
        yield chats


@pytest.fixture(scope="module")
def front(request, chats):
    return STARTS["vllm-router"](chats, chats.second) if request.param == "vllm-router" else chats.proxy


def grown(chats, computed, prompt, held):
    """Require that the prefill engines have computed the rest of a prompt."""
    chats.settle()
    assert chats.computed() == computed + len(prompt) - held


def found(chats, front, name):
    """Talk, and require of each turn what the engines compute, read and answer; yield the turns that are found.

    A request waits for some 40 ms, which the only two cores of five servers may need for something else.
    """
    messages, turns = [], []
    for number in range(TURNS):
        messages.append({"role": "user", "content": text_of(WORDS, f"{name} {number}")})
        alone = chats.say(chats.alone, messages)
        chats.crowd_out(f"{name} {number}")
        computed, fetched, late = chats.computed(), len(chats.fetched()), chats.late()
        turn = chats.say(front, messages)
        assert turn.answer == alone.answer
        assert len(turn.answer) == ANSWER
        held = 0 if chats.late() > late else chats.held(turns, alone.prompt)
        grown(chats, computed, alone.prompt, held)
        assert [each["tokens"] for each in chats.fetched()[fetched:]] == [held] * chats.kind.asking_ranks * bool(held)
        if held:
            yield number
        messages.append({"role": "assistant", "content": alone.text.strip()})
        turns.append(alone)


@pytest.mark.proves("next turn read from decode (`bidirectional_kv_xfer`)", engine="real")
@pytest.mark.parametrize(("chats", "front"), TALKS, indirect=True, ids=str)
def test_a_chat_computes_only_what_no_engine_holds(chats, front):
    missing = set(range(1, TURNS))
    for chat in range(CHATS_MAX):
        if missing:
            missing -= set(found(chats, front, f"{front.name} {chat}"))
    assert not missing
    shown = chats.run(command("grep", page=SHARING_PAGE)).splitlines()
    assert len(shown) == sum(each["event"] == "prefix.fetched" for each in chats.records("prefill")) > 0
    assert chats.ignored() == 0  # the proxy names the decode engine


@pytest.mark.parametrize("chats", KILLED, indirect=True, ids=str)
def test_what_died_with_the_decode_engine_is_computed_again(chats):
    messages = [{"role": "user", "content": text_of(WORDS, "killed")}]
    first = chats.say(chats.proxy, messages)
    assert first.answer == chats.say(chats.alone, messages).answer
    chats.crowd_out("killed")
    chats.decode.kill()
    chats.start_keeping()
    chats.decode.wait_ready()
    messages += [
        {"role": "assistant", "content": first.text.strip()},
        {"role": "user", "content": text_of(WORDS, "again")},
    ]
    computed, alone = chats.computed(), chats.say(chats.alone, messages)
    assert chats.say(chats.proxy, messages).answer == alone.answer
    grown(chats, computed, alone.prompt, 0)
