"""Engines that keep the blocks of one request for the next: only with ``make test-vllm-full``."""

import pytest

from .pairs import CACHED
from .prompts import prompt_of


@pytest.mark.proves("prefix caching", engine="real")
@pytest.mark.parametrize("pair", CACHED, indirect=True)
def test_only_what_the_decode_engine_lacks_is_read(pair):
    prompt = prompt_of(700, "cached")
    counts = []
    for end in (400, 400, 700):
        ticket = pair.ticket(prompt[:end])
        pair.decode.state()
        answer = pair.decode.generate(prompt[:end], ticket)
        assert answer["finish_reason"] == "length", answer
        counts.append(sum(pair.decode.state()["descriptors"]))
    assert pair.decode.reset_prefix_cache()
    pair.decode.generate(prompt, pair.ticket(prompt))
    whole = sum(pair.decode.state()["descriptors"])
    first, again, longer = counts
    assert again < first
    assert longer < whole
