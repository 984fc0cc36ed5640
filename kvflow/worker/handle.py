"""What a caller has of a pull that was started: its end, and the way to cancel it."""

import asyncio
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvflow.errors import KvflowError
from kvflow.transfer.report import TransferReport


class PullHandle:
    """One pull. Made by ``Worker.start_pull`` and ``Worker.pull_many``.

    ``await`` it for the report, or for the error that ended the pull: see ``Worker.pull``. Cancelling the await cancels
    the pull. Several tasks may await one handle. A failure that is not awaited is in the log all the same.

    Attributes:
        id: of the pull; unique in its worker.

    Thread: the worker's event loop.
    """

    _report: TransferReport | None = None
    _error: KvflowError | None = None
    _quiescent = False
    _waiters: "list[asyncio.Future[None]] | tuple[()]" = ()
    _on_settled: "Sequence[Callable[[PullHandle], object]]" = ()

    def __init__(self, pull_id: int, cancel: Callable[[int], None]) -> None:
        self.id = pull_id
        self._cancel = cancel

    def __await__(self) -> Generator[Any, None, TransferReport]:
        """Wait for the report."""
        if self._report is not None:
            return self._report
        if self._error is None:
            try:
                yield from self._wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def __repr__(self) -> str:
        """Say how far it has come."""
        state = "open" if not self.done() else "completed" if self._error is None else self._error.code
        return f"<PullHandle {self.id}: {state}{'' if self._quiescent or not self.done() else ', quarantined'}>"

    def done(self) -> bool:
        """Return whether the pull has completed or failed."""
        return self._report is not None or self._error is not None

    def result(self) -> TransferReport:
        """Return the report of a pull that is done.

        Raises:
            KvflowError: what ended it; see ``Worker.pull``.
            asyncio.InvalidStateError: it is not done.
        """
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise asyncio.InvalidStateError("the pull is not done")
        return self._report

    def exception(self) -> KvflowError | None:
        """Return what ended a pull that is done; None if it has completed.

        Raises:
            asyncio.InvalidStateError: it is not done.
        """
        if not self.done():
            raise asyncio.InvalidStateError("the pull is not done")
        return self._error

    def cancel(self) -> None:
        """Give the pull up; does nothing if it is done. Its blocks may be reused after ``quiesced``."""
        if not self.done():
            self._cancel(self.id)

    async def quiesced(self) -> None:
        """Wait until the pull is done and nothing writes into its blocks.

        Cancellation: safe; the pull goes on.
        """
        while not self._quiescent:
            await self._wait()

    def on_settled(self, callback: Callable[["PullHandle"], object]) -> None:
        """Call ``callback`` once the pull is done and nothing writes into its blocks; now if that is so already."""
        if self._quiescent:
            callback(self)
        else:
            self._on_settled = [*self._on_settled, callback]

    def complete(self, report: TransferReport) -> None:
        """Note that the pull has completed. Called by the worker."""
        self._report, self._quiescent = report, True
        if self._waiters or self._on_settled:
            self.settle()

    def fail(self, error: KvflowError) -> None:
        """Note that the pull has failed; something may still write into its blocks. Called by the worker."""
        self._error = error
        self._wake()

    def settle(self) -> None:
        """Note that the pull is done and nothing writes into its blocks. Called by the worker, once."""
        self._quiescent = True
        self._wake()
        callbacks, self._on_settled = self._on_settled, ()
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - the pulls that are completed with this one go on
                told = {"message": f"a callback of {self!r} failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)

    @types.coroutine
    def _wait(self) -> Generator[Any, None, None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = self._waiters or []
        self._waiters.append(waiter)
        try:
            yield from waiter
        finally:
            if waiter in self._waiters:  # cancelled: a caller that waits again and again must not fill the list
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
