"""Many scenarios, in several processes: which seeds break a promise, and how fast they were run."""

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from msgspec import Struct

from kvflow.testing.scenario import Outcome, simulate

SEEDS_AT_ONCE = 25
"""Seeds that a process is given at once: some seconds of work."""


class Summary(Struct, frozen=True, kw_only=True):
    """How a series of scenarios went.

    Attributes:
        scenarios: how many were run.
        requests: of all of them.
        requests_min: of the scenario with the fewest.
        outcomes: how their pulls ended, and how often.
        virtual_s: seconds on the clocks of the scenarios, together.
        elapsed_s: seconds on ours.
        broken: scenarios in which a promise was broken, by seed.
        interrupted: whether somebody ended the series early, by SIGINT.
    """

    scenarios: int = 0
    requests: int = 0
    requests_min: int = 0
    outcomes: dict[str, int] = {}
    virtual_s: float = 0.0
    elapsed_s: float = 0.0
    broken: tuple[Outcome, ...] = ()
    interrupted: bool = False

    @property
    def scenarios_per_s(self) -> float:
        """Scenarios that were run in a second."""
        return self.scenarios / self.elapsed_s if self.elapsed_s else 0.0


def run_seeds(
    first: int, seeds: int, *, jobs: int, calm: bool = False, on_progress: Callable[[Summary], None] = lambda _: None
) -> Summary:
    """Run the scenarios of ``seeds`` seeds from ``first`` on. Interrupted, return what there is until then.

    Args:
        first: the first seed.
        seeds: how many, at least 1.
        jobs: processes; one runs them here.
        calm: let nothing go wrong.
        on_progress: told of the sum so far, now and then.
    """
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for part in _parts(first, seeds, jobs, calm=calm):
            outcomes += part
            on_progress(_sum(outcomes, time.monotonic() - began_s))
    except KeyboardInterrupt:
        interrupted = True
    return _sum(outcomes, time.monotonic() - began_s, interrupted=interrupted)


def _parts(first: int, seeds: int, jobs: int, *, calm: bool) -> Iterator[list[Outcome]]:
    starts = range(first, first + seeds, SEEDS_AT_ONCE)
    parts = [(start, min(SEEDS_AT_ONCE, first + seeds - start), calm) for start in starts]
    if jobs == 1:
        yield from (_run_part(*part) for part in parts)
        return
    # Not forked: a test or an embedder that asks may have threads.
    context = multiprocessing.get_context("spawn")
    # A terminal interrupts the children as well; it is for us to end them.
    pool = ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        for done in as_completed([pool.submit(_run_part, *part) for part in parts]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # once: what a second call says counts, and the end of a ``with`` is one


def _run_part(first: int, seeds: int, calm: bool) -> list[Outcome]:
    return [simulate(seed, calm=calm) for seed in range(first, first + seeds)]


def _sum(outcomes: list[Outcome], elapsed_s: float, *, interrupted: bool = False) -> Summary:
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.outcomes)
    return Summary(
        scenarios=len(outcomes),
        requests=sum(outcome.requests for outcome in outcomes),
        requests_min=min((outcome.requests for outcome in outcomes), default=0),
        outcomes=dict(counted.most_common()),
        virtual_s=sum(outcome.virtual_s for outcome in outcomes),
        elapsed_s=elapsed_s,
        broken=tuple(sorted((each for each in outcomes if each.violation), key=lambda each: each.seed)),
        interrupted=interrupted,
    )
