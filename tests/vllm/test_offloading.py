"""``vllm serve`` with ``MultiConnector`` on both sides of a proxy, as docs/howto/routers.md starts it.

The API server, the engine core and the workers are processes of their own, and find the connector by its name.
"""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from shutil import rmtree

import pytest

from .clients import Moved, asked, ticket_of, tokens_of
from .engines import ANSWER_S, PREFILL_PARAMS
from .howto import ROUTERS_PAGE
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .servers import Deployment

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


class Offloading(Deployment):
    """The servers of the page, and their disks.

    Args:
        connector: what stands in the place of ``"KVFlowConnector"``, JSON.
    """

    page = ROUTERS_PAGE
    has_alone = False

    def __init__(self, model, folder, connector):
        self.connector = connector
        super().__init__(model, folder)

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


def test_concurrent_streams_are_read_and_counted_under_both_names(settled):
    prompts = {length: prompt_of(length, "offloading") for length in LENGTHS}
    alone = {length: settled.alone(prompt) for length, prompt in prompts.items()}
    with Moved(settled) as moved, ThreadPoolExecutor(len(prompts)) as threads:
        streams = {
            length: threads.submit(tokens_of, settled, settled.proxy, prompt) for length, prompt in prompts.items()
        }
        assert {length: stream.result() for length, stream in streams.items()} == alone
        moved.prompts += LENGTHS
    for theirs, ours in NIXL_SAMPLES.items():
        assert settled.decode.metric(theirs) == settled.decode.metric(ours) > 0


def test_a_prompt_that_was_read_comes_from_the_disk_without_a_ticket(settled):
    prompt = prompt_of(300, "kept")
    alone = settled.alone(prompt)
    with Moved(settled) as moved:
        assert tokens_of(settled, settled.proxy, prompt) == alone
        moved.prompts.append(len(prompt))
    with Moved(settled):
        settled.forget_prefixes()
        assert tokens_of(settled, settled.decode, prompt) == alone
    assert "Inject KV cache of 256 tokens" in settled.decode.log.read_text()


def test_every_sample_of_a_prompt_is_made(settled):
    made = asked(settled, settled.proxy, prompt=prompt_of(200, "samples"), n=3, temperature=1)
    assert [choice.finish_reason for choice in made.choices] == ["length"] * 3


def test_a_failed_load_is_recomputed_and_counted_under_both_names(deployment):
    prompt = prompt_of(300, "killed")
    alone = deployment.alone(prompt)
    offered = asked(deployment, deployment.prefill, PREFILL_PARAMS, prompt=prompt, max_tokens=1)
    deployment.prefill.kill()
    answer = asked(deployment, deployment.decode, ticket_of(offered), prompt=prompt)
    assert answer.choices[0].token_ids == alone
    deployment.decode.wait_metric(1, "vllm:kvflow_failed_transfers_total")
    assert deployment.decode.metric("vllm:nixl_num_failed_transfers_total") == 1
