"""Requests to decode engines of a cluster, and what must become of them."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from .engines import Request
from .prompts import prompt_of
from .victims import Cluster, Victim

LENGTH = 300
LONG = 600
"""Tokens of an answer that is not complete when the harm is done."""
PATIENCE_S = 60.0
"""What a busy machine may add to a deadline."""


class Asked:
    """One prompt for each decode engine, with a ticket of its own unless some are given; ``submit`` sends them."""

    def __init__(
        self,
        cluster: Cluster,
        prefill: Victim,
        name: str,
        *,
        decodes: Sequence[Victim] = (),
        tickets: Sequence[Mapping[str, Any]] = (),
        max_tokens: int = 32,
    ) -> None:
        self.prompt = prompt_of(LENGTH, name)
        self.max_tokens = max_tokens
        self.alone = cluster.second.generate(self.prompt, max_tokens=max_tokens)["tokens"]
        self.decodes = decodes or cluster.decodes
        self.tickets = tickets or [prefill.ticket(self.prompt) for _ in self.decodes]
        self.requests: list[Request] = []
        self.begun = threading.Semaphore(0)
        self._since_s = 0.0
        self._ended_s: dict[str, float] = {}

    def submit(self) -> Self:
        """Send them."""
        for decode, params in zip(self.decodes, self.tickets, strict=True):
            request = decode.submit(self.prompt, params, max_tokens=self.max_tokens, progress=self._progressed)
            request.answer.add_done_callback(lambda _, name=request.request_id: self._note_end(name))
            self.requests.append(request)
        return self.count()

    @contextmanager
    def held(self, at: str) -> Iterator[None]:
        """Send them, and hold their reads before the ``data`` or before the ``fence``."""
        with ExitStack() as stack:
            reads = [stack.enter_context(decode.held(at)) for decode in self.decodes]
            self.submit()
            for read in reads:
                read.reached()
            yield

    def count(self) -> Self:
        """Count seconds from now on."""
        self._since_s = time.monotonic()
        return self

    def wait_begun(self) -> Self:
        """Wait until all have read their caches and have first tokens; none has ended."""
        for _ in self.requests:
            assert self.begun.acquire(timeout=PATIENCE_S)
        assert not any(request.answer.done() for request in self.requests)
        return self

    def expect_right(self) -> None:
        """Check that all read the cache, and say what one engine says."""
        for request in self.requests:
            answer = request.wait()
            assert not (reason := request.engine.reason(request.request_id)), reason
            assert answer["tokens"] == self.alone

    def expect_policy(self, reasons: set[str], bound_s: float) -> None:
        """Check why each could not read the cache, and what it has made of it within the bound.

        With an empty reason among them, some may have read it: they say what one engine says.
        """
        for request in self.requests:
            answer = request.wait()
            took_s = self._ended_s[request.request_id] - self._since_s
            reason = request.engine.reason(request.request_id)
            assert reason in reasons, answer
            assert took_s < bound_s + PATIENCE_S
            if request.engine.options.failure_policy == "recompute" or not reason:
                assert answer["tokens"] == self.alone
            else:
                assert answer["finish_reason"] == "error"

    def _progressed(self, tokens: int) -> None:
        if tokens == 1:
            self.begun.release()

    def _note_end(self, request_id: str) -> None:
        self._ended_s[request_id] = time.monotonic()


def serves(cluster: Cluster, prefill: Victim) -> None:
    """Check that both decode engines say of a prompt what one engine says."""
    Asked(cluster, prefill, "serves", max_tokens=8).submit().expect_right()
