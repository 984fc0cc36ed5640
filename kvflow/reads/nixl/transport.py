"""Choose the NIXL backend that a cache needs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendFactory, PostedWork
from kvflow.reads.contract import LeaseName, Serving
from kvflow.reads.device import DeviceOrder, device_order_of
from kvflow.reads.nixl.backend import UCX_TELLS, NixlBackend
from kvflow.reads.nixl.binding import DEVICE
from kvflow.reads.nixl.reader import USUAL, Uses
from kvflow.reads.staging import StagingMemory

_logger = logging.getLogger(__name__)


_REMEDY = (
    "Check that the NIXL variant named above was built for this GPU's CUDA or ROCm; that UCX_TLS, if set, allows cuda "
    "or rocm; that the kernel lets a network card reach GPU memory (nvidia-peermem or dmabuf); and that `ulimit -l` is "
    f"unlimited. {UCX_TELLS}"
)
"""The error text of NIXL builds that refuse device memory."""


class DeviceNixlBackend(NixlBackend):
    """``NixlBackend`` for a cache in device memory. All calls come from the read thread.

    Args:
        device: orders what the device does.
        arguments: those of ``NixlBackend``.
        options: those of ``NixlBackend``.
    """

    log_level = DEVICE
    remedy = _REMEDY
    kept_max = 0  # over cuda_ipc the memory of a peer is mapped, and its GPU does not free what is mapped

    def __init__(self, device: DeviceOrder, *arguments: Any, **options: Any) -> None:
        self._device = device
        device.enter()  # otherwise UCX may not know the device, and reach it over the wrong card or over TCP
        super().__init__(*arguments, **options)

    def ends_at_once(self, peer_id: PeerId) -> bool:
        """See ``Backend.ends_at_once``. False: a device copies later, and only this thread has entered it."""
        return False

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """See ``Backend.post_check``. Before a fence, what has arrived becomes visible to the device."""
        if fence:
            self._device.make_visible()
        return super().post_check(peer_id, first, last, reads, fence=fence)

    def _destroy_reader(self) -> None:
        # UCX destroys its streams without waiting, and CUDA continues the copies that are queued on them.
        super()._destroy_reader()
        try:
            self._device.settle()
        except RuntimeError:  # an error of torch: after it the device runs nothing of this process
            _logger.exception("kvflow.reads: the device failed while its last copies were awaited")


def nixl_factory(
    agent_name: str,
    staging: StagingMemory,
    *,
    uses: Uses = USUAL,
    known_only: bool = False,
    reader_progress: bool | None = None,
    params: Mapping[str, str] | None = None,
) -> BackendFactory:
    """Return the function that opens the NIXL plane of one worker. The options are those of ``NixlBackend``."""

    # Peers read our memory without our help, so there is nothing to serve and no descriptor to wait for.
    def open_nixl(regions: Sequence[Region], epochs: Region, _serving: Serving) -> NixlBackend:
        options: dict[str, Any] = {
            "uses": uses,
            "known_only": known_only,
            "reader_progress": reader_progress,
            "params": params,
        }
        if all(region.memory == "DRAM" for region in regions):
            return NixlBackend(agent_name, regions, epochs, staging.regions, **options)
        return DeviceNixlBackend(device_order_of(regions), agent_name, regions, epochs, staging.regions, **options)

    return open_nixl
