"""Draft models on both sides or on one: tokens are those of one engine, and what is accepted tells what was read."""

import pytest

from .engines import records
from .pairs import DRAFTS, FULL, RANKS_LOG, await_all, chosen
from .prompts import prompt_of
from .test_refused import refused

LENGTHS = (40, 150, 333, 700)
TOKENS = 48
DRAFT_LAYER = "model.layers.4.self_attn.attn"
ALL = chosen(*DRAFTS)


def drafts(engine):
    """Return how many tokens an engine has drafted, and how many of them it has accepted."""
    answer = engine.obey("drafts")
    return answer["draft"], answer["accepted"]


def accepted_by(engine, generate):
    """Return how many drafted tokens an engine accepted while it generated."""
    before = drafts(engine)
    generate()
    drafted, accepted = (after - earlier for after, earlier in zip(drafts(engine), before, strict=True))
    assert drafted >= accepted
    return accepted


def accepted(pair):
    """Return what the decode engine accepts alone, and what it does behind the other, for the same tokens.

    Their shares differ a little: vLLM counts two drafted tokens more for a request whose prompt it has loaded.
    """
    prompts = [prompt_of(length, "drafts") for length in LENGTHS]
    alone = accepted_by(pair.decode, lambda: [pair.alone(pair.decode, each, max_tokens=TOKENS) for each in prompts])
    return alone, accepted_by(pair.decode, lambda: [pair.disaggregated(each, max_tokens=TOKENS) for each in prompts])


def omitted(pair):
    """Return the warnings of the decode engine about layers of one side."""
    return [each for each in records(RANKS_LOG, "layers.omitted") if each["engine_id"] == pair.decode.name]


@pytest.mark.proves("draft models", engine="real", pairs="llama-drafts")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_both_engines_say_what_one_says(pair, length):
    prompt = prompt_of(length)
    tokens = pair.disaggregated(prompt, max_tokens=TOKENS)
    assert tokens == pair.monolithic(prompt, max_tokens=TOKENS)
    assert tokens == pair.alone(pair.decode, prompt, max_tokens=TOKENS)
    assert len(set(tokens)) > TOKENS // 2, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("pair", chosen("llama-drafts-both"), indirect=True)
def test_as_many_drafts_are_accepted_as_by_one_engine(pair):
    alone, both = accepted(pair)
    assert both == pytest.approx(alone, rel=0.02)
    assert alone > len(LENGTHS) * TOKENS / 4
    assert not omitted(pair)


@pytest.mark.parametrize("pair", chosen("llama-drafts-decode"), indirect=True)
def test_drafts_of_the_decode_engine_alone_are_accepted_less(pair):
    alone, both = accepted(pair)
    assert 0 < both < alone
    (warning,) = await_all(lambda: omitted(pair))
    assert (warning["level"], warning["side"], warning["layers"]) == ("warning", "target", DRAFT_LAYER)
    assert "fewer drafts accepted" in warning["detail"]


@pytest.mark.parametrize("pair", chosen("llama-drafts-prefill"), indirect=True)
def test_drafts_of_the_prefill_engine_alone_are_warned_of_once(pair):
    for number in range(2):
        pair.disaggregated(prompt_of(LENGTHS[0], f"unused {number}"))
    (warning,) = await_all(lambda: omitted(pair))
    assert (warning["level"], warning["side"], warning["layers"]) == ("warning", "source", DRAFT_LAYER)


@pytest.mark.skipif(not FULL, reason="takes two engines")
@pytest.mark.parametrize("pair", ["llama-drafts-never"], indirect=True)
def test_a_draft_model_that_may_not_be_rebuilt_is_missed_by_name(pair):
    refused(pair, prompt_of(LENGTHS[0]))
    assert f"target has ['{DRAFT_LAYER}']" in pair.decode.log.read_text(errors="replace")
