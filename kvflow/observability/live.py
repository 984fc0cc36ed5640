"""The live page of a worker: what it holds, how fast it moves bytes, recent pulls and recent failures."""

import asyncio
import base64
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvflow import events
from kvflow.events import Hook, OnlyEvents
from kvflow.observability.http import Answer
from kvflow.observability.logs import to_json
from kvflow.report import PHASES

RECENT_MAX: Final = 20
"""Completed pulls, and failed ones, that the page shows."""

TEXT_MAX: Final = 300
"""Characters of a name or a message that the page shows. Peers and clients choose some of them."""

INTERVAL_S: Final = 1.0
"""Between two events of the stream."""

ASSET: Final = Path(__file__).with_name("live.html")


class Live:
    """What the live page shows of one worker.

    Args:
        worker: engine id, rank and version.

    Thread: the worker's event loop.
    """

    def __init__(self, worker: dict[str, str]) -> None:
        self._worker = worker
        self._totals = {"pulls": 0, "nbytes": 0, "failed": 0}
        self._completed: deque[tuple[float, events.TransferCompleted]] = deque(maxlen=RECENT_MAX)
        self._failed: deque[tuple[float, events.TransferFailed]] = deque(maxlen=RECENT_MAX)

    def hooks(self) -> list[Hook]:
        """Return the hooks that feed the page."""
        return [
            OnlyEvents(events.TransferCompleted, self._on_completed),
            OnlyEvents(events.TransferFailed, self._on_failed),
        ]

    def _on_completed(self, event: events.TransferCompleted) -> None:
        self._totals["pulls"] += 1
        self._totals["nbytes"] += event.report.nbytes
        self._completed.append((time.monotonic(), event))

    def _on_failed(self, event: events.TransferFailed) -> None:
        self._totals["failed"] += 1
        self._failed.append((time.monotonic(), event))

    def state(self, held: object, *, ready: bool) -> dict[str, Any]:
        """Return what one event of the stream says.

        Args:
            held: the snapshot of the worker.
            ready: whether it takes new offers and pulls.
        """
        now = time.monotonic()
        return {
            "worker": self._worker,
            "ready": ready,
            "at_s": now,
            "totals": self._totals,
            "pulls": [
                {
                    "age_s": now - at,
                    "request_id": event.request_id[:TEXT_MAX],
                    "peer": event.remote_engine_id[:TEXT_MAX],
                    "nbytes": event.report.nbytes,
                    "transport": event.report.transport,
                    "timings_s": event.report.timings_s,
                }
                for at, event in reversed(self._completed)
            ],
            "failures": [
                {
                    "age_s": now - at,
                    "request_id": event.request_id[:TEXT_MAX],
                    "peer": (event.peer or event.remote_engine_id)[:TEXT_MAX],
                    "code": event.code[:TEXT_MAX],
                    "phase": event.phase,
                    "detail": event.detail[:TEXT_MAX],
                    "remedy": event.remedy[:TEXT_MAX],
                }
                for at, event in reversed(self._failed)
            ],
            "held": held,
        }

    async def stream(self, snapshot: Callable[[], object], is_ready: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events without end.

        Args:
            snapshot: ``Worker.snapshot``.
            is_ready: tells whether the worker takes new offers and pulls.

        Cancellation: ends the stream.
        """
        while True:
            yield b"data: " + to_json(self.state(snapshot(), ready=is_ready())) + b"\n\n"
            await asyncio.sleep(INTERVAL_S)


@cache
def live_page() -> Answer:
    """Return the page. A browser runs its one script, and loads nothing from elsewhere."""
    page = ASSET.read_text().replace("PHASES = []", f"PHASES = {json.dumps(PHASES)}")
    allowed = {
        f"{kind}-src": f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for kind in ("script", "style")
        for content in re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    }
    rules = [f"{source} {what}" for source, what in allowed.items()]
    policy = "; ".join(["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", *rules])
    return Answer(page.encode(), "text/html; charset=utf-8", policy=policy)
