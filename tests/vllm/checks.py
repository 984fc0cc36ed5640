"""What tests ask of a pair after a request, and what must have become of it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .engines import Engine, Pair
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
    with RANKS_LOG.open() as lines:
        records = [json.loads(line) for line in lines if request_id in line and engine.name in line]
    return [
        record
        for record in records
        if record["engine_id"] == engine.name and record.get("local_request_id", "").startswith(f"{request_id}-")
    ]


def expect_policy(pair: Pair, answer: Mapping[str, Any], alone: Sequence[int], reasons: Collection[str]) -> None:
    """Check why the decode engine could not read a prompt, and that it has failed or computed it, as it was told."""
    assert reason_of(pair, answer) in reasons
    if pair.decode.options.failure_policy == "recompute":
        assert answer["tokens"] == alone
    else:
        assert failed(answer), answer


def serves(pair: Pair, params: Mapping[str, Any] | None = None) -> None:
    """Check that the pair still says what one engine says; use the ticket that is there, so that its lease ends."""
    prompt = prompt_of(LENGTH)
    answer = pair.decode.generate(prompt, params or pair.ticket(prompt))
    assert answer["finish_reason"] == "length", answer
    assert answer["tokens"] == pair.monolithic(prompt)
