"""Caches are reset while tickets are out and loads are under way, as after an update of the weights."""

import pytest

from tests.stopping import stopped

from .asking import LENGTH
from .checks import failed, reason_of, serves
from .pairs import FULL, chosen
from .prompts import prompt_of

TOKENS = 8
LONG = 200  # so long that the state of the engine is asked meanwhile
PAIRS = ["llama", "granite", "llama-ranks-2-to-1", *(["gptoss", "llama-cached", "gptoss-ranks-1-to-2"] if FULL else [])]
FORCED = {"external": {"external": True}, "running": {"running": True}, "both": {"running": True, "external": True}}


@pytest.mark.parametrize("flags", FORCED.values(), ids=FORCED)
@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_a_reset_succeeds_while_tickets_are_out_and_ends_them(pair, flags):
    prompts = [prompt_of(LENGTH, f"reset {number}") for number in range(3)]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    assert pair.prefill.reset_prefix_cache(**flags)
    assert pair.prefill.state()["free_blocks"] == pair.prefill.free_blocks
    alone = pair.alone(pair.decode, prompts[0], max_tokens=TOKENS)
    for prompt, old in zip(prompts, tickets, strict=True):
        answer = pair.decode.generate(prompt, old, max_tokens=TOKENS)
        assert reason_of(pair, answer) == "stale_lease"
        assert failed(answer) or pair.decode.options.failure_policy == "recompute"
    pair.settle()
    assert pair.disaggregated(prompts[0], max_tokens=TOKENS) == alone
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama"), indirect=True)
def test_a_reset_of_the_prefix_cache_alone_leaves_tickets(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    kept = pair.ticket(prompt)
    assert not pair.prefill.reset_prefix_cache()
    assert pair.decode.generate(prompt, kept)["tokens"] == alone


@pytest.mark.parametrize("pair", chosen("gptoss-ranks-1-to-2", "llama-ranks-2-to-2"), indirect=True)
def test_loads_of_several_ranks_are_dropped_and_computed(pair):
    """If the ranks have met, the load may end nevertheless: then the request runs, long enough to be seen."""
    prompt = prompt_of(LENGTH)
    alone = pair.alone(pair.decode, prompt, max_tokens=LONG)
    given = pair.ticket(prompt)
    with stopped(pair.prefill.ranks()[0]["pid"]):
        request = pair.decode.submit(prompt, given, max_tokens=LONG)
        pair.decode.wait_state(lambda state: state["free_blocks"] < pair.decode.free_blocks)
        assert pair.decode.reset_prefix_cache(running=True, external=True)
    assert request.wait()["tokens"] == alone  # who is silent for half a minute would get no release
    pair.settle()
    serves(pair)
