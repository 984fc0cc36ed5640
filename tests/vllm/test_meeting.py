"""A prefill and a decode engine that get a request at the same time: the decode engine reads what is computed."""

import os
import signal
from dataclasses import replace

import pytest

from tests.helpers.waiting import wait_until
from tests.ports import free_port

from .checks import expect_policy, records_of
from .engines import PREFILL_PARAMS, Engine, Options
from .pairs import FULL, RANKS_LOG, RENEWED_S, await_all, model_folder
from .prompts import prompt_of

CHUNK = 128  # tokens of a step
LENGTHS = (40, 128, 257, 700, 990)
TOKENS = 8
BASE = Options("llama", block_size=32)
SIDES = {  # options of both sides, and ranks of the prefill engine
    "llama": (BASE, 1),
    "gptoss": (replace(BASE, model="gptoss", dtype="float32", failure_policy="recompute"), 1),
    "granite": (replace(BASE, model="granite", block_size=0), 1),
    "lfm2": (replace(BASE, model="lfm2", block_size=0, dtype="float32"), 1),
    "llama-2-to-1": (replace(BASE, dtype="float32"), 2),
}
CUT = ("lfm2",)
"""Models whose tokens depend on where vLLM cuts a prompt: they are compared with one read after the same cuts."""
GONE = ("peer_lost", "peer_closed", "stale_lease")
"""Codes of a read whose prefill engine stops."""


@pytest.fixture(scope="module", params=list(SIDES) if FULL else ["llama-2-to-1", "gptoss"])
def meeting(request, pairs):
    """A pair whose decode engine asks its prefill engine, and the parameters that a router sends to the former."""
    base, ranks = SIDES[request.param]
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    prefill = replace(
        base,
        ranks=ranks,
        extra={"lease_s": RENEWED_S, "dispatch": "concurrent", "bind": endpoint},
        llm={"max_num_batched_tokens": CHUNK},
        served="tests.vllm.open_engine",
    )
    finds = {"rendezvous_from": [endpoint], "rendezvous_s": 60.0, "follow_bytes_min": 1, "log_file": str(RANKS_LOG)}
    decode = replace(base, extra={"lease_s": RENEWED_S} | finds, served="tests.vllm.open_engine")
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": port}
    with pairs.pair(prefill, decode) as pair:
        yield pair, params


@pytest.fixture(autouse=True)
def settled(meeting):
    """After every test, nothing that had settled was written again, and every block of both sides is free."""
    yield
    pair, _ = meeting
    for op, fields in (("preempt", {"times": 0}), ("gather", {"number": 0}), ("halt", {"tokens": 0})):
        pair.prefill.obey(op, **fields)
    for rank in pair.prefill.obey("opened")["ranks"]:
        assert [each for each in rank["ended"] if not each[3]] == []
    pair.settle()


def both(meeting, prompt, *, decode_first):
    """Give a request to both sides at the same time; return the two requests, the prefill engine's first."""
    pair, params = meeting
    sides = [(pair.prefill, PREFILL_PARAMS, 1), (pair.decode, params, TOKENS)]
    started = [
        engine.submit(prompt, given, max_tokens=tokens)
        for engine, given, tokens in (reversed(sides) if decode_first else sides)
    ]
    return started[::-1] if decode_first else started


def expect(meeting, prompt, answer, *, reasons=()):
    """Check that the decode engine says what one engine says, or has failed for one of these reasons."""
    pair, _ = meeting
    if answer["finish_reason"] == "error":
        assert pair.decode.reason(answer["id"]) in reasons
    else:
        alone = pair.disaggregated if pair.prefill.options.model in CUT else pair.monolithic
        assert answer["tokens"] == alone(prompt, max_tokens=TOKENS)


@pytest.mark.parametrize("decode_first", [True, False])
def test_a_prompt_is_read_while_it_is_computed(meeting, decode_first):
    for length in LENGTHS:
        prompt = prompt_of(length, f"met {decode_first}")
        started = both(meeting, prompt, decode_first=decode_first)
        _, answer = [request.wait() for request in started]
        expect(meeting, prompt, answer)


