"""A hundred thousand generated pairs, each told by its seed: the cases of the property, without Hypothesis."""

import random

import pytest

from tests.properties.engines import TARGETS, generate_case
from tests.properties.moves import require_right_bytes
from tests.properties.staged import TERMS

PAIRS = 100_000
SHOWN_EVERY = 1_000
STAGED_EVERY = 10
"""Cases of which whatever can be is staged; they take longer."""


@pytest.mark.timeout(0)
def test_every_wanted_byte_of_a_hundred_thousand_pairs_arrives_once(share, progress):
    cases = round(PAIRS / TARGETS * share)
    for seed in range(cases):
        try:
            terms = TERMS if seed % STAGED_EVERY == 0 else {}
            require_right_bytes(generate_case(random.Random(seed).choice, seed), **terms)
        except Exception as error:
            raise AssertionError(f"the case of seed {seed}") from error
        if (seed + 1) % (SHOWN_EVERY // TARGETS) == 0 or seed + 1 == cases:
            progress(f"{(seed + 1) * TARGETS:,} of {cases * TARGETS:,} pairs")
