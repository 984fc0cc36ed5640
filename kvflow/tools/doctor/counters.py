"""What a server of vLLM has counted, read from its ``/metrics``: a text from outside, so everything is bounded."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

NUMBER_MAX: Final = float(1 << 53)
"""Of a counter. What is larger, negative or no number is no counter."""

KEYS_MAX: Final = 256
"""Values of a label. kvflow's labels have fewer than forty."""

SERIES_MAX: Final = 100_000
"""Lines with a counter that are read. The engines of one server have one for each label and engine."""

NAMES: Final = {
    "vllm:request_success_total": ("requests", ""),
    "vllm:num_requests_running": ("running", ""),
    "vllm:num_requests_waiting": ("waiting", ""),
    "vllm:external_prefix_cache_hits_total": ("loaded_tokens", ""),
    "vllm:kvflow_transfer_seconds_count": ("transfers", ""),
    "vllm:kvflow_transfer_seconds_sum": ("seconds", ""),
    "vllm:kvflow_transfer_bytes_sum": ("nbytes", ""),
    "vllm:kvflow_transfer_descriptors_sum": ("descriptors", ""),
    "vllm:kvflow_failed_transfers_total": ("failed", "code"),
    "vllm:kvflow_leases_ended_total": ("leases", "outcome"),
    "vllm:kvflow_untagged_requests_total": ("untagged", "params"),
    "vllm:kvflow_defects_total": ("defects", "method"),
}
"""Name of a series -> our name of the counter, and the label that divides it."""

SERVED: Final = {ours: name for name, (ours, _) in NAMES.items()}
"""Our name of a counter -> name of its series."""

LINE: Final = re.compile(r"(vllm:[a-z_]+)(?:\{(.*)\})? ([^ ]+)")
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Key = tuple[str, str]
"""Our name of a counter, and the value of its label; empty if it has none."""


class Counted(Struct, frozen=True):
    """What a server has counted, or how much of it came between two moments.

    Attributes:
        numbers: of each counter, all engines of the server together.
        vllm: whether there is any metric of vLLM.
        kvflow: whether there is any metric of kvflow's connector, used or not.
    """

    numbers: Mapping[Key, float]
    vllm: bool = False
    kvflow: bool = False

    def of(self, name: str, key: str = "") -> float:
        """Return a counter; 0 if the server has not counted it."""
        return self.numbers.get((name, key), 0.0)

    def all(self, name: str) -> float:
        """Return the sum of a counter over all values of its label."""
        return sum(number for (each, _), number in self.numbers.items() if each == name)

    def keys(self, name: str) -> list[str]:
        """Return the values of a label for which a counter is not 0, the largest first."""
        found = {key: number for (each, key), number in self.numbers.items() if each == name and number}
        return sorted(found, key=lambda key: (-found[key], key))

    def since(self, earlier: "Counted") -> "Counted":
        """Return by how much counters have grown. One that became smaller has grown by a negative number."""
        keys = self.numbers.keys() | earlier.numbers.keys()
        grown = {key: self.of(*key) - earlier.of(*key) for key in keys}
        return Counted(grown, vllm=self.vllm, kvflow=self.kvflow)

    @property
    def restarted(self) -> bool:
        """Whether a counter that only grows became smaller: the server was started again."""
        return any(number < 0 and name not in ("running", "waiting") for (name, _), number in self.numbers.items())


def read_counters(text: str) -> Counted:
    """Read the text format of Prometheus; what is something else is skipped."""
    numbers: dict[Key, float] = {}
    vllm = kvflow = False
    for line in _first(text.splitlines()):
        vllm = vllm or "vllm:" in line
        kvflow = kvflow or "vllm:kvflow_" in line
        match = LINE.match(line)
        name, label = NAMES.get(match[1], ("", "")) if match else ("", "")
        if match is None or not name:
            continue
        number = _number(match[3])
        key = name, dict(LABEL.findall(match[2] or "")).get(label, "")[:200] if label else ""
        if number is not None and (key in numbers or len(numbers) < KEYS_MAX):
            numbers[key] = numbers.get(key, 0.0) + number
    return Counted(numbers, vllm=vllm, kvflow=kvflow)


def _first(lines: Iterable[str]) -> Iterator[str]:
    count = 0
    for line in lines:
        if "vllm:" in line:
            count += 1
            yield line
        if count >= SERIES_MAX:
            return


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0.0 <= number <= NUMBER_MAX else None
