"""Many scenarios, in several processes: which seeds break a promise, and how fast they were run."""

import gc
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from msgspec import Struct
from msgspec.structs import replace

from tests.simulation.scenario import Outcome, simulate

SEEDS_AT_ONCE = 25
"""Seeds that a process is given at once: some seconds of work."""

GARBAGE_OBJECTS = 50_000
"""New objects after which a process looks for garbage: about those of two scenarios, instead of 700."""


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
    summary = Summary()
    try:
        for part in _parts(first, seeds, jobs, calm=calm):
            summary = _sum(summary, part, time.monotonic() - began_s)
            on_progress(summary)
    except KeyboardInterrupt:
        summary = replace(summary, elapsed_s=time.monotonic() - began_s, interrupted=True)
    return summary


def _parts(first: int, seeds: int, jobs: int, *, calm: bool) -> Iterator[list[Outcome]]:
    starts = range(first, first + seeds, SEEDS_AT_ONCE)
    parts = [(start, min(SEEDS_AT_ONCE, first + seeds - start), calm) for start in starts]
    if jobs == 1:
        yield from (_run_part(*part) for part in parts)
        return
    # Not forked: a test or an embedder that asks may have threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin)
    try:
        for done in as_completed([pool.submit(_run_part, *part) for part in parts]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # once: what a second call says counts, and the end of a ``with`` is one


def _begin() -> None:
    """Make a process ready that does nothing else but run scenarios."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts us as well; it is for our parent to end us
    gc.collect()
    gc.freeze()  # what is imported is never garbage
    gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])


def _run_part(first: int, seeds: int, calm: bool) -> list[Outcome]:
    return [simulate(seed, calm=calm) for seed in range(first, first + seeds)]


def _sum(before: Summary, part: list[Outcome], elapsed_s: float) -> Summary:
    counted = Counter(before.outcomes)
    for outcome in part:
        counted.update(outcome.outcomes)
    fewest = min(outcome.requests for outcome in part)
    broken = [*before.broken, *(outcome for outcome in part if outcome.violation)]
    return Summary(
        scenarios=before.scenarios + len(part),
        requests=before.requests + sum(outcome.requests for outcome in part),
        requests_min=min(fewest, before.requests_min) if before.scenarios else fewest,
        outcomes=dict(counted.most_common()),
        virtual_s=before.virtual_s + sum(outcome.virtual_s for outcome in part),
        elapsed_s=elapsed_s,
        broken=tuple(sorted(broken, key=lambda each: each.seed)),
    )
