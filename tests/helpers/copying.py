"""Helpers of the read thread that are ready when they are asked, and that read pieces of small chunks, too."""

from contextlib import contextmanager

import pytest

from kvflow.reads.nixl import backend, copying

PATIENCE_S = 60.0
PIECE_BYTES = 512


class ReadyHelper(copying.Helper):
    """A helper that has its agent when it is made, and takes part on a machine with one core, too."""

    def __init__(self, make_reader):
        super().__init__(make_reader)
        self.start(lambda: None)
        assert self._done.acquire(timeout=PATIENCE_S)

    def is_ready(self):
        super().is_ready()
        return True


@contextmanager
def copied_in_small_pieces():
    """Have helpers take part in every chunk of two descriptors or more, while the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "SHARED_BYTES_MIN", 1)
        patch.setattr(copying, "SHARED_BYTES_MIN", 1)
        patch.setattr(copying, "_PIECE_BYTES", PIECE_BYTES)
        patch.setattr(copying, "Helper", ReadyHelper)
        yield
