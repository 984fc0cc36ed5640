"""Find what is slow.

A pull is slow by a limit, or compared with what the same producer usually delivers. A peer is slow if a GPU reads from
its GPU more slowly than PCIe or RDMA do.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvflow.clock import Clock
from kvflow.events import Hook, OnlyEvents, PeerMeasured, PeerSlow, TransferCompleted, TransferSlow
from kvflow.reads import contract
from kvflow.reads.contract import Carrier

USUAL_MIN: Final = 16
"""Pulls that make a rate usual."""

WEIGHT: Final = 1 / 16
"""Weight of the last pull in the usual rate. A rate that falls to a tenth for good is usual after some 40 pulls."""

MOVING_S_MIN: Final = 0.05
"""A pull that moved its bytes within this time is not compared with others: a busy machine delays many that much."""

PEERS_MAX: Final = 64
"""Producers that are told apart. All others share one state."""

PAUSE_S: Final = 10.0
"""Least time between two events about one producer."""

SLOW_BYTES_PER_S: Final = 2e9
"""Between two GPUs. PCIe 3 and a network card of 100 Gbit/s carry 12 GB/s, TCP through host memory 1 to 2 GB/s."""

_CHECK = "See docs/howto/gpus.md."
_BY_TCP = "the bytes pass through host memory and TCP, because NIXL does not reach the peer's memory"
_REACH_IT = (
    "On two hosts, check that both have RDMA devices that kvflow may use. On one host, check that both processes see "
    f"both GPUs, and share the IPC and PID namespaces. {_CHECK}"
)
_BY_CUDA_IPC = "GPUs of one host without NVLink, whose reads UCX sends through the other process"
_ALLOW_COPIES = (
    "Check that nothing sets CUDA_IPC_ENABLE_GET_ZCOPY to n, in nixl_backend_params or as a variable of UCX, and that "
    f"nvidia-smi topo -p2p r says OK. {_CHECK}"
)
_BY_NETWORK = "the network card does not reach the GPU's memory directly, or is far from it, or the pieces are small"
_REACH_DIRECTLY = (
    "Load nvidia-peermem or use a kernel with dmabuf, choose the nearest card with UCX_NET_DEVICES, and compare "
    f"nbytes with descriptors in transfer.completed. {_CHECK}"
)


@dataclass(slots=True)
class _Usual:
    """The rate of one producer for pulls of similar size: within a factor of four, because short pulls are slower."""

    bytes_per_s: float = 0.0
    pulls: int = 0

    def add(self, bytes_per_s: float) -> None:
        self.pulls += 1
        self.bytes_per_s += (bytes_per_s - self.bytes_per_s) * max(WEIGHT, 1 / self.pulls)


@dataclass(slots=True)
class _Producer:
    """What is known of one producer."""

    usual: dict[int, _Usual]
    told_at: float = -math.inf
    omitted: int = 0


class SlowTransfers:
    """Report completed pulls that are slow, at most one for each producer in ``PAUSE_S``.

    Args:
        slow_s: seconds from the call to the result above which a pull is slow; None for no such limit.
        factor: how many times slower than usual a pull is slow; None compares nothing.
        clock: any clock in seconds.

    Attributes:
        report: takes the events.

    Thread: the worker's event loop.
    """

    def __init__(self, slow_s: float | None, factor: float | None, clock: Clock) -> None:
        self._slow_s = math.inf if slow_s is None else slow_s
        self._factor = math.inf if factor is None else factor
        self._clock = clock
        self._producers: dict[str, _Producer] = {}
        self.report: Callable[[TransferSlow], None] | None = None

    def hooks(self) -> list[Hook]:
        """Return the hook that takes completed pulls; none if there is no limit, so that no events are made for it."""
        if math.isinf(self._slow_s) and math.isinf(self._factor):
            return []
        return [OnlyEvents(TransferCompleted, self._on_completed)]

    def _on_completed(self, event: TransferCompleted) -> None:
        report, timings_s = event.report, event.report.timings_s
        name = event.remote_engine_id
        name = name if name in self._producers or len(self._producers) < PEERS_MAX else ""
        producer = self._producers.setdefault(name, _Producer({}))
        total_s = timings_s["total"]
        moving_s = timings_s.get("post", 0.0) + timings_s.get("wire", 0.0)
        rate = report.nbytes / moving_s if moving_s > 0 else 0.0
        usual = producer.usual.setdefault(report.nbytes.bit_length() // 2, _Usual())
        expected = usual.bytes_per_s if usual.pulls >= USUAL_MIN else 0.0
        if rate:
            usual.add(rate)
        if total_s > self._slow_s:
            setting = "slow_transfer_s"
        elif moving_s > MOVING_S_MIN and rate * self._factor < expected:
            setting = "slow_transfer_factor"
        else:
            return
        now = self._clock()
        if now - producer.told_at < PAUSE_S or self.report is None:
            producer.omitted += 1
            return
        phases = {phase: seconds for phase, seconds in timings_s.items() if phase != "total"}
        slow = TransferSlow(
            pull_id=event.pull_id,
            request_id=event.request_id,
            setting=setting,
            remote_engine_id=event.remote_engine_id,
            total_s=total_s,
            nbytes=report.nbytes,
            bytes_per_s=rate,
            usual_bytes_per_s=expected,
            longest_phase=max(phases, key=lambda phase: phases[phase], default=""),
            omitted=producer.omitted,
            local_request_id=event.local_request_id,
            traceparent=event.traceparent,
        )
        producer.told_at, producer.omitted = now, 0
        self.report(slow)


def judge_rate(rate: contract.PeerMeasured, carrier: Carrier) -> Iterator[PeerMeasured | PeerSlow]:
    """Yield what is to be reported of a peer's rate, which ``carrier`` has carried."""
    bytes_per_s = rate.nbytes / max(rate.busy_s, 1e-9)
    gb_per_s, peer = round(bytes_per_s / 1e9, 3), str(rate.peer)
    memories = rate.source_memory, rate.target_memory
    yield PeerMeasured(peer, gb_per_s, rate.nbytes, *memories, carrier.name, carrier.plane)
    if memories == ("VRAM", "VRAM") and bytes_per_s < SLOW_BYTES_PER_S:
        yield PeerSlow(peer, gb_per_s, carrier.name, carrier.plane, *_cause(carrier))


def _cause(carrier: Carrier) -> tuple[str, str]:
    """Return the likely cause of a low rate, and a remedy."""
    if carrier.plane == "tcp":
        return _BY_TCP, _REACH_IT
    return (_BY_CUDA_IPC, _ALLOW_COPIES) if "cuda_ipc" in carrier.name else (_BY_NETWORK, _REACH_DIRECTLY)
