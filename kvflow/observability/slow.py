"""The rate of a peer, and a warning if a GPU reads from its GPU more slowly than PCIe or RDMA do."""

from collections.abc import Iterator
from typing import Final

from kvflow.events import PeerMeasured, PeerSlow
from kvflow.reads import contract

SLOW_BYTES_PER_S: Final = 2e9
"""Between two GPUs. PCIe 3 and a network card of 100 Gbit/s carry 12 GB/s, TCP through host memory 1 to 2 GB/s."""

_BY_TCP = "the bytes pass through host memory and TCP, because NIXL does not reach the peer's memory"
_REACH_IT = (
    "On two hosts, check that both have RDMA devices that kvflow may use. On one host, check that both processes see "
    "both GPUs, and share the IPC and PID namespaces."
)
_BY_CUDA_IPC = "GPUs of one host without NVLink, whose reads UCX sends through the other process"
_ALLOW_COPIES = (
    "Check that nothing sets CUDA_IPC_ENABLE_GET_ZCOPY to n, in nixl_backend_params or as a variable of UCX, and that "
    "nvidia-smi topo -p2p r says OK."
)
_BY_NETWORK = "the network card does not reach the GPU's memory directly, or is far from it, or the pieces are small"
_REACH_DIRECTLY = (
    "Load nvidia-peermem or use a kernel with dmabuf, choose the nearest card with UCX_NET_DEVICES, and compare "
    "nbytes with descriptors in transfer.completed."
)


def judge_rate(rate: contract.RateLearned, carrier: contract.Carrier) -> Iterator[PeerMeasured | PeerSlow]:
    """Yield what is to be reported of a peer's rate, which ``carrier`` has carried."""
    bytes_per_s = rate.nbytes / max(rate.busy_s, 1e-9)
    gb_per_s, peer = round(bytes_per_s / 1e9, 3), str(rate.peer)
    memories = rate.source_memory, rate.target_memory
    yield PeerMeasured(peer, gb_per_s, rate.nbytes, *memories, carrier.name, carrier.plane)
    if memories == ("VRAM", "VRAM") and bytes_per_s < SLOW_BYTES_PER_S:
        by_nixl = (_BY_CUDA_IPC, _ALLOW_COPIES) if "cuda_ipc" in carrier.name else (_BY_NETWORK, _REACH_DIRECTLY)
        cause, remedy = (_BY_TCP, _REACH_IT) if carrier.plane == "tcp" else by_nixl
        yield PeerSlow(peer, gb_per_s, carrier.name, carrier.plane, cause, f"{remedy} See docs/howto/gpus.md.")
