"""Engines that could not read each other say so, and each goes on by itself."""

import pytest

from .pairs import REFUSED
from .prompts import prompt_of
from .test_hostile import failed, reason_of

LENGTH = 333


@pytest.mark.parametrize("pair", REFUSED, indirect=True)
def test_states_of_another_number_of_ranks_are_refused(pair):
    prompt = prompt_of(LENGTH)
    answer = pair.decode.generate(prompt, pair.ticket(prompt))
    assert reason_of(pair, answer) == "layout_mismatch"
    assert failed(answer), answer
    assert pair.alone(pair.decode, prompt) == pair.monolithic(prompt)
