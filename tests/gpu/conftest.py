"""Where the caches of these tests lie. On the host they run everywhere; without a GPU the others are skipped."""

import pytest
import torch

from tests.devices import REAL

HOST, GPU = "cpu", "cuda"


def require(device):
    """Skip the test, or fail it, if there is no such device."""
    if device == GPU and not torch.cuda.is_available():
        if REAL:  # as `make test-gpu` says
            pytest.fail("KVFLOW_TEST_MEMORY is VRAM, but torch finds no GPU")
        pytest.skip("torch finds no GPU")
    return device


@pytest.fixture(params=[HOST, GPU])
def device(request):
    """The device of both caches."""
    return require(request.param)


@pytest.fixture(params=[(HOST, HOST), (GPU, GPU), (HOST, GPU), (GPU, HOST)], ids="-to-".join)
def devices(request):
    """The devices of the source's and of our cache."""
    return [require(each) for each in request.param]
