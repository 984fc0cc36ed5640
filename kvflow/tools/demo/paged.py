"""The cache as the model sees it: one layer's pages, written and gathered by block id.

This is the only place that knows how a view of ``cache.views`` is shaped.

Shape suffixes: ``B`` blocks, ``H`` KV heads, ``N`` tokens of a block, ``T`` tokens of a request, ``D`` head size.
"""

# ruff: noqa: N803, N806  # shape suffixes are capital letters, as everywhere in this field

import torch


class PagedKV:
    """The pages of one layer.

    Args:
        view: of ``cache.views``. ``kv="content"``: ``[block, head, token, 2 * head_size]``, K before V.
            ``kv="split"``: ``[2, block, token, head, head_size]``.
        head_size: elements of one head of one token.

    Thread: one at a time per block; the model's thread in this engine.
    """

    def __init__(self, view: torch.Tensor, head_size: int) -> None:
        if view.dim() == 5:
            self._k_BHND, self._v_BHND = view.transpose(2, 3)
        else:
            self._k_BHND, self._v_BHND = view[..., :head_size], view[..., head_size:]
        self._block_size = self._k_BHND.shape[2]

    def write(self, block_ids: torch.Tensor, first_token: int, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Store keys and values of consecutive tokens.

        Args:
            block_ids: int64, shape (B,): block i holds tokens [i * block_size, (i + 1) * block_size).
            first_token: position of ``k_THD[0]``.
            k_THD: float32, rounded to the cache's dtype.
            v_THD: like ``k_THD``.
        """
        position_T = torch.arange(first_token, first_token + len(k_THD))
        block_T, offset_T = block_ids[position_T // self._block_size], position_T % self._block_size
        self._k_BHND[block_T, :, offset_T] = k_THD.to(self._k_BHND.dtype)
        self._v_BHND[block_T, :, offset_T] = v_THD.to(self._v_BHND.dtype)

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens of the blocks, as contiguous float32 of shape (H, B * N, D)."""
        return _gather(self._k_BHND, block_ids), _gather(self._v_BHND, block_ids)


def _gather(pages_BHND: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    # Contiguous whatever the layout, because the order in which a sum is taken may depend on the strides.
    pages_HBND = pages_BHND[block_ids].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return pages_HBND.flatten(1, 2)
