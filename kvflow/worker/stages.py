"""How far a worker's life has come, and what it answers to those who want something new of it."""

from typing import Literal

from kvflow.errors import WorkerClosed, WorkerDraining

Stage = Literal["open", "draining", "closing"]

_ORDER: tuple[Stage, ...] = ("open", "draining", "closing")


def later(stage: Stage, other: Stage) -> Stage:
    """Return the later of two stages: a life goes one way."""
    return max(stage, other, key=_ORDER.index)


def require_open(stage: Stage, words: str) -> None:
    """Refuse what a worker begins only while it is open.

    Args:
        stage: of the worker.
        words: what it does not do any more.

    Raises:
        WorkerDraining: the worker finishes what it has begun.
        WorkerClosed: it does not even do that.
    """
    require_running(stage, words)
    if stage == "draining":
        raise WorkerDraining(f"the worker is draining and {words}")


def require_running(stage: Stage, words: str) -> None:
    """Refuse what a worker does until it closes.

    Args:
        stage: of the worker.
        words: what it does not do any more.

    Raises:
        WorkerClosed: it is closing.
    """
    if stage == "closing":
        raise WorkerClosed(f"the worker is closing and {words}")
