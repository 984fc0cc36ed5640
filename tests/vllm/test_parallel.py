"""Engines that divide the heads among ranks: one ticket names them all, and each is read, fenced and released."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import kvflow
from tests.stopping import stopped

from .checks import failed, reason_of, records_of, serves
from .engines import EngineFailed, Pair
from .pairs import FULL, LLAMA, PAIRS, PARALLEL, await_all, chosen
from .prompts import PROMPT_LENGTHS, prompt_of

LENGTH = 333
TOKENS = 8
"""Ranks wait for each other in every layer, which takes long where there are fewer cores than processes."""
FEW = 2
"""In bfloat16, of engines with other numbers of ranks: what they add in another order shows in later tokens."""
ALL = chosen(*PARALLEL)
LOGGED = [name for name in ALL if "log_file" in PAIRS[name][0].extra]
READ_BY_TWO = [name for name in ALL if PAIRS[name][1].num_ranks == 2]
HELD_UP = [name for name in LOGGED if name in READ_BY_TWO]


@pytest.mark.skipif(not FULL, reason="make test-vllm-full has it")
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_the_decode_engine_alone_says_what_both_say(pair, length):
    prompt = prompt_of(length)  # ``test_tokens`` asks the prefill engine
    tokens = TOKENS if pair.decode.options.dtype or pair.prefill.options.ranks == pair.decode.options.ranks else FEW
    assert pair.alone(pair.decode, prompt, max_tokens=tokens) == pair.disaggregated(prompt, max_tokens=tokens)


@pytest.mark.proves("pipeline stages", "unequal tensor parallelism", engine="real")
@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_one_ticket_names_every_rank_once(pair):
    prompt = prompt_of(LENGTH)
    params = pair.ticket(prompt)
    (grant,) = kvflow.Ticket.from_params(params).grants
    num_ranks = pair.prefill.options.num_ranks
    assert [rank.rank for rank in grant.ranks] == list(range(num_ranks))
    assert len({rank.endpoint for rank in grant.ranks}) == num_ranks == params["tp_size"]
    serves_ticket(pair, prompt, params)


def serves_ticket(pair, prompt, params):
    """Read a ticket, so that its lease ends, and return the answer."""
    answer = pair.decode.generate(prompt, params, max_tokens=TOKENS)
    assert answer["finish_reason"] == "length", answer
    return answer


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_each_source_rank_is_fenced_once_after_its_data(pair):
    prompt = prompt_of(LENGTH)
    serves_ticket(pair, prompt, pair.ticket(prompt))  # the ranks have met
    params = pair.ticket(prompt)
    pair.decode.ranks()
    serves_ticket(pair, prompt, params)
    read = [sources_of(rank["reads"]) for rank in pair.decode.ranks()]
    for sources in read:
        assert sources, "every rank of the reader needs some of the heads"
        for kinds in sources.values():
            # A look at the lease, again until it is admitted; the data, a fence behind them; all again if too early.
            assert re.fullmatch("(fence )*(data )+fence( (fence )*(data )+fence)*", " ".join(kinds))
    assert len({source for sources in read for source in sources}) == sources_needed(pair)


def sources_of(reads):
    """Return what was read of each agent, in order: ``data`` or ``fence``."""
    return {name: [kind for source, kind, _ in reads if source == name] for name in {read[0] for read in reads}}


def sources_needed(pair):
    """Return how many ranks of the prefill engine have something that the decode engine reads."""
    one_copy = pair.prefill.options.model == "llama-one-head" and pair.decode.options.ranks == 1
    return 1 if one_copy else pair.prefill.options.num_ranks


@pytest.mark.parametrize("pair", LOGGED, indirect=True)
def test_each_reading_rank_writes_one_record(pair):
    prompt = prompt_of(LENGTH)
    answer = serves_ticket(pair, prompt, pair.ticket(prompt))
    records = await_all(lambda: records_of(pair.decode, answer["id"]), pair.decode.options.num_ranks)
    assert sorted(record["rank"] for record in records) == list(range(pair.decode.options.num_ranks))
    assert {record["event"] for record in records} == {"transfer.completed"}
    if pair.decode.options.stages == 1:
        assert len({record["nbytes"] for record in records}) == 1, "the ranks have equal shares"


@pytest.mark.parametrize("pair", HELD_UP, indirect=True)
def test_a_lease_ends_with_its_last_reader(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.monolithic(prompt, max_tokens=TOKENS)
    serves_ticket(pair, prompt, pair.ticket(prompt))  # the ranks have met
    params = pair.ticket(prompt)
    with stopped(pair.decode.ranks()[1]["pid"]):
        request = pair.decode.submit(prompt, params, max_tokens=TOKENS)
        # Of rank 0, which gives the ticket back at once.
        await_all(lambda: records_of(pair.decode, request.request_id))
        pair.prefill.generate(prompt)  # dozens of steps: what has ended would be known
        assert pair.prefill.state()["held"] == 1
    assert request.wait()["tokens"] == alone
    pair.settle()


@pytest.mark.parametrize("broken", [0, 1] if FULL else [1])
@pytest.mark.parametrize("pair", READ_BY_TWO, indirect=True)
def test_a_request_fails_if_one_rank_cannot_read(pair, broken):
    prompt = prompt_of(LENGTH)
    alone = pair.alone(pair.decode, prompt, max_tokens=TOKENS)
    ticket = pair.ticket(prompt)
    pair.decode.ranks(broken=broken)
    answer = pair.decode.generate(prompt, ticket, max_tokens=TOKENS)
    assert reason_of(pair, answer) == "transfer_failed"
    match pair.decode.options.failure_policy:
        case "fail":
            assert failed(answer), answer
        case "recompute":
            assert answer["tokens"] == alone
    pair.settle()  # both ranks have given the ticket back
    serves(pair)


@contextmanager
def two_stages(pairs, read_held: str) -> Iterator[tuple[Pair, list[int], object]]:
    """Start engines of two stages each, and hold the read of the second; yield them, a prompt, and its request."""
    options = replace(LLAMA, stages=2, failure_policy="recompute", dtype="float32", extra={"lease_s": 6.0})
    with pairs.pair(options) as pair:
        first = prompt_of(LENGTH, "before")
        assert pair.disaggregated(first, max_tokens=TOKENS) == pair.alone(pair.decode, first, max_tokens=TOKENS)
        prompt = prompt_of(LENGTH)
        ticket = pair.ticket(prompt)
        pair.decode.ranks(held=(1, read_held))
        request = pair.decode.submit(prompt, ticket, max_tokens=TOKENS)
        await_all(lambda: [rank for rank in pair.decode.ranks() if rank["held"] == "reached"])
        yield pair, prompt, request


@pytest.mark.proves("pipeline stages", engine="real")
@pytest.mark.skipif(not FULL, reason="make test-vllm-full has it")
@pytest.mark.parametrize("at", ["data", "fence"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_prefill_stage_is_killed_in_mid_read(pairs, at, killed):
    with two_stages(pairs, at) as (pair, prompt, request):
        os.kill(pair.prefill.ranks()[killed]["pid"], signal.SIGKILL)
        pair.decode.ranks(held=(1, ""))
        answer = request.wait()
        assert answer["tokens"] == pair.alone(pair.decode, prompt, max_tokens=TOKENS)
        if killed:  # or its read was over, or vLLM has ended the other stages by now
            assert reason_of(pair, answer) in {"peer_lost", "stale_lease", "transfer_failed"}
        pair.decode.settle()


@pytest.mark.skipif(not FULL, reason="make test-vllm-full has it")
def test_a_decode_stage_is_killed_in_mid_read(pairs):
    with two_stages(pairs, "data") as (pair, prompt, request):
        alone = pair.alone(pair.prefill, prompt, max_tokens=TOKENS)
        os.kill(pair.decode.ranks()[1]["pid"], signal.SIGKILL)
        pair.prefill.settle()
        assert pair.alone(pair.prefill, prompt, max_tokens=TOKENS) == alone
        with pytest.raises(EngineFailed):
            request.wait()