def test_equal_prompts_at_once_are_all_answered(meeting):
    prompt = prompt_of(333, "equal")
    started = [both(meeting, prompt, decode_first=bool(number % 2)) for number in range(4)]
    for _, decode in started:
        expect(meeting, prompt, decode.wait())
    for prefill, _ in started:
        prefill.wait()


def test_a_prompt_that_is_preempted_is_not_mixed_up(meeting):
    pair, _ = meeting
    for number in range(6):
        pair.prefill.obey("preempt", times=1 + number)
        prompt = prompt_of(700, f"preempted {number}")
        started = both(meeting, prompt, decode_first=True)
        _, answer = [request.wait() for request in started]
        expect(meeting, prompt, answer, reasons={"stale_lease"})


def test_a_prefill_that_is_aborted_fails_its_decode_leg_at_once(meeting):
    pair, _ = meeting
    prompt = prompt_of(500, "aborted")
    alone = pair.monolithic(prompt, max_tokens=TOKENS)
    pair.prefill.obey("gather", number=2)  # the step that would compute it waits for another
    prefill, decode = both(meeting, prompt, decode_first=True)
    wait_until(lambda: pair.decode.obey("waiting")["number"])  # it has the ticket
    prefill.abort()
    expect_policy(pair, decode.wait(), alone, {"stale_lease"})


def test_a_reset_leaves_no_wrong_token(meeting):
    pair, _ = meeting
    for number in range(4):
        prompt = prompt_of(990, f"reset {number}")
        started = both(meeting, prompt, decode_first=True)
        pair.prefill.wait_state(lambda state: state["held"] >= 1)
        pair.prefill.reset_prefix_cache(running=True, external=True)
        _, answer = [request.wait() for request in started]
        expect(meeting, prompt, answer, reasons={"stale_lease"})


def serves_again(meeting, pairs):
    """Start the prefill engine again, and have it met."""
    pair, _ = meeting
    old, folder = pair.prefill, model_folder(pair.prefill.options.model)
    given = {"role": "kv_producer", "name": old.name, "secret": pair.secret, "nursery": pairs.nursery}
    pair.prefill = Engine(old.options, folder, **given).wait_ready()
    for length in LENGTHS:
        prompt = prompt_of(length, "after the restart")
        started = both(meeting, prompt, decode_first=True)
        _, answer = [request.wait() for request in started]
        expect(meeting, prompt, answer)


@pytest.mark.skipif(not FULL, reason="one more engine starts")
def test_a_prefill_engine_that_restarts_is_met_again(meeting, pairs):
    pair, _ = meeting
    prompt = prompt_of(500, "restarted")
    alone = pair.monolithic(prompt, max_tokens=TOKENS)
    pair.prefill.obey("gather", number=2)  # so it stops before it has computed anything
    _, decode = both(meeting, prompt, decode_first=True)
    pair.prefill.wait_state(lambda state: state["held"] == 1)
    pair.prefill.stop()
    expect_policy(pair, decode.wait(), alone, GONE)
    serves_again(meeting, pairs)


def test_a_prefill_engine_is_killed_while_it_is_met(meeting, pairs):
    """Of one prompt some ranges have been read, of the other nothing is computed."""
    pair, _ = meeting
    prompts = [prompt_of(700, f"killed {number}") for number in range(2)]
    alone = [pair.monolithic(prompt, max_tokens=TOKENS) for prompt in prompts]
    pair.prefill.obey("gather", number=2)
    pair.prefill.obey("halt", tokens=2 * CHUNK)
    (_, reading), (_, waiting) = [both(meeting, prompt, decode_first=True) for prompt in prompts]
    wait_until(lambda: pair.decode.obey("waiting")["number"] == 1)
    wait_until(
        lambda: [phase for phase, read in pair.decode.obey("opened")["ranks"][0]["pulls"] if read] == ["compute"]
    )
    for pid in {pair.prefill.pid, *(rank["pid"] for rank in pair.prefill.ranks())}:
        os.kill(pid, signal.SIGKILL)
    pair.prefill.stop()
    for request, tokens in zip((reading, waiting), alone, strict=True):
        expect_policy(pair, request.wait(), tokens, GONE)
    read = []
    for request in (reading, waiting):
        [record] = await_all(lambda name=request.request_id: records_of(pair.decode, name))
        read.append(record["nbytes"] > 0)
    assert read == [True, False]
    serves_again(meeting, pairs)
