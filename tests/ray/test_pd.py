"""Ray Serve LLM with two replicas of each kind on two nodes, as docs/howto/routers.md starts it, is one engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port
from tests.vllm.clients import BLOCK_BYTES, TOKENS, blocks_of, client_of, tokens_of
from tests.vllm.engines import PYTHON
from tests.vllm.pairs import model_folder
from tests.vllm.prompts import prompt_of
from tests.vllm.servers import LOGS, Server
from tests.vllm.test_serve import LENGTHS

from .cluster import MODEL, NODES, Cluster, environment

PROMPTS = {f"{length}-{turn}": prompt_of(length, f"ray {turn}") for length in LENGTHS for turn in range(4)}
"""So many that a replica which gets none of them is broken: Ray chooses between two at random."""

QUESTION = [{"role": "user", "content": "Why does a cache travel? " * 30}]


def said_by(server):
    """Return what a server answers to a question, as a whole."""
    with client_of(server) as client:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=TOKENS, temperature=0)
    return answer.choices[0].message.content, answer.usage.prompt_tokens


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one engine alone says; it ends before Ray starts."""
    LOGS.mkdir(parents=True, exist_ok=True)
    port = free_port()
    shell = f"{PYTHON} -m tests.vllm.vllm_command serve {model_folder('llama')} --port {port} --enforce-eager"
    server = Server(
        "ray-alone", f"{shell} --served-model-name {MODEL}", port, environment(), tmp_path_factory.mktemp("alone")
    )
    try:
        server.wait_ready()
        return {name: tokens_of(Cluster, server, prompt) for name, prompt in PROMPTS.items()}, said_by(server)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def cluster(alone, tmp_path_factory):
    with Cluster(model_folder("llama"), tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_replicas_listen_at_the_addresses_of_their_nodes(cluster):
    opened = [each["endpoint"] for each in cluster.records("worker.opened")]
    assert len(set(opened)) == 4
    assert sorted(endpoint.rpartition(":")[0] for endpoint in opened) == [
        f"tcp://{node}" for node in NODES for _ in range(2)
    ]


def test_streams_are_the_tokens_of_one_engine_and_every_block_has_moved(alone, cluster):
    with ThreadPoolExecutor(6) as threads:
        asked = {name: threads.submit(tokens_of, cluster, cluster, prompt) for name, prompt in PROMPTS.items()}
        told = {name: answer.result() for name, answer in asked.items()}
    assert told == alone[0]
    assert all(len(set(tokens)) > TOKENS // 4 for tokens in told.values())

    pulls = cluster.wait_records("transfer.completed", len(PROMPTS))
    assert len(pulls) == len(PROMPTS)
    nbytes = sum(blocks_of(len(prompt)) for prompt in PROMPTS.values()) * BLOCK_BYTES
    assert sum(each["nbytes"] for each in pulls) == nbytes
    producers = {each["remote_endpoint"] for each in pulls}
    consumers = {each["engine_id"] for each in pulls}
    assert (len(producers), len(consumers)) == (2, 2)
    cluster.wait_metric("ray_vllm_kvflow_transfer_bytes_count", len(PROMPTS))


def test_a_chat_is_what_one_engine_says(alone, cluster):
    before = len(cluster.records("transfer.completed"))
    assert said_by(cluster) == alone[1]
    assert len(cluster.wait_records("transfer.completed", before + 1)) == before + 1


def test_nothing_failed_and_every_lease_was_released(cluster):
    ended = cluster.wait_records("lease.ended", len(PROMPTS) + 1)
    assert {each["outcome"] for each in ended} == {"released"}
    assert {each["level"] for each in cluster.records()} == {"info"}
