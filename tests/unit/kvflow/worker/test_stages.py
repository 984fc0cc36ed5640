"""A worker's life goes one way, and each stage has its own refusal."""

import pytest

from kvflow.errors import WorkerClosed, WorkerDraining
from kvflow.worker.stages import later, require_open, require_running


@pytest.mark.parametrize(
    ("stage", "other", "latest"),
    [
        ("open", "draining", "draining"),
        ("draining", "draining", "draining"),
        ("closing", "draining", "closing"),
        ("open", "closing", "closing"),
    ],
)
def test_a_life_goes_one_way(stage, other, latest):
    assert later(stage, other) == latest


@pytest.mark.parametrize(
    ("stage", "to_begin", "to_finish"),
    [("open", None, None), ("draining", WorkerDraining, None), ("closing", WorkerClosed, WorkerClosed)],
)
def test_refusals(stage, to_begin, to_finish):
    for require, kind in ((require_open, to_begin), (require_running, to_finish)):
        if kind is None:
            require(stage, "pulls nothing")
            continue
        with pytest.raises(kind, match="pulls nothing") as caught:
            require(stage, "pulls nothing")
        assert type(caught.value) is kind
