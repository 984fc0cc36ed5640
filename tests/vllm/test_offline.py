"""A prefill engine that is not stepped again: its lease is held when its ticket is out, whatever the engine does."""

from dataclasses import replace
from functools import partial

import pytest

from kvflow.tools.trace.joining import read_trace

from .engines import Options, records
from .pairs import FULL, await_all
from .prompts import prompt_of

LENGTH = 333
TOKENS = 8
PROMPTS = 3
LEASE_S = 300.0
"""Longer than anything here takes: a lease that has ended was read."""

OFFLINE = Options("llama", dtype="float32", served="tests.vllm.offline_engine")


@pytest.fixture(params=[(2, 1), (1, 1)] if FULL else [(2, 1)], ids=str)
def offline(request, pairs, tmp_path):
    """A pair that steps only in ``LLM.generate``, and the files with the records of each side."""
    logs = [tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl"]
    sides = [
        replace(OFFLINE, ranks=ranks, extra={"lease_s": LEASE_S, "log_file": str(log), "log_level": "debug"})
        for ranks, log in zip(request.param, logs, strict=True)
    ]
    with pairs.pair(*sides) as pair:
        yield pair, *logs


def test_a_prompt_is_read_though_its_engine_takes_no_further_step(offline):
    pair, prefill_log, decode_log = offline
    ranks = pair.prefill.options.ranks
    for number in range(PROMPTS):
        prompt = prompt_of(LENGTH, f"offline {number}")
        alone = pair.monolithic(prompt, max_tokens=TOKENS)  # here the engine steps, and frees the blocks of before
        ticket = pair.ticket(prompt)
        answer = pair.decode.generate(prompt, ticket, max_tokens=TOKENS)
        assert (answer["tokens"], answer["finish_reason"]) == (alone, "length"), pair.decode.log_tail()
        ended = await_all(partial(records, prefill_log, "lease.ended"), (number + 1) * ranks)
        assert {each["outcome"] for each in ended} == {"released"}
        assert pair.prefill.state()["held"] == 1, "it has taken a step"
    pulls = await_all(partial(records, decode_log, "transfer.completed"), PROMPTS)
    (opened,) = records(decode_log, "worker.opened")
    (block_tokens,) = pair.decode.state()["block_sizes"]
    assert [each["nbytes"] for each in pulls] == [-(-LENGTH // block_tokens) * opened["bytes_per_block"]] * PROMPTS
    assert [each["early_bytes"] for each in pulls] == [0] * PROMPTS  # a probe may come before the admission
    await_all(partial(records, decode_log, "transfer.traced"), PROMPTS)
    traced = [pull for request in read_trace([prefill_log, decode_log]).requests for pull in request.pulls]
    assert [pull.traced for pull in traced] == [True] * PROMPTS
    assert [sum(chunk[3] for chunk in pull.chunks) for pull in traced] == [each["nbytes"] for each in pulls]
    pair.prefill.generate(prompt_of(LENGTH, "another"), max_tokens=TOKENS)
    pair.settle()
