"""Prompts: token ids that depend on nothing but their number and a name."""

import random

from .tiny_models import VOCABULARY

PROMPT_LENGTHS = (3, 31, 40, 128, 150, 257, 333, 512, 700)
"""Shorter than a block, as long as one, one token more, and several; some lie within one sliding window."""


def prompt_of(length: int, name: str = "") -> list[int]:
    """Return a prompt of ``length`` tokens, another one for each name."""
    draw = random.Random(f"{name}/{length}")
    return [draw.randrange(VOCABULARY) for _ in range(length)]
