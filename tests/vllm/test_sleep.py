"""An engine sleeps and wakes: what it says afterwards is what it said before, and old tickets are void."""

import pytest

from .checks import failed, reason_of, serves
from .pairs import chosen
from .prompts import prompt_of

LENGTH = 333
VOID = {"stale_lease", "peer_lost", "peer_unavailable"}
"""A reader that has slept itself has forgotten who said goodbye, and with port 0 nobody is where they were."""


def void(pair, prompt, ticket):
    """Return whether a ticket is refused."""
    answer = pair.decode.generate(prompt, ticket)
    return failed(answer) and reason_of(pair, answer) in VOID


@pytest.mark.proves("sleep and wake", engine="stand-in")
@pytest.mark.parametrize("sleepers", [("prefill",), ("decode",), ("prefill", "decode")], ids="+".join)
@pytest.mark.parametrize("pair", chosen("llama", "gptoss-fail", "llama-packed", "llama-cached"), indirect=True)
def test_engines_that_have_slept_say_the_same_as_before(pair, sleepers):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    assert pair.disaggregated(prompt) == alone
    used = pair.ticket(prompt)
    assert pair.decode.generate(prompt, used)["tokens"] == alone
    pair.settle()
    for name in sleepers:
        getattr(pair, name).sleep()
    for name in sleepers:
        getattr(pair, name).wake()
    assert pair.disaggregated(prompt) == alone
    assert void(pair, prompt, used)
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama", "gptoss-fail"), indirect=True)
def test_a_ticket_is_void_when_its_engine_sleeps_and_stays_so(pair):
    """vLLM itself waits for every ticket before it sleeps; here its workers sleep while one is out."""
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    assert pair.disaggregated(prompt) == alone
    old = pair.ticket(prompt)
    pair.prefill.sleep(beneath=True)
    assert void(pair, prompt, old)
    pair.prefill.wake(beneath=True)
    assert void(pair, prompt, old)
    pair.settle()
    assert pair.disaggregated(prompt) == alone
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama"), indirect=True)
def test_what_a_sleeping_engine_is_asked_to_load_fails(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    pair.decode.sleep(beneath=True)
    ticket = pair.ticket(prompt)
    answer = pair.decode.generate(prompt, ticket)
    assert failed(answer), answer
    assert reason_of(pair, answer) == "worker_suspended"
    pair.decode.wake(beneath=True)
    answer = pair.decode.generate(prompt, ticket)  # it was not given back: nobody could
    assert answer["tokens"] == alone or reason_of(pair, answer) == "stale_lease"
    serves(pair)
