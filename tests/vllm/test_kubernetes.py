"""The manifests of docs/howto/deploy.md run: each pod is a host of its own, with the command of its container.

What Kubernetes does is done here: pods get addresses and names, variables are filled in, and probes wait.
"""

import json

import pytest

from tests.docs.manifests import ENGINES, container, ports, transfer_config, workload

from .clients import BLOCK_BYTES, TOKENS, asked, blocks_of
from .engines import look
from .hosts import FarServers
from .prompts import prompt_of
from .servers import PATIENCE, PROGRAMS

LENGTHS = (3, 150, 333, 400, 512, 700)
MODEL = "Qwen/Qwen3-8B"
"""That of the manifests; here it is a small one."""


class Cluster(FarServers):
    """The pods of the manifests."""

    def __init__(self, folder):
        self.pods = [
            (f"{name}-{index}", name) for name in ENGINES for index in range(workload(name)["spec"]["replicas"])
        ]
        self.pods.append(("router", "router"))
        services = [f"{pod}.{name}" if name in ENGINES else pod for pod, name in self.pods]
        super().__init__(services, folder)
        self.servers = {}
        self._services = dict(zip([pod for pod, _ in self.pods], services, strict=True))

    def start(self):
        for name, script in PROGRAMS.items():
            (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.folder / name).chmod(0o755)
        for pod, name in self.pods:
            self.servers[pod] = self._start(pod, name)
        return self.servers.values()

    def _start(self, pod, name):
        program, *words = [*container(name)["command"], *container(name)["args"]]
        words = [self.model if word == MODEL else word for word in words]
        if name in ENGINES:
            config = transfer_config(name)
            config["kv_connector_extra_config"] |= PATIENCE
            words[words.index("--kv-transfer-config") + 1] = json.dumps(config)
        variables = {each["name"]: self._variable(pod, each["valueFrom"]) for each in container(name).get("env", [])}
        command = [str(self.folder / program), *words]
        return self.serve(self._services[pod], command=command, port=ports(name)["http"], variables=variables)

    def _variable(self, pod, source):
        match source:
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return self.hosts.addresses[self._services[pod]]
            case {"secretKeyRef": _}:
                return self.secret

    def tokens(self, pod, prompt, **named):
        return asked(self, self.servers[pod], prompt=prompt, **named).choices[0].token_ids

    def total(self, kind, metric, **labels):
        """Return the sum of a metric over all servers of a kind."""
        return sum(server.metric(metric, **labels) for pod, server in self.servers.items() if pod.startswith(kind))

    def wait_total(self, value, kind, metric):
        """Wait until a metric has a value over all servers of a kind: vLLM tells of a step after the step."""
        look(
            lambda: self.total(kind, metric),
            lambda found: found == value,
            lambda found: f"{metric} is {found} and not {value}",
        )


@pytest.fixture(scope="module")
def cluster(pairs, tmp_path_factory):
    """The pods; engines of other tests are stopped first."""
    pairs.stop()
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_each_engine_is_at_the_address_of_its_pod(cluster):
    for pod, name in cluster.pods[:-1]:
        cluster.require_advertised(cluster.servers[pod], f"{pod}.{name}")


def test_the_router_has_every_prompt_prefilled_and_its_cache_read(cluster):
    prompts = [prompt_of(length, "cluster") for length in LENGTHS]
    alone = [cluster.tokens("decode-0", prompt, salt="alone") for prompt in prompts]
    assert all(len(tokens) == TOKENS for tokens in alone)
    assert [cluster.tokens("router", prompt) for prompt in prompts] == alone
    cluster.wait_total(len(prompts), "decode", "vllm:kvflow_transfer_seconds_count")
    assert cluster.total("decode", "vllm:kvflow_transfer_bytes_sum") == sum(map(blocks_of, LENGTHS)) * BLOCK_BYTES
    assert cluster.total("decode", "vllm:kvflow_failed_transfers_total") == 0
