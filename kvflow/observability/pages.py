"""What a worker shows over HTTP: its metrics, its health, and what it holds."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvflow.events import Hook
from kvflow.observability.http import Answer, Page, open_http
from kvflow.observability.logs import to_json
from kvflow.observability.metrics import Metrics, exposition, require_client
from kvflow.version import __version__

JSON = "application/json"


class WorkerPages:
    """The pages of one worker. They are fed by hooks, and ask the worker when a client asks them.

    Args:
        engine_id: engine of the worker.
        rank: its rank.

    Raises:
        ConfigInvalid: ``prometheus_client`` is not installed.

    Thread: the worker's event loop; the hooks from any thread.
    """

    def __init__(self, engine_id: str, rank: int) -> None:
        require_client()
        self._metrics = Metrics(engine_id=engine_id, rank=str(rank), version=__version__)

    def hooks(self) -> list[Hook]:
        """Return the hooks that feed the pages."""
        return self._metrics.hooks()

    @asynccontextmanager
    async def served(
        self, address: str, *, snapshot: Callable[[], Any], is_ready: Callable[[], bool]
    ) -> AsyncGenerator[str, None]:
        """Serve the pages while the context is open.

        Args:
            address: ``HOST:PORT`` to listen on.
            snapshot: ``Worker.snapshot``.
            is_ready: tells whether the worker takes new offers and pulls.

        Yields:
            ``HOST:PORT``, with the port that was taken.

        Raises:
            ConfigInvalid: there is no listening there.
        """

        def ready() -> Answer:
            return Answer(b"ready\n") if is_ready() else Answer(b"the worker takes nothing new\n", status=503)

        self._metrics.snapshot = snapshot
        pages: dict[str, Page] = {
            "/metrics": lambda: Answer(*exposition(self._metrics)),
            "/healthz": lambda: Answer(b"alive\n"),  # the worker's event loop has run this
            "/readyz": ready,
            "/debug/kvflow": lambda: Answer(to_json(snapshot()), JSON),
        }
        async with open_http(address, pages) as found:
            yield found
