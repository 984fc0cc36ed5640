"""Prompts are of very different lengths, and cut from real text."""

import pytest

from kvflow.tools.demo.run import cut_prompts, read_texts


@pytest.mark.parametrize("count", [2, 3, 24, 100])
def test_prompts_are_pieces_of_the_text_from_5_to_2000_bytes(repository, count):
    text = read_texts(repository if count == 2 else None)
    prompts = cut_prompts(text, count)
    assert len(prompts) == count
    assert min(map(len, prompts)) == 5
    assert max(map(len, prompts)) == 2000
    assert all(prompt in text for prompt in prompts)


def test_prompts_differ(repository):
    prompts = cut_prompts(read_texts(repository), 24)
    assert len(set(prompts)) == 24


def test_a_text_as_long_as_the_longest_prompt_is_enough():
    assert max(cut_prompts(bytes(2000), 24)) == bytes(2000)
