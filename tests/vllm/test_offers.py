"""What a prefill engine offers: one ticket for all samples of a prompt, and with ``offer: "always"`` every prefill."""

import sys
import time
from dataclasses import replace

import pytest

from kvflow.integrations.vllm.params import UNTAGGED_MAX
from tests.stopping import stopped

from .engines import PREFILL_PARAMS, Options
from .pairs import FULL, chosen
from .prompts import prompt_of

LENGTH = 240
"""Of four samples, which fit into one step: where a prompt is cut decides about the last bits of a state."""


def asked_for(pair, prompt, **named):
    """Prefill a prompt; return the answer, how many blocks that keeps, and how many requests keep some."""
    answer = pair.prefill.generate(prompt, PREFILL_PARAMS, **named)
    state = pair.prefill.state()
    return answer, pair.prefill.free_blocks - state["free_blocks"], state["held"]


def expect_read(pair, prompt, params, **named):
    """Check that the decode engine reads a ticket, and says what one engine says."""
    alone = pair.monolithic(prompt)
    pair.decode.ranks()
    answer = pair.decode.generate(prompt, params, **named)
    assert not (reason := pair.decode.reason(answer["id"])), reason
    assert answer["tokens"] == alone
    [rank] = pair.decode.ranks()
    assert sum(descriptors for _, kind, descriptors in rank["reads"] if kind == "data") > 0


@pytest.mark.parametrize(("n", "max_tokens"), [(2, 1), (4, 5)])
@pytest.mark.parametrize("pair", chosen("llama", "gptoss", "granite", "qwen3next", "llama-cached"), indirect=True)
def test_all_samples_of_a_prompt_keep_the_blocks_of_one(pair, n, max_tokens):
    single, several = (prompt_of(LENGTH, f"{samples} of {n}, {max_tokens}") for samples in (1, n))
    answer, kept, held = asked_for(pair, single, max_tokens=1)
    assert held == 1
    expect_read(pair, single, answer["kv_transfer_params"])
    pair.settle()
    answer, kept_by_all, held = asked_for(pair, several, n=n, max_tokens=max_tokens)
    assert len(answer["samples"]) == n
    assert (kept_by_all, held) == (kept, 1)
    expect_read(pair, several, answer["kv_transfer_params"])


# Offers that no client asked for. Leases outlast every patience: what is kept is free when it is read.

LASTING = {"lease_s": 600.0, "unread_s": 600.0}
NUM_BLOCKS = 64
SMALL = {"num_gpu_blocks_override": NUM_BLOCKS}


@pytest.fixture(scope="module", params=["llama", "granite"] if FULL else ["llama"])
def always(request, pairs):
    """A prefill engine that is never asked, with few blocks, and a decode engine."""
    decode = Options(request.param, extra=LASTING)
    prefill = replace(decode, extra=LASTING | {"offer": "always"}, llm=SMALL)
    with pairs.pair(prefill, decode) as pair:
        yield pair


def warnings_of(engine):
    return [line for line in engine.log.read_text().splitlines() if "kvflow: none of the last" in line]


def test_a_decode_engine_that_is_never_given_a_ticket_says_so_once(always):
    prompt = prompt_of(30, "untagged")
    for _ in range(UNTAGGED_MAX - 1):
        always.decode.generate(prompt, max_tokens=1)
    assert not warnings_of(always.decode)
    for _ in range(6):
        always.decode.generate(prompt, max_tokens=1)
    [line] = warnings_of(always.decode)
    assert "--vllm-pd-disaggregation" in line
    always.decode.generate(prompt, {"do_remote_prefill": False}, max_tokens=1)
    assert "a request with kv_transfer_params has arrived, after 25 without" in always.decode.log.read_text()


def prefill_unasked(pair, prompt, **named):
    return pair.prefill.generate(prompt, max_tokens=1, **named)["kv_transfer_params"]


def test_a_prefill_that_nobody_asked_for_is_read_by_the_decode_engine(always):
    prompt = prompt_of(LENGTH, "unasked")
    expect_read(always, prompt, prefill_unasked(always, prompt))
    always.settle()


def test_a_prompt_that_is_answered_by_the_prefill_engine_is_not_offered(always):
    answer = always.prefill.generate(prompt_of(LENGTH, "whole"), max_tokens=2)
    assert (answer["kv_transfer_params"], len(answer["tokens"])) == (None, 2)
    always.settle()


def test_samples_that_nobody_asked_for_are_offered_once(always):
    prompt = prompt_of(LENGTH, "unasked samples")
    params = prefill_unasked(always, prompt, n=4)
    assert always.prefill.state()["held"] == 1
    expect_read(always, prompt, params)
    always.settle()


def test_tickets_that_nobody_takes_leave_the_engine_half_of_its_blocks(always):
    prompts = [prompt_of(LENGTH, f"untaken {number}") for number in range(24)]
    tickets = [prefill_unasked(always, prompt) for prompt in prompts]
    taken = [(prompt, params) for prompt, params in zip(prompts, tickets, strict=True) if params["do_remote_prefill"]]
    state = always.prefill.state()
    assert 1 < len(taken) == state["held"] < len(prompts)
    assert state["free_blocks"] >= NUM_BLOCKS // 2 - 1
    # A prompt that asks is served and offered beside them, and each of them is still good.
    asked = prompt_of(LENGTH, "asked beside")
    for prompt, params in [*taken, (asked, always.ticket(asked))]:
        expect_read(always, prompt, params)
    always.settle()
    expect_read(always, prompts[-1], prefill_unasked(always, prompts[-1]))
    always.settle()
    assert not warnings_of(always.prefill), "it need not be asked"


BRIEF_S, UNREAD_S = 30.0, 4.0


@pytest.fixture(scope="module")
def brief(pairs):
    """A prefill engine with few blocks, where unread offers beyond half of them end soon, and a decode engine."""
    decode = Options("llama", extra={"lease_s": BRIEF_S})
    prefill = replace(decode, extra={"lease_s": BRIEF_S, "unread_s": UNREAD_S}, llm=SMALL)
    with pairs.pair(prefill, decode) as pair:
        yield pair


def test_a_prefill_engine_goes_on_though_its_decode_engine_has_stopped(brief, capsys):
    free = brief.prefill.state()["free_blocks"]
    prompts = [prompt_of(LENGTH, f"of a stopped engine {number}") for number in range(NUM_BLOCKS)]
    tickets, waited_s = [], []
    with stopped(brief.decode.pid):
        for prompt in prompts:  # together they need more blocks than there are
            begun_s = time.monotonic()
            tickets.append(brief.ticket(prompt))
            waited_s.append(time.monotonic() - begun_s)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(tickets)} tickets of {free} blocks; one waits for at most {max(waited_s):.1f} s")
    assert max(waited_s) < BRIEF_S / 2
    assert "outcome=unread" in brief.prefill.log.read_text()
    expect_read(brief, prompts[-1], tickets[-1])
    answer = brief.decode.generate(prompts[0], tickets[0])
    assert brief.decode.reason(answer["id"]) == "stale_lease"
    assert "ran short of blocks" in brief.decode.log.read_text()
    brief.prefill.settle(2 * BRIEF_S)
    brief.settle()
