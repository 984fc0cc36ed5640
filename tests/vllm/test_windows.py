"""Prefixes of a model with sliding windows: read where the windows of a source are whole, and computed elsewhere."""

from dataclasses import replace

import pytest

from .engines import OUT, records
from .pairs import FULL
from .prompts import prompt_of
from .servers import free_port
from .test_kept import ENGINES

SIZE = 32  # of the keeper's blocks; a window has two or three of them
LENGTH = 600
TOKENS = 16
PROMPTS_MAX = 5  # until one is read
KEEPER = replace(ENGINES["gptoss"], dtype="float32", failure_policy="recompute")
NUMBERS = iter(range(1 << 20))


class Engines:
    """One that keeps, ``keeper``, and one that asks it, ``reader``, whose blocks have ``size`` tokens."""

    def __init__(self, keeper, reader, size, log):
        self.keeper, self.reader, self.size, self._log = keeper, reader, size, log

    def fetched(self):
        """Return how many tokens were fetched, each time."""
        return [each["tokens"] for each in records(self._log, "prefix.fetched")]

    def say(self, prompt):
        """Return the answers of both, the keeper's first, and what the reader has fetched for its own."""
        before = len(self.fetched())
        read = self.reader.generate(prompt, max_tokens=TOKENS)["tokens"]
        return self.keeper.generate(prompt, max_tokens=TOKENS)["tokens"], read, self.fetched()[before:]


@pytest.fixture(scope="module", params=[32, 128] if FULL else [128])
def engines(request, pairs):
    source, log = f"tcp://127.0.0.1:{free_port()}", OUT / "logs" / f"windows-{next(NUMBERS)}.jsonl"
    log.unlink(missing_ok=True)
    keeps = replace(KEEPER, extra={**KEEPER.extra, "bind": source, "tell": False})  # prompts are shorter than a stride
    asks = replace(
        KEEPER, block_size=request.param, prefix_caching=False, served="", llm={},
        extra={"sources": [source], "fetch_tokens_min": SIZE, "log_file": str(log)},
    )  # fmt: skip
    with pairs.engine(keeps, "kv_both", "windows-kept") as keeper:
        keeper.wait_ready()
        with pairs.engine(asks, "kv_both", "windows-read") as reader:
            yield Engines(keeper, reader.wait_ready(), request.param, log)


def read(engines, name, first, *, kept=1):
    """Have prompts kept until one that shares the first tokens is read from there, and return the last one.

    Returns the answers of both engines, and what was fetched.
    """
    for number in range(PROMPTS_MAX):
        prompt = prompt_of(LENGTH, f"{name} {number}")
        answer = engines.keeper.generate(prompt, max_tokens=kept)["tokens"]
        found = engines.say([*[*prompt, *answer][:first], *prompt_of(50, f"{name} {number} goes on")])
        if found[2]:
            break
    return found


def part(engines, first):
    """Return how many of so many tokens are in whole blocks of both engines, as a list; empty for none."""
    return [size] if (size := first // engines.size * engines.size) else []


@pytest.mark.parametrize("first", [300, SIZE * 9, 129, 61])
def test_the_longest_part_whose_windows_are_whole_is_read(engines, first):
    alone, answer, fetched = read(engines, f"part {first}", first)
    assert fetched == part(engines, first)
    assert answer == alone


def test_all_that_is_kept_of_a_prompt_is_read(engines):
    alone, answer, fetched = read(engines, "all", LENGTH)
    assert fetched == [LENGTH // SIZE * SIZE]
    assert answer == alone


@pytest.mark.parametrize("first", [LENGTH + 80, 300])
def test_of_a_long_answer_the_prompt_is_read(engines, first):
    """In the answer, the windows have moved on."""
    alone, answer, fetched = read(engines, f"answer {first}", first, kept=150)
    assert fetched == part(engines, min(first, LENGTH))
    assert answer == alone


def test_all_that_is_kept_of_a_long_answer_is_read(engines):
    alone, answer, fetched = read(engines, "all of the answer", LENGTH + 150, kept=150)
    assert fetched == [(LENGTH + 149) // SIZE * SIZE]
    assert answer == alone


def test_windows_that_were_changed_are_noticed(engines):
    """So the tests above see what is read."""
    prompt = prompt_of(SIZE * 18 + 1, "spoiled")
    engines.keeper.generate(prompt, max_tokens=1)
    alone, answer, _ = engines.say(prompt)
    assert answer == alone
    engines.keeper.obey("pool")
    engines.keeper.obey("spoil")
    assert any(answer != engines.say(prompt)[1] for _ in range(PROMPTS_MAX))
