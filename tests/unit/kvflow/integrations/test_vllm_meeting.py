"""Requests without a ticket, which name the engine that computes their prompt: they wait for its offer, and no longer.

The prefill engines are real workers, with open offers.
"""

from types import SimpleNamespace

import pytest

from kvflow.integrations.vllm import finder
from kvflow.integrations.vllm.engine import LOAD_WAIT
from kvflow.integrations.vllm.messages import Fail, GiveBack, Load
from kvflow.rendezvous.dialer import Asker
from kvflow.worker import answers
from tests.ports import free_port

from .test_vllm_finder import Source
from .vllm_like import (
    SIDES,
    FullAttentionSpec,
    blocks_of,
    matched,
    new_contents,
    new_request,
    side,
    step_output,
    wait_until,
)

PORT = free_port()
ENDPOINT = f"tcp://127.0.0.1:{PORT}"
NAMED = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": PORT}
SIZE = 16
WITHIN_S = 30.0


class Prefill(Source):
    """An engine that offers the prompts of ``new_request``."""

    def __init__(self, engine_id="prefill", endpoint=ENDPOINT):
        super().__init__(0, engine_id, block_size=SIZE, model="")
        self.open(endpoint)

    def offer(self, num_tokens=48, name="request-1"):
        digests = new_contents().digests(
            new_request(None, num_tokens), [range(-(-num_tokens // SIZE))], [SIZE], num_tokens
        )
        return self.worker.offer_progressive(name, [()], num_tokens, digests=digests)


@pytest.fixture
def prefill():
    prefill = Prefill()
    yield prefill
    while SIDES:
        SIDES.pop().close()
    prefill.close()


def decode(**extra):
    return side(FullAttentionSpec(), **{"rendezvous_from": [ENDPOINT], "rendezvous_s": 30.0, **extra})


def arrived(found, prompt=49, request_id="r", params=NAMED):
    request = new_request(dict(params), prompt, request_id)
    found.on_new_request(request)
    return request


def refusal(found, request):
    """Schedule a request that cannot be read; return what the ranks report."""
    num_tokens, _ = matched(found, request)
    found.allocated(request, blocks_of(range(1, 5)), num_tokens)
    (command,) = found.take_commands()
    assert isinstance(command, Fail)
    return command


def test_the_samples_of_a_prompt_share_one_offer(prefill):
    found = decode()
    first, second = (arrived(found, 48, f"{number}_r") for number in range(2))
    prefill.offer().seal([(1, 2, 3)])
    assert matched(found, first) == (48, True)
    assert found.matched(second, 0) == (None, False)  # it follows the first


def test_a_prompt_that_nobody_offers_in_time_fails(prefill):
    found = decode(rendezvous_s=0.05)
    failed = refusal(found, arrived(found))
    assert failed.code == "deadline_exceeded"
    assert "0.05 s" in failed.reason
    assert "dispatch" in failed.remedy


def test_without_the_setting_a_request_needs_a_ticket(prefill):
    found = side(FullAttentionSpec())
    assert refusal(found, arrived(found)).code == "ticket_invalid"


def test_a_question_that_waits_has_one_digest(prefill, monkeypatch):
    asked, held = [], Asker.held

    async def ask(asker, digests, *given, **named):
        asked.append(len(digests))
        return await held(asker, digests, *given, **named)

    monkeypatch.setattr(Asker, "held", ask)
    found = decode()
    request = arrived(found, 41)
    for end in (32, 48, 41):  # offers of less and of more are not those of this prompt
        prefill.offer(end, name=f"{end}").seal([(1, 2, 3)[: -(-end // SIZE)]])
    assert matched(found, request) == (41, True)
    assert asked == [1]


def test_a_question_for_which_the_engine_has_no_room_says_so(prefill, monkeypatch):
    monkeypatch.setattr(answers, "WAITING_BYTES_MAX", 0)
    monkeypatch.setattr(answers, "RESERVED_BYTES", 0)
    found = decode()
    failed = refusal(found, arrived(found, 48))
    assert failed.code == "capacity_exceeded"
    assert f"bytes of questions that wait at {ENDPOINT}" in failed.reason


def questions(prefill):
    """Return how many questions wait at a prefill engine."""
    return sum(map(len, prefill.worker._thread.worker._leases.answers._of.values()))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_request_that_ends_gives_its_offer_back_sealed_or_not(prefill, sealed):
    found = decode()
    request = arrived(found, 48)
    offer = prefill.offer()
    if sealed:
        offer.seal([(1, 2, 3)])
        wait_until(lambda: not found._finder.is_asking("r"))
    else:
        wait_until(lambda: found._finder._meetings["r"].given is not None)
    found.on_finished(request, [[]])
    (command,) = found.take_commands()
    assert command == GiveBack("r", offer.ticket)
    assert found._finder.met("r") is None
    wait_until(lambda: questions(prefill) == 0)


def test_a_request_that_ends_while_it_waits_leaves_no_question(prefill):
    found = decode()
    gone, stays = (arrived(found, 48, name) for name in ("gone", "stays"))
    wait_until(lambda: questions(prefill) == 2)
    found.on_finished(gone, [[]])
    wait_until(lambda: questions(prefill) == 1)
    prefill.offer().seal([(1, 2, 3)])
    assert matched(found, stays) == (48, True)


NO_ROOM = "no room for more requests that wait for offers of prefill engines: the limit is {}"


def waiting(found):
    """Return the names of the requests that wait for an offer."""
    return [name for name in found._finder._meetings if found._finder.is_asking(name)]


def refused(found, request, limit):
    failed = refusal(found, request)
    assert (failed.code, failed.reason) == ("capacity_exceeded", NO_ROOM.format(limit))
    assert "router" in failed.remedy


def test_who_has_an_offer_makes_no_room(prefill, monkeypatch):
    monkeypatch.setattr(finder, "SEARCHES_MAX", 2)
    found = decode()
    first = arrived(found, 48, "first")
    offer = prefill.offer()
    wait_until(lambda: found._finder._meetings["first"].given is not None)
    second, third = (arrived(found, prompt, f"{prompt}") for prompt in (46, 47))
    assert waiting(found) == ["first", "47"]
    refused(found, second, 2)
    found._finder._meetings["47"].given = offer.ticket
    refused(found, arrived(found, 49, "too many"), 2)
    offer.seal([(1, 2, 3)])
    assert matched(found, first) == (48, True)
    found.on_finished(third, [[]])


def test_an_engine_for_which_many_wait_takes_no_room_of_others(prefill, monkeypatch):
    monkeypatch.setattr(finder, "SEARCHES_MAX", 3)
    other = f"tcp://127.0.0.2:{PORT}"
    second = Prefill("second", other)
    try:
        found = decode(rendezvous_from=[ENDPOINT, other])
        honest = arrived(found, 48, "honest")
        many = [arrived(found, prompt, f"{prompt}", NAMED | {"remote_host": "127.0.0.2"}) for prompt in range(30, 36)]
        assert waiting(found) == ["honest", "34", "35"]
        for each in many[:4]:
            refused(found, each, 3)
        prefill.offer().seal([(1, 2, 3)])
        assert matched(found, honest) == (48, True)
    finally:
        SIDES.pop().close()
        second.close()


@pytest.mark.parametrize("names", [("7", "0_7"), ("0_7", "7"), ("0_7", "1_7")])
def test_requests_of_one_name_with_other_prompts_get_an_offer_each(prefill, names):
    found = decode()
    first, second = (arrived(found, prompt, name) for prompt, name in zip((48, range(1, 49)), names, strict=True))
    wait_until(lambda: questions(prefill) == 2)
    prefill.offer().seal([(1, 2, 3)])
    assert matched(found, first) == (48, True)
    assert waiting(found) == [second.request_id]
    assert found.matched(second, 0) == (None, False)


@pytest.mark.parametrize("first_takes", [True, False])
def test_a_ticket_is_compared_with_the_prompt_of_each_request(prefill, first_takes):
    found = decode()
    first = arrived(found, 48, "7")
    second = new_request(dict(NAMED), 48, "0_7", cache_salt="of another tenant")
    found.on_new_request(second)
    offer = prefill.offer()
    offer.seal([(1, 2, 3)])
    if first_takes:
        assert matched(found, first) == (48, True)
    else:
        wait_until(lambda: not found._finder.is_asking("7"))
        found.on_finished(first, [[]])
    num_tokens, _ = matched(found, second)
    found.allocated(second, blocks_of(range(4, 7)), num_tokens)
    commands = found.take_commands()
    assert [each.code for each in commands if isinstance(each, Fail)] == ["content_mismatch"]
    assert not any(isinstance(each, Load) for each in commands)
    assert [each.ticket for each in commands if isinstance(each, GiveBack)] == [offer.ticket] * (not first_takes)


def test_names_are_looked_up_once_however_many_requests_name_others(prefill, monkeypatch):
    monkeypatch.setattr(finder, "LOOK_AGAIN_S", WITHIN_S)
    looked_up, look_up = [], finder.Finder._look_up

    async def looked(finder, name):
        looked_up.append(name)
        return await look_up(finder, name)

    monkeypatch.setattr(finder.Finder, "_look_up", looked)
    found = decode(rendezvous_from=[f"tcp://localhost:{PORT}"])
    for number in range(5):
        request = arrived(found, 49, f"{number}", NAMED | {"remote_host": f"127.0.0.{10 + number}"})
        assert refusal(found, request).code == "ticket_invalid"
    assert looked_up == [f"tcp://localhost:{PORT}"]


def test_an_address_that_a_name_has_just_got_is_looked_up_soon(prefill, monkeypatch):
    monkeypatch.setattr(finder, "LOOK_AGAIN_S", 0.0)
    addresses = ["127.0.0.9"]
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda host, port, *_, **__: [(0, 0, 0, "", (each, port)) for each in addresses]
    )
    found = decode(rendezvous_from=[f"tcp://prefill.example:{PORT}"])
    assert refusal(found, arrived(found)).code == "ticket_invalid"
    addresses.append("127.0.0.1")
    prefill.offer().seal([(1, 2, 3)])
    assert matched(found, arrived(found, 48, "s")) == (48, True)


def step(found, *, computes):
    found.on_scheduled(step_output({"x": 1} if computes else {}), 1)


def test_an_idle_step_waits_for_an_answer_unless_the_one_before_computed(prefill, monkeypatch):
    monkeypatch.setattr(finder, "LOAD_WAIT", LOAD_WAIT._replace(each_s=WITHIN_S))
    found = decode()
    step(found, computes=False)
    step(found, computes=False)  # nobody has asked for anything
    request = arrived(found, 48)
    for computes in (True, False, True, False):
        step(found, computes=computes)
    assert found.matched(request, 0) == (None, False)
    prefill.offer().seal([(1, 2, 3)])
    step(found, computes=False)
    assert found.matched(request, 0) == (48, True)


def test_requests_that_wait_for_prompts_share_a_quarter_of_the_blocks(prefill):
    found = decode()
    found.bind_pool(SimpleNamespace(get_num_free_blocks=lambda: 12))
    first, second = (arrived(found, 48, name) for name in ("a", "b"))
    offers = [prefill.offer(name=f"request-{number}") for number in range(2)]
    for offer in offers:
        offer.advance(16, [(7,)])
    assert matched(found, first) == (48, True)  # one may have more
    found.allocated(first, blocks_of(range(1, 4)), 48)
    wait_until(lambda: not found._finder.is_asking("b"))
    assert found.matched(second, 0) == (None, False)
    found.on_reported({"a"}, None)
    assert matched(found, second) == (48, True)
