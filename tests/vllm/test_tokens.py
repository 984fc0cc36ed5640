"""What two engines say together is what one says alone, token for token."""

import pytest

from .checks import failed, reason_of
from .engines import KVFLOW, PREFILL_PARAMS
from .pairs import FULL, MODELS, MULTI, PAIRS, PARALLEL, REFUSED, REFUSED_FLOAT8, VARIANTS, chosen
from .prompts import PROMPT_LENGTHS, prompt_of
from .tampering import of_other_blocks
from .tiny_models import VOCABULARY

TOKENS = 32
FEW = (3, 150, 700)
"""Lengths of prompts for several ranks, which take seconds each, in the usual run."""
APART = REFUSED | REFUSED_FLOAT8 | MULTI
OURS = chosen(*(name for name, sides in PAIRS.items() if sides[0].connector == KVFLOW and name not in APART))
"""Every pair with kvflow's connector alone that works; ``test_multi`` has those beside others."""
CASES = [(name, length) for name in OURS for length in PROMPT_LENGTHS if FULL or name not in PARALLEL or length in FEW]
BASE = chosen(*MODELS)


@pytest.mark.proves("packed layouts (`BLHNC`, `BHLNC`)", engine="real", pairs="-packed-to-layers")
@pytest.mark.proves("hybrid models, sliding windows", engine="real", pairs="gptoss")
@pytest.mark.proves("states of Mamba and gated delta nets", engine="real", pairs="-turned")
@pytest.mark.proves("states of unequal numbers of ranks", engine="real", pairs="granite-ranks-2-to-1")
@pytest.mark.proves("unequal tensor parallelism", engine="real", pairs="-ranks-2-to-1")
@pytest.mark.proves("caches of fp8, NVFP4, int8, int4, with scales per head", engine="real", pairs="-fp8-")
@pytest.mark.proves("pipeline stages", engine="real", pairs="-stages-")
@pytest.mark.proves("unequal block sizes", engine="real", pairs="-to-128")
@pytest.mark.proves("unequal block sizes", engine="real", pairs="granite-1024-to-512")
@pytest.mark.parametrize(("pair", "length"), CASES, indirect=["pair"])
def test_two_engines_say_what_one_says(pair, length):
    prompt = prompt_of(length)
    alone = pair.monolithic(prompt)
    assert len(alone) == TOKENS
    assert len(set(alone)) > TOKENS // 4, "a model that repeats itself would prove nothing"
    assert pair.disaggregated(prompt) == alone


@pytest.mark.parametrize("pair", BASE, indirect=True)
def test_a_ticket_for_other_blocks_changes_the_tokens(pair):
    prompt = prompt_of(333)
    alone = pair.monolithic(prompt)
    # The pool is fresh or holds other prompts there: either way not this one.
    params = of_other_blocks(pair.ticket(prompt), pair.secret)
    answer = pair.decode.generate(prompt, params)
    assert answer["finish_reason"] == "length", answer
    assert answer["tokens"] != alone


@pytest.mark.parametrize(("length", "changed"), [(12, 1), (333, 332)], ids=["first token", "all but the last token"])
@pytest.mark.parametrize("pair", BASE, indirect=True)
def test_a_prompt_with_the_ticket_of_another_does_not_continue_the_other(pair, length, changed):
    # A short prompt for one token: what a recurrent state remembers of it fades.
    original = prompt_of(length)
    asked = [*((token + 1) % VOCABULARY for token in original[:changed]), *original[changed:]]
    alone = pair.monolithic(asked)
    assert pair.monolithic(original) != alone
    answer = pair.decode.generate(asked, pair.ticket(original))
    assert pair.decode.reason(answer["id"]) == "content_mismatch"
    if pair.decode.options.failure_policy == "recompute":
        assert answer["tokens"] == alone
    else:
        assert answer["finish_reason"] == "error"


@pytest.mark.parametrize("pair", chosen("llama", "gptoss", *VARIANTS, "llama-ranks-2-to-2"), indirect=True)
def test_requests_in_flight_do_not_disturb_each_other(pair):
    prompts = [prompt_of(length, "in flight") for length in PROMPT_LENGTHS]
    alone = [pair.monolithic(prompt) for prompt in prompts]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    requests = [pair.decode.submit(prompt, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
    assert [request.wait()["tokens"] for request in requests] == alone


@pytest.mark.parametrize("pair", chosen("llama", "gptoss", *VARIANTS), indirect=True)
def test_a_conversation_goes_on_over_the_same_pair(pair):
    conversation = prompt_of(200, "conversation")
    for turn in range(4):
        alone = pair.monolithic(conversation)
        answer = pair.disaggregated(conversation)
        assert answer == alone, f"turn {turn}"
        conversation += answer + prompt_of(50, f"turn {turn}")


@pytest.mark.parametrize("pair", BASE, indirect=True)
def test_a_prefill_that_asks_for_more_tokens_makes_one(pair):
    prompt = prompt_of(150)
    made = pair.prefill.generate(prompt, PREFILL_PARAMS, max_tokens=8)
    assert (len(made["tokens"]), made["finish_reason"]) == (1, "length")
    answer = pair.decode.generate(prompt, made["kv_transfer_params"])
    assert answer["tokens"] == pair.monolithic(prompt)
    # Of a router that has made more tokens elsewhere, and passes on the ticket with the prompt alone.
    refused = pair.decode.generate(prompt[:143], pair.ticket(prompt))
    assert reason_of(pair, refused) == "content_mismatch"
    assert failed(refused) or pair.decode.options.failure_policy == "recompute"
    assert "max_output_tokens" in pair.decode.log.read_text(errors="replace")
