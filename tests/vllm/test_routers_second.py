"""Routers before two prefill servers: when the one in use dies, the other one's caches travel."""

import itertools
import time

import openai
import pytest

from .clients import ENDED, TRANSFERS, said, text_of
from .engines import ANSWER_S, PAUSE_S
from .routers import start_smg, start_vllm_router

pytestmark = pytest.mark.parametrize("deployment", ["llama"], indirect=True)

IN_A_ROW = 5
WORDS = 200


@pytest.mark.parametrize("start", [start_vllm_router, start_smg])
def test_when_the_prefill_server_in_use_dies_the_other_one_takes_its_place(deployment, start):
    second = deployment.start_second_prefill()
    front = start(deployment, second)
    done = deployment.prefill.metric(ENDED)
    assert said(deployment, front, text_of(WORDS, f"{front.name} two servers")).texts
    if deployment.prefill.metric(ENDED) > done:
        deployment.prefill.kill()
    else:
        second.kill()

    good, deadline = 0, time.monotonic() + ANSWER_S
    for number in itertools.count():
        prompt, transfers = text_of(WORDS, f"{front.name} one server {number}"), deployment.decode.metric(TRANSFERS)
        try:
            answer = said(deployment, front, prompt)
        except openai.InternalServerError:
            good = 0
            time.sleep(PAUSE_S)
        else:
            assert answer == said(deployment, deployment.alone, prompt)
            deployment.decode.wait_metric(transfers + 1, TRANSFERS)
            good += 1
        if good == IN_A_ROW:
            break
        assert time.monotonic() < deadline
    deployment.decode.wait_idle()

    front.stop()
    second.kill()
    if not deployment.prefill.alive:
        deployment.restart_prefill()
