"""What smg does otherwise than other routers: it needs a label, and some requests do not go to the prefill server."""

import openai
import pytest

from .clients import ENDED, LEASES, RELEASED, TRANSFERS, TWO_SAMPLES, UNTAGGED, said, text_of, totals
from .prompts import prompt_of
from .routers import start_smg, start_unlabeled_smg

WORDS = 200


def asked_without_label(deployment, front):
    """Return prompts, what one server says to each, and what was moved before they are asked."""
    prompts = [text_of(WORDS, f"{front.name} {front.port} {number}") for number in range(3)]
    return prompts, [said(deployment, deployment.alone, prompt) for prompt in prompts], totals(deployment)


@pytest.fixture(scope="module")
def smg(deployment):
    return start_smg(deployment)


def test_several_samples_are_computed_by_the_decode_server_alone(settled, smg):
    prompt = text_of(WORDS, "smg samples")
    alone = said(settled, settled.alone, prompt, **TWO_SAMPLES)
    before, prefilled = totals(settled), settled.prefill.metric(ENDED)
    assert said(settled, smg, prompt, **TWO_SAMPLES) == alone
    assert totals(settled) == before
    assert settled.prefill.metric(ENDED) == prefilled


def test_without_a_label_both_servers_compute_every_prompt_and_count_it(settled):
    front = start_unlabeled_smg(settled, settled.prefill)
    prompts, alone, before = asked_without_label(settled, front)
    untagged = [server.metric(UNTAGGED, params="absent") for server in (settled.prefill, settled.decode)]
    assert [said(settled, front, prompt) for prompt in prompts] == alone
    for server, number in zip((settled.prefill, settled.decode), untagged, strict=True):
        server.wait_metric(number + len(prompts), UNTAGGED, params="absent")
    assert totals(settled) == before
    front.stop()


def test_without_a_label_the_prompts_of_a_server_that_always_offers_travel(settled):
    always = settled.start_second_prefill(offer="always")
    front = start_unlabeled_smg(settled, always)
    prompts, alone, before = asked_without_label(settled, front)
    assert [said(settled, front, prompt) for prompt in prompts] == alone
    settled.decode.wait_metric(before[0] + len(prompts), TRANSFERS)
    always.wait_metric(len(prompts), LEASES, **RELEASED)
    always.wait_idle()
    front.stop()
    always.stop()


def test_token_ids_are_refused(settled, smg):
    transfers = settled.decode.metric(TRANSFERS)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        said(settled, smg, prompt_of(200, "smg"))
    assert settled.decode.metric(TRANSFERS) == transfers
