"""An engine on two hosts is read from a third one: each rank advertises its own, as docs/howto/vllm.md says."""

import json

import pytest

from kvflow import Ticket

from .clients import BLOCK_BYTES, TOKENS, asked, blocks_of, ticket_of
from .engines import PREFILL_PARAMS, PYTHON, records, run_with_vllm
from .hosts import FarServers
from .howto import blocks
from .prompts import prompt_of
from .servers import PATIENCE

PREFILL_PORT, DECODE_PORT, MASTER_PORT = 8100, 8200, 29501
LENGTHS = (3, 150, 333, 700)
FLOAT32_BYTES = 2 * BLOCK_BYTES
"""Of a block: ``BLOCK_BYTES`` is of 16 bits."""


def extra():
    """Return the configuration that the page has for several hosts, with more patience."""
    [block] = [block for block in blocks("json") if "{host}" in block]
    return json.loads(f"{{{block}}}")["kv_connector_extra_config"] | PATIENCE


class Deployed(FarServers):
    """A prefill engine of two ranks on two hosts, and a decode engine on a third one."""

    def __init__(self, folder):
        super().__init__(["first", "second", "third"], folder)

    def start(self):
        first, second, third = self.hosts.addresses.values()
        ranks = ["--tensor-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp"]
        ranks += ["--master-addr", first, "--master-port", str(MASTER_PORT)]
        # The first host and the second are told their addresses, each by another variable; vLLM finds the third's.
        self.prefill = self._engine(
            "first",
            "kv_producer",
            [*ranks, "--node-rank", "0", "--host", first, "--port", str(PREFILL_PORT)],
            KVFLOW_ADVERTISE_HOST=first,
            POD_IP="203.0.113.1",
        )
        self.second = self._engine("second", "kv_producer", [*ranks, "--node-rank", "1", "--headless"], POD_IP=second)
        self.decode = self._engine("third", "kv_consumer", ["--host", third, "--port", str(DECODE_PORT)])
        return self.prefill, self.decode

    def _engine(self, name, role, words, **variables):
        transfer = {
            "kv_connector": "KVFlowConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra() | {"log_file": str(self.folder / f"{role}.jsonl")},
        }
        command = [PYTHON, "-m", "tests.vllm.vllm_command", "serve", self.model, "--enforce-eager"]
        command += ["--dtype", "float32", *words, "--kv-transfer-config", json.dumps(transfer)]
        variables |= {"KVFLOW_CLUSTER_SECRET": self.secret, "GLOO_SOCKET_IFNAME": "eth0"}
        port = DECODE_PORT if role == "kv_consumer" else PREFILL_PORT
        return self.serve(name, command=command, port=port, variables=variables)

    def tokens(self, prompt, params=None, *, salt=""):
        return asked(self, self.decode, params, prompt=prompt, salt=salt).choices[0].token_ids

    def ticket(self, prompt):
        return ticket_of(asked(self, self.prefill, PREFILL_PARAMS, prompt=prompt, max_tokens=1))


@pytest.fixture(scope="module")
def deployed(pairs, tmp_path_factory):
    """The engines; those of other tests are stopped first."""
    pairs.stop()
    with Deployed(tmp_path_factory.mktemp("hosts")) as deployed:
        yield deployed


def test_each_rank_says_at_the_start_that_it_is_on_its_own_host(deployed):
    deployed.require_advertised(deployed.prefill, "first", 0, 2)
    deployed.require_advertised(deployed.second, "second", 1, 2)
    deployed.require_advertised(deployed.decode, "third")


def test_ranks_on_two_hosts_are_read_from_a_third_host(deployed):
    first, second, _ = deployed.hosts.addresses.values()
    for length in LENGTHS:
        prompt = prompt_of(length, "hosts")
        alone = deployed.tokens(prompt, salt="alone")  # no other request reads these blocks
        params = deployed.ticket(prompt)
        (grant,) = Ticket.from_params(params).grants
        assert [rank.endpoint for rank in grant.ranks] == [f"tcp://{first}:5600", f"tcp://{second}:5601"]
        assert deployed.tokens(prompt, params) == alone
        assert len(alone) == TOKENS
    deployed.decode.wait_metric(len(LENGTHS), "vllm:kvflow_transfer_seconds_count")
    # Both ranks end a lease for each prompt.
    deployed.prefill.wait_metric(2 * len(LENGTHS), "vllm:kvflow_leases_ended_total", outcome="released")
    nbytes = sum(map(blocks_of, LENGTHS)) * FLOAT32_BYTES
    assert deployed.decode.metric("vllm:kvflow_transfer_bytes_sum") == nbytes
    assert deployed.decode.metric("vllm:kvflow_failed_transfers_total") == 0
    assert {each["plane"] for each in records(deployed.folder / "kv_consumer.jsonl", "transfer.completed")} == {"tcp"}


ASKING = """
import json, sys
from kvflow.integrations.vllm import KVFlowConnector
for text in sys.argv[1:]:
    try:
        print(KVFlowConnector.requires_piecewise_for_cudagraph(json.loads(text)))
    except Exception as error:
        print(error)
"""


def test_a_wrong_setting_is_refused_when_vllm_asks_about_cuda_graphs():
    right = extra() | {"cluster_secret": "x" * 32}
    wrong = right | {"bind": "tcp://{host}:70000"}
    answers = run_with_vllm("-c", ASKING, json.dumps(right), json.dumps(wrong)).splitlines()
    assert answers[-2] == "False"
    assert "no port is above 65535 [config_invalid]" in answers[-1]
