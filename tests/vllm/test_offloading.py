"""``vllm serve`` with ``MultiConnector`` on both sides of a proxy, as docs/howto/routers.md starts it.

The API server, the engine core and the workers are processes of their own, and find the connector by its name.
"""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from shutil import rmtree

import pytest

from .clients import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    RELEASED,
    TOKENS,
    client_of,
    completed,
    moved,
    tokens_of,
)
from .engines import ANSWER_S
from .howto import ROUTERS_PAGE
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .servers import PagePair

LENGTHS = (40, 150, 333, 700)
CONNECTORS = {
    "by its own name": '"KVFlowConnector"',
    "as NixlConnector": '"NixlConnector", "kv_connector_module_path": "kvflow.integrations.vllm"',
}
NIXL_SAMPLES = {
    "vllm:nixl_xfer_time_seconds_count": "vllm:kvflow_transfer_seconds_count",
    "vllm:nixl_post_time_seconds_sum": "vllm:kvflow_post_seconds_sum",
    "vllm:nixl_bytes_transferred_sum": "vllm:kvflow_transfer_bytes_sum",
    "vllm:nixl_num_descriptors_sum": "vllm:kvflow_transfer_descriptors_sum",
}
"""Samples of vLLM's own connector -> those of kvflow with the same value."""


class Offloading(PagePair):
    """The servers of the page, and their disks.

    Args:
        connector: what stands in the place of ``"KVFlowConnector"``, JSON.
    """

    page = ROUTERS_PAGE

    def __init__(self, model, folder, connector):
        self.connector = connector
        super().__init__(model, folder)

    def _make_environment(self):
        return super()._make_environment() | {"VLLM_SERVER_DEV_MODE": "1"}

    def fitted(self, *texts):
        return super().fitted(*texts).replace('"KVFlowConnector"', self.connector)

    def forget(self, side):
        """Empty the disk of one side."""
        rmtree(self.folder / f"{side}-disk", ignore_errors=True)

    def forget_prefixes(self):
        """Empty the prefix cache of the decode server, which would have a prompt before any connector."""
        self.decode.wait_idle()
        request = urllib.request.Request(f"{self.decode.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            assert answer.status == 200

    def alone(self, prompt):
        """Return the tokens that the prefill server makes of a prompt on its own, and leave nothing on its disk."""
        self.forget("prefill")
        tokens = tokens_of(self, self.prefill, prompt)
        self.forget("prefill")
        return tokens


@pytest.fixture(scope="module", params=CONNECTORS if FULL else ["by its own name"])
def deployment(request, pairs, tmp_path_factory):
    """The servers of the page; the engines of other tests are stopped first."""
    pairs.stop()
    folder = tmp_path_factory.mktemp("offloading")
    with Offloading(model_folder("llama"), folder, CONNECTORS[request.param]) as deployment:
        yield deployment


def ask(deployment, server, prompt, fields, *, max_tokens=TOKENS):
    """Return what a server answers to a request with these fields beside the usual ones."""
    with client_of(server) as client:
        return client.completions.create(
            model=deployment.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True, **fields},
        )


def test_concurrent_streams_are_read_and_counted_under_both_names(settled):
    prompts = {length: prompt_of(length, "offloading") for length in LENGTHS}
    alone = {length: settled.alone(prompt) for length, prompt in prompts.items()}
    before = moved(settled)
    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = {
            length: threads.submit(tokens_of, settled, settled.proxy, prompt) for length, prompt in prompts.items()
        }
    assert {length: stream.result() for length, stream in streams.items()} == alone
    settled.decode.wait_metric(before[0] + len(prompts), "vllm:kvflow_transfer_seconds_count")
    settled.prefill.wait_metric(before[3] + len(prompts), "vllm:kvflow_leases_ended_total", **RELEASED)
    nbytes = moved(settled)[1] - before[1]
    assert nbytes == sum(-(-length // BLOCK_TOKENS) for length in LENGTHS) * BLOCK_BYTES
    for theirs, ours in NIXL_SAMPLES.items():
        assert settled.decode.metric(theirs) == settled.decode.metric(ours) > 0


def test_a_prompt_that_was_read_comes_from_the_disk_without_a_ticket(settled):
    prompt = prompt_of(300, "kept")
    alone = settled.alone(prompt)
    before = moved(settled)
    assert tokens_of(settled, settled.proxy, prompt) == alone
    settled.decode.wait_metric(before[0] + 1, "vllm:kvflow_transfer_seconds_count")
    settled.prefill.wait_metric(before[3] + 1, "vllm:kvflow_leases_ended_total", **RELEASED)
    after = moved(settled)
    settled.forget_prefixes()
    assert tokens_of(settled, settled.decode, prompt) == alone
    assert "Inject KV cache of 256 tokens" in settled.decode.log.read_text()
    assert moved(settled) == after


def test_every_sample_of_a_prompt_is_made(settled):
    made = completed(settled, settled.proxy, prompt=prompt_of(200, "samples"), n=3, temperature=1)
    assert [choice.finish_reason for choice in made] == ["length"] * 3


def test_a_failed_load_is_recomputed_and_counted_under_both_names(deployment):
    prompt = prompt_of(300, "killed")
    alone = deployment.alone(prompt)
    params = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    offered = ask(deployment, deployment.prefill, prompt, params, max_tokens=1)
    deployment.prefill.kill()
    answer = ask(deployment, deployment.decode, prompt, {"kv_transfer_params": offered.kv_transfer_params})
    assert answer.choices[0].token_ids == alone
    deployment.decode.wait_metric(1, "vllm:kvflow_failed_transfers_total")
    assert deployment.decode.metric("vllm:nixl_num_failed_transfers_total") == 1
