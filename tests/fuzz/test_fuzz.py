"""A short form of ``make fuzz``: every kind of input, for a few seconds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .corpus import kept
from .dialer import lie
from .frames import conversation
from .fuzzed import fuzzed
from .listener import attack
from .mutations import Mutator
from .processes import SECRET, apart
from .targets import TARGETS, Finding, drawn, run
from .tcp import attack as attack_tcp
from .tcp import lie as lie_over_tcp
from .tcp_frames import Served, talk

MESSAGES = 2_500
LIES = 12
ALONE = 300
TCP_FRAMES = {"off": 3000, "tls": 500}
TCP_ANSWERS = 300


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(600)
async def test_a_worker_survives_mutated_messages_and_every_kind_of_lie():
    async with apart(fuzzed, "nixl", SECRET) as worker:
        attacked = await attack(worker, MESSAGES, "test", raw=50)
        assert attacked.mutated >= MESSAGES
        assert attacked.received >= attacked.mutated  # each of them was judged
        assert attacked.invalid
        assert attacked.conversations > 100
        assert attacked.honest
        lied = await lie(worker, LIES, "test")
    assert {kind: words.total() for kind, words in lied.said.items()} == dict.fromkeys(lied.said, LIES)
    assert lied.said["manifests"]["protocol_violation"]
    assert lied.said["blobs"]["done"]  # some lies are well-formed, and reach NIXL


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encryption", TCP_FRAMES)
async def test_a_tcp_exporter_survives_lying_readers_and_serves_honest_ones(encryption):
    frames = TCP_FRAMES[encryption]
    found = await attack_tcp(frames, "test", encryption=encryption)
    assert found.frames >= frames
    assert found.requests >= found.answered > 0
    assert found.invalid
    assert found.turned_away
    assert found.honest
    assert found.end["threads"] >= found.warm["threads"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("encryption", TCP_FRAMES)
def test_a_reader_over_tcp_lives_through_exporters_that_lie(encryption):
    found = lie_over_tcp(TCP_ANSWERS, "test", encryption=encryption)
    assert found.answers >= TCP_ANSWERS
    assert {*found.said} == {"done", "unheld", "bounds", "peer_lost"}


@pytest.mark.parametrize("name", TARGETS)
def test_what_takes_input_takes_mutated_input(name):
    words, _ = run(name, "test", range(ALONE))
    assert len(words) > 1  # some are refused, some are not


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=400))
def test_what_takes_input_takes_bytes_from_nothing(name, data):
    TARGETS[name][0](data)


@pytest.mark.parametrize(("name", "data"), kept(TARGETS))
def test_what_was_found_once_is_refused(name, data):
    assert TARGETS[name][0](data) not in {"valid", "planned", "taken", "signed", "paired"}


def test_a_seed_draws_the_same_again():
    assert conversation("a/1") == conversation("a/1") != conversation("a/2")
    served = Served("tcp://127.0.0.1:1", "off", b"", b"", (4096, 8192), 64, 64, 32, (7, 8))
    assert talk("a", 1, served) == talk("a", 1, served)
    for name in TARGETS:
        assert drawn(name, "a", 1) == drawn(name, "a", 1)


def test_a_finding_says_how_to_draw_it_again(monkeypatch):
    def stumble(_data):
        raise ZeroDivisionError

    monkeypatch.setitem(TARGETS, "frame", (stumble, lambda mutator: mutator.of_bytes(b"x")))
    with pytest.raises(Finding, match=r"--seed a --target frame --number 3$") as caught:
        run("frame", "a", [3])
    assert Mutator("a/frame/3").of_bytes(b"x").hex() in str(caught.value)
