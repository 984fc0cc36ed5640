"""Find the address ranges that an engine's tensors span. A worker registers exactly these regions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvflow.errors import SpecInvalid


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a storage from the first to after the last of one tensor, as addresses."""

    low: int
    high: int
    storage: torch.UntypedStorage
    device: torch.device


def span_of(path: str, tensor: torch.Tensor) -> Span:
    """Return the bytes that a tensor spans.

    Raises:
        SpecInvalid: the storage is shorter than the tensor.
    """
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + reach) * tensor.element_size()
    if end > storage.nbytes():
        raise SpecInvalid(
            f"{path}: storage has {storage.nbytes()} bytes; the tensor needs {end} of them",
            remedy="Give tensors whose memory is still there.",
        )
    low = tensor.data_ptr()
    return Span(low, low + reach * tensor.element_size(), storage, tensor.device)


def join_spans(spans: Sequence[Span]) -> tuple[list[torch.Tensor], list[int]]:
    """Join spans that overlap, or that touch within one storage.

    Returns:
        One flat uint8 tensor per region, sorted by address, which keeps the memory alive; and each span's region.

    Raises:
        SpecInvalid: storages overlap, and none of them contains a whole region.
    """
    regions: list[list[int]] = []
    high, previous = 0, None
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].low, spans[at].high)):
        span = spans[index]
        same_device = previous is not None and span.device == previous.device
        touches = previous is not None and span.storage.data_ptr() == previous.storage.data_ptr() and span.low == high
        if same_device and (span.low < high or touches):
            regions[-1].append(index)
            high = max(high, span.high)
        else:
            regions.append([index])
            high = span.high
        previous = span
    region_of = [0] * len(spans)
    for region, members in enumerate(regions):
        for index in members:
            region_of[index] = region
    return [_flat([spans[index] for index in members]) for members in regions], region_of


def _flat(members: Sequence[Span]) -> torch.Tensor:
    low, high = min(span.low for span in members), max(span.high for span in members)
    for span in members:
        start = low - span.storage.data_ptr()
        if start >= 0 and high <= span.storage.data_ptr() + span.storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=span.device)
            return empty.set_(span.storage, start, (high - low,), (1,))
    raise SpecInvalid(
        f"bytes {low:#x} to {high:#x} belong to several storages that overlap, and to none as a whole",
        remedy="Make the tensors views of one storage.",
    )
