"""How much NIXL is asked for, beside what vLLM's own connector asks it for on the same prompts."""

import pytest

from .pairs import BESIDE, FULL, chosen
from .prompts import prompt_of

LENGTHS = (40, 150, 333)
"""One block of 128 tokens, two, and three."""

OWN = {
    "llama": (4, 8, 12),
    "gptoss": (4, 8, 8),
    "granite": (13, 13, 14),
    "gemma3": (6, 12, 8),
    "qwen3next": (13, 14, 15),
    "llama-packed": (4, 8, 12),
    "llama-packed-heads-first": (1, 2, 3),
    "gptoss-packed": (4, 8, 8),
}
"""Descriptors that vLLM's NixlConnector asks for, as measured; ``make test-vllm-full`` measures them again."""

MEASURED = chosen(*OWN) + ([*BESIDE] if FULL else [])


def reads_of(pair, length):
    """Return the descriptors of each read that NIXL was asked for by one request, in order.

    A ticket is in a router's hands before its lease is held, which the prefill engine's next step sees to. Whoever is
    faster than that reads more.
    """
    prompt = prompt_of(length)
    ticket = pair.ticket(prompt)
    first = pair.prefill.state()["steps"]
    pair.prefill.wait_state(lambda state: state["steps"] >= first + 2)
    pair.decode.state()
    assert pair.decode.generate(prompt, ticket)["finish_reason"] == "length"
    return pair.decode.state()["descriptors"]


@pytest.mark.proves("packed layouts (`BLHNC`, `BHLNC`)", engine="real", pairs="-packed-heads-first")
@pytest.mark.parametrize("pair", MEASURED, indirect=True)
def test_no_more_descriptors_than_the_engines_own_connector(pair, request):
    name = request.node.callspec.params["pair"]
    own = OWN[name.removesuffix("-nixl")]
    requests = [reads_of(pair, length) for length in LENGTHS]
    if name in BESIDE:
        assert [sum(reads) for reads in requests] == list(own)
        return
    for reads, limit in zip(requests, own, strict=True):
        assert reads[0] == reads[-1] == 1, "the fences"
        assert sum(reads[1:-1]) <= limit
