"""Prompts of every length are found with the settings of docs/howto/share-prefixes.md, beside a busy source, too."""

import json
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvflow.contents import Chains
from kvflow.integrations.vllm.finder import Finder
from kvflow.integrations.vllm.messages import Tally
from kvflow.integrations.vllm.settings import EngineFacts, read_settings
from tests.unit.kvflow.integrations.vllm_like import SECRET, new_contents, new_request, wait_until
from tests.world.node import Node

from .prompt_source import PROMPTS, keeping_prompts, prompt

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "share-prefixes.md"
PATIENCE_S = 120.0
NEXT = 100  # tokens behind what is kept

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@contextmanager
def opened(is_busy):
    """Start the source, and a finder with the settings of the page."""
    node = Node()
    try:
        endpoint = node.open_now(keeping_prompts, is_busy)
        [asking] = re.findall(r"'({[^']*\"sources\"[^']*})'", PAGE.read_text())
        wanted = json.loads(asking)
        extra = wanted["kv_connector_extra_config"] | {"sources": [endpoint]}
        facts = EngineFacts(engine_id="prefill-0", kv_role=wanted["kv_role"])
        settings = read_settings({"cluster_secret": SECRET, **extra}, facts)
        finder = Finder(settings, new_contents(), tally := Tally())
        try:
            wait_until(lambda: any(finder._sources.values()))
            yield finder, tally
        finally:
            finder.close()
    finally:
        node.go()
    assert node.process.poll() == 0


def found(finder, num_tokens, name):
    """Return how many tokens of a prompt are found; it waits as long as vLLM's scheduler would."""
    request = new_request(None, [*prompt(num_tokens), *range(NEXT)], name)
    finder.seek(request, Chains())
    while finder.is_asking(name):
        time.sleep(0.001)
    answer = finder.take(name, 0)
    return 0 if answer is None else answer.num_tokens


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_prompt_of_any_length_is_found_with_the_settings_of_the_page(is_busy):
    """This machine may be so busy that some answers are late; before, all were."""
    with opened(is_busy) as (finder, _):
        for num_tokens in PROMPTS:
            deadline = time.monotonic() + PATIENCE_S
            number, held = 0, 0
            while not held and time.monotonic() < deadline:
                held = found(finder, num_tokens, f"{num_tokens}-{number}")
                number += 1
            assert held == num_tokens


if __name__ == "__main__":  # how many of so many are found: python -m tests.integration.test_prefixes_found 50
    for is_busy in (False, True):
        with opened(is_busy) as (finder, tally):
            for num_tokens in PROMPTS:
                helds = [found(finder, num_tokens, f"{num_tokens}-{n}") == num_tokens for n in range(int(sys.argv[1]))]
                sys.stdout.write(
                    f"busy: {is_busy}; {num_tokens}: {sum(helds)} of {len(helds)}, {tally.take()['prefixes']}\n"
                )
