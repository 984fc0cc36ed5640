"""Where the caches of these tests lie. On the host they run everywhere; without a GPU the others are skipped."""

from functools import cache

import pytest
import torch

from kvflow.reads.reach import RDMA
from kvflow.tools.doctor.apart import start_agent
from tests.devices import REAL

HOST, GPU = "cpu", "cuda"


def require(device):
    """Skip the test, or fail it, if there is no such device."""
    if device == GPU and not torch.cuda.is_available():
        if REAL:  # as `make test-gpu` says
            pytest.fail("KVFLOW_TEST_MEMORY is VRAM, but torch finds no GPU")
        pytest.skip("torch finds no GPU")
    return device


@cache
def has_rdma():
    """Whether UCX has a transport here that reads between the memories of hosts and GPUs."""
    return bool(RDMA & set(start_agent().transports))


def require_pair(devices):
    """Skip the test, or fail it, if there is no such device, or nothing that NIXL could read with between the two."""
    found = tuple(require(each) for each in devices)
    if len(set(found)) == 2 and not has_rdma():
        pytest.skip("within a host, NIXL reads between host memory and a GPU over RDMA alone, which UCX does not find")
    return found


@pytest.fixture(params=[HOST, GPU])
def device(request):
    """The device of both caches."""
    return require(request.param)


@pytest.fixture(params=[(HOST, HOST), (GPU, GPU), (HOST, GPU), (GPU, HOST)], ids="-to-".join)
def devices(request):
    """The devices of the source's and of our cache."""
    return require_pair(request.param)
