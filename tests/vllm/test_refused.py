"""Engines that could not read each other say so, and each goes on by itself."""

import pytest

from .checks import failed, reason_of
from .pairs import FULL, REFUSED, REFUSED_FLOAT8
from .prompts import prompt_of

LENGTH = 333


def refused(pair, prompt):
    answer = pair.decode.generate(prompt, pair.ticket(prompt))
    assert reason_of(pair, answer) == "layout_mismatch"
    assert failed(answer), answer


@pytest.mark.proves("states of unequal numbers of ranks", engine="real", pairs="lfm2")
@pytest.mark.skipif(not FULL, reason="takes two engines each")
@pytest.mark.parametrize("pair", REFUSED, indirect=True)
def test_caches_that_do_not_fit_are_refused(pair):
    prompt = prompt_of(LENGTH)
    refused(pair, prompt)
    assert pair.alone(pair.decode, prompt) == pair.monolithic(prompt)


@pytest.mark.proves("caches of fp8, NVFP4, int8, int4, with scales per head", engine="real", pairs="-e4m3-to-e5m2")
@pytest.mark.parametrize("pair", REFUSED_FLOAT8, indirect=True)
def test_caches_of_another_float8_format_are_refused(pair):
    prompt = prompt_of(LENGTH)
    alone = pair.alone(pair.decode, prompt)
    refused(pair, prompt)
    log = pair.decode.log.read_text(errors="replace")
    assert "float8_e4m3fn" in log
    assert "float8_e5m2" in log
    assert pair.alone(pair.decode, prompt) == alone
