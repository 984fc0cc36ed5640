"""What a run of chaos has done, and what came of it."""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

HEADER = ("what was done", "times", "pulls", "how they ended", "worst recovery")


@dataclass
class Row:
    """One kind of harm to one kind of victim.

    Attributes:
        times: it was done.
        ends: how pulls ended that were under way.
        recovery_s: longest time from the end of the harm to the next good pull.
    """

    times: int = 0
    ends: Counter = field(default_factory=Counter)
    recovery_s: float = 0.0


@dataclass
class Record:
    """All of a run.

    Attributes:
        rows: (victim, fault) -> what came of it.
        kinds: how pulls of each kind of offer ended.
        complaints: what must not be; none after a good run.
        beside: seconds of each pull of the control group.
    """

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    kinds: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    complaints: list[str] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def row(self, victim, fault):
        return self.rows.setdefault((victim, fault), Row())

    def complain(self, text):
        self.complaints.append(f"after {time.monotonic() - self.began_s:.1f} s: {text}")

    def ends(self):
        """Count the ends of all disturbed pulls."""
        return sum((row.ends for row in self.rows.values()), Counter())

    def __str__(self):
        lines = [HEADER]
        for (victim, fault), row in sorted(self.rows.items()):
            if not row.times:
                continue
            ends = ", ".join(f"{number} {end}" for end, number in row.ends.most_common())
            times, pulls = str(row.times), str(row.ends.total())
            lines.append((f"{victim}: {fault}", times, pulls, ends, f"{row.recovery_s:.2f} s"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        for kind, ends in self.kinds.items():
            text.append(f"{kind}: " + ", ".join(f"{number} {end}" for end, number in ends.most_common()))
        if self.beside:
            text.append(f"undisturbed beside it: {len(self.beside):,} pulls, the slowest {max(self.beside):.2f} s")
        return "\n".join(line.rstrip() for line in [*text, *self.complaints])
