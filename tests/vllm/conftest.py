"""These tests need vLLM and minutes: ``make test-vllm`` runs them, ``make test`` leaves them out."""

import os
from pathlib import Path

import pytest

if "KVFLOW_TEST_VLLM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
elif os.environ["KVFLOW_TEST_VLLM"] != "full":
    collect_ignore = [
        "test_cached.py",
        "test_hosts.py",
        "test_kubernetes.py",
        "test_replayed_names.py",
        "test_routers_second.py",
        "test_routers_smg.py",
        "test_vllm_releases.py",
    ]

from .engines import Nursery
from .pairs import FLOAT8, FULL, PAIRS, REFUSED_FLOAT8, Pairs, model_folder

SERVING = (
    "test_chat.py",
    "test_hosts.py",
    "test_kubernetes.py",
    "test_long_prefixes.py",
    "test_offloading.py",
    "test_prefixes.py",
    "test_rendezvous.py",
    "test_replayed_names.py",
)
"""They start servers, as tests with ``deployment`` do. Two processes that did so at once would need more than 24 GB."""


def pytest_collection_modifyitems(items):
    """Run in a row what needs the same pair, or ``deployment``: they take as long to start as their tests take."""
    command = {name: index for index, name in enumerate(PAIRS)}

    def place(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return command.get(params.get("pair"), len(command)), "deployment" in item.fixturenames

    items.sort(key=place)
    for item in items:
        if item.path.name in SERVING or "deployment" in item.fixturenames:
            item.add_marker("servers")


@pytest.fixture(scope="session")
def pairs():
    """Starts pairs; at the end none is left."""
    with Nursery() as nursery:
        pairs = Pairs(nursery)
        try:
            yield pairs
        finally:
            pairs.stop()


@pytest.fixture
def pair(request, pairs):
    """A pair of engines by name. After every test both live, and every block of both is free again."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if request.param in FLOAT8 | REFUSED_FLOAT8 and not flags & {"avx512f", "amx_tile"}:
        pytest.skip("vLLM has no fp8 caches on a CPU without AVX-512 and AMX")
    pair = pairs.get(request.param)
    yield pair
    pair.settle()


@pytest.fixture(scope="session", params=["llama", "gptoss"] if FULL else ["llama"])
def deployment(request, pairs, tmp_path_factory):
    """The servers of docs/howto/vllm.md; the engines of other tests are stopped first."""
    from .servers import Deployment  # it needs what only the engines' environment has

    pairs.stop()
    with Deployment(model_folder(request.param), tmp_path_factory.mktemp("serve")) as deployment:
        yield deployment


@pytest.fixture
def settled(deployment):
    """The servers of the tests; after each test nothing runs, and no block is taken."""
    yield deployment
    deployment.settle()
