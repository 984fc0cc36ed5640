"""What tests ask of a pair after a request, and what must have become of it."""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from .engines import PREFILL_PARAMS, Engine, Pair, records
from .pairs import RANKS_LOG
from .prompts import prompt_of

LENGTH = 300


def failed(answer: Mapping[str, Any]) -> bool:
    """Return whether a request has ended with an error."""
    return answer.get("finish_reason") == "error" or "error" in answer


def reason_of(pair: Pair, answer: Mapping[str, Any]) -> str:
    """Return the code of the error with which a decode request has ended."""
    return pair.decode.reason(answer["id"])


def records_of(engine: Engine, request_id: str) -> list[dict[str, Any]]:
    """Return the records of a request's transfers, of all ranks of the engine that read."""
    return [
        record
        for record in records(RANKS_LOG, having=request_id)
        if record["engine_id"] == engine.name and record.get("local_request_id", "").startswith(f"{request_id}-")
    ]


def expect_policy(pair: Pair, answer: Mapping[str, Any], alone: Sequence[int], reasons: Collection[str]) -> None:
    """Check why the decode engine could not read a prompt, and that it has failed or computed it, as it was told."""
    assert reason_of(pair, answer) in reasons
    if pair.decode.options.failure_policy == "recompute":
        assert answer["tokens"] == alone
    else:
        assert failed(answer), answer


def abort_reads(pair: Pair) -> None:
    """Abort decode requests before and while they read."""
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1):
        prompt = prompt_of(700, f"aborted after {delay_s}")
        request = pair.decode.submit(prompt, pair.ticket(prompt))
        time.sleep(delay_s)
        request.abort()
        assert request.wait()["finish_reason"] in ("abort", "length")


def abort_prefills(pair: Pair) -> None:
    """Abort prefill requests. One may be faster; its ticket must not keep blocks for long."""
    prompts = [prompt_of(700, f"aborted prefill {number}") for number in range(4)]
    requests = [pair.prefill.submit(prompt, PREFILL_PARAMS, max_tokens=1) for prompt in prompts]
    for request in requests:
        request.abort()
    for prompt, request in zip(prompts, requests, strict=True):
        answer = request.wait()
        if answer["finish_reason"] != "abort":
            assert pair.decode.generate(prompt, answer["kv_transfer_params"])["finish_reason"] == "length"


def serves(pair: Pair, params: Mapping[str, Any] | None = None) -> None:
    """Check that the pair still says what one engine says; use the ticket that is there, so that its lease ends."""
    prompt = prompt_of(LENGTH)
    answer = pair.decode.generate(prompt, params or pair.ticket(prompt))
    assert answer["finish_reason"] == "length", answer
    assert answer["tokens"] == alone(pair)


@cache
def alone(pair: Pair) -> list[int]:
    """Return what one engine of a pair says of the prompt of ``serves``; it is asked once."""
    return pair.monolithic(prompt_of(LENGTH))
