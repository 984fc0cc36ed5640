"""Reads that fail, requests that are aborted: what is asked for next is right, and every block comes back."""

import threading

import pytest

from .checks import LENGTH, abort_prefills, abort_reads, expect_policy, failed, serves
from .howto import log_line
from .pairs import LEASE_S, chosen
from .prompts import prompt_of

PATIENCE_S = 60.0
RANKS = "llama-ranks-2-to-2"
"""Two ranks on both sides: what ends, ends for both."""


@pytest.mark.proves("`kv_load_failure_policy`", engine="real")
@pytest.mark.parametrize("pair", chosen("llama", "gptoss", "llama-recompute", "gptoss-fail", RANKS), indirect=True)
def test_a_ticket_that_is_used_up_fails_or_is_computed_again(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    ticket = pair.ticket(prompt)
    assert pair.decode.generate(prompt, ticket)["tokens"] == alone
    pair.settle()
    answer = pair.decode.generate(prompt, ticket)
    expect_policy(pair, answer, alone, {"stale_lease"})
    assert log_line("failed: request").search(pair.decode.log.read_text(errors="replace"))
    serves(pair)


@pytest.mark.parametrize("pair", chosen(RANKS), indirect=True)
def test_a_ticket_that_nobody_uses_expires(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt)
    ticket = pair.ticket(prompt)
    # As of a request that the decode engine rejects before it is admitted.
    rejected = pair.decode.generate(prompt_of(LENGTH) * 5, ticket)
    assert "error" in rejected
    pair.prefill.wait_state(lambda state: state["held"] == 0, LEASE_S + PATIENCE_S)
    expect_policy(pair, pair.decode.generate(prompt, ticket), alone, {"stale_lease"})


@pytest.mark.parametrize("pair", chosen("llama", "gptoss", "granite", RANKS), indirect=True)
def test_a_decode_request_is_aborted_before_and_while_it_reads(pair):
    abort_reads(pair)
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama", "gptoss", "granite", RANKS), indirect=True)
def test_a_decode_request_is_aborted_while_it_decodes(pair):
    prompt = prompt_of(LENGTH)
    several = threading.Event()
    request = pair.decode.submit(
        prompt, pair.ticket(prompt), max_tokens=600, progress=lambda tokens: tokens > 3 and several.set()
    )
    assert several.wait(PATIENCE_S)
    request.abort()
    assert request.wait()["finish_reason"] == "abort"
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama", "gptoss", "granite", RANKS), indirect=True)
def test_a_prefill_request_is_aborted(pair):
    abort_prefills(pair)
    serves(pair)


@pytest.mark.parametrize("pair", chosen("llama", RANKS), indirect=True)
def test_one_of_several_requests_fails_alone(pair):
    prompts = [prompt_of(length, "several") for length in (40, 150, 333, 700)]
    alone = [pair.monolithic(prompt) for prompt in prompts]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    spoiled = prompt_of(LENGTH)
    used = pair.ticket(spoiled)
    pair.decode.generate(spoiled, used)
    pair.decode.state()
    requests = [pair.decode.submit(prompt, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
    late = pair.decode.submit(spoiled, used)
    assert [request.wait()["tokens"] for request in requests] == alone
    assert failed(late.wait())
