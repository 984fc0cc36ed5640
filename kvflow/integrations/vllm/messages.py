"""What the sides of the connector send: commands to ranks, and counters to vLLM; others wrap them in vLLM's classes."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvflow import Finished, Grant, Ticket, events

BlocksByGroup = tuple[tuple[int, ...], ...]  # one list of block ids for each group, with -1 for a block that is absent

# Commands: the scheduler's side sends those of a step to every rank. ``request_id`` is the name in this engine.


class Hold(Struct, frozen=True, tag=True):
    """Hold the lease of a grant. Report it as sent when it ends, but an open one not before its last ``Tell``."""

    request_id: str
    grant: Grant
    step: int = 0  # the last one that wrote into the blocks
    digests: tuple[tuple[bytes, ...], ...] = ()  # by which peers find it, one list for each group
    number: int = 0


class Tell(Struct, frozen=True, tag=True):
    """Say which tokens of an open lease have settled, once a step has written, and renew the lease."""

    request_id: str
    num_tokens: int | None  # None: all, and nothing more comes
    block_ids: BlocksByGroup  # those behind what the ranks know
    step: int
    number: int = 0


class End(Struct, frozen=True, tag=True):
    """End leases now, before this step writes, and report none that is open."""

    request_ids: tuple[str, ...]
    number: int = 0


class Load(Struct, frozen=True, tag="Pull"):  # the tag of 0.1.0
    """Read the blocks of a ticket into these blocks; report the request as received, whether the read failed or not."""

    request_id: str
    ticket: Ticket
    block_ids: BlocksByGroup  # -1 where nothing must be written
    prefix: events.PrefixFetched | None = None  # without ``seconds`` and ``nbytes``; None for a ticket of a request


class RenewLeases(Struct, frozen=True, tag="Keep"):  # likewise
    """Renew the leases of a ticket until it is pulled or released: its request waits for free blocks."""

    request_id: str
    ticket: Ticket


class Cancel(Struct, frozen=True, tag=True):
    """Cancel the pull of a request that has ended; report its blocks when nothing writes into them."""

    request_id: str


class GiveBack(Struct, frozen=True, tag="Release"):  # likewise
    """Release a ticket without reading it."""

    request_id: str
    ticket: Ticket


class Fail(Struct, frozen=True, tag=True):
    """Report a request as received and failed: its parameters were refused."""

    request_id: str
    code: str
    reason: str
    remedy: str = ""


class Reset(Struct, frozen=True, tag=True):
    """End the leases and pulls of these requests, if it has not come over ``admission``: their blocks are void."""

    void: tuple[str, ...]
    number: int = 0  # of this reset, so that no answer to an earlier one counts
    request_id: str = "of a reset"


class KeepBlocks(Struct, frozen=True, tag=True):
    """Hold a kept lease, once its blocks are written."""

    request_id: str  # of the grant
    grant: Grant
    digests: tuple[tuple[bytes, ...], ...]  # of all its blocks, one list for each group
    step: int  # the last one that may write into its blocks


Command = Hold | Tell | End | Load | RenewLeases | Cancel | GiveBack | Fail | Reset | KeepBlocks

Ordered = Hold | Tell | End
"""Commands for leases. Their ``number`` grows by one: ranks get them twice, over ``admission`` and with a step."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Command])


def pack(commands: Sequence[Command]) -> bytes | Sequence[Command]:
    """Return the form of commands that is pickled: msgpack, because pickle takes seven times as long for a Struct."""
    try:
        return _encoder.encode(commands)
    except (UnicodeEncodeError, TypeError):  # msgpack refuses a lone surrogate in a client's text; pickle does not
        return commands


def unpack(packed: bytes | Sequence[Command]) -> Sequence[Command]:
    """Return the commands that ``pack`` took."""
    return _decoder.decode(packed) if isinstance(packed, bytes) else packed


class Found(Struct, frozen=True):
    """What a source holds of a prompt. The thread that asks hands it to the scheduler's."""

    source: str  # its control endpoint
    ticket: Ticket
    num_tokens: int  # first tokens of the prompt that it holds
    asked_s: float  # seconds until its answer


# Counters: plain numbers that can be sent and added up.

PHASES = ("total_s", "queue_s", "post_s", "wire_s", "fence_s")
"""Phases of a completed pull in seconds, as in ``TransferReport.timings_s``."""

SERIES = (*PHASES, "nbytes", "descriptors")  # one number for each completed pull

COUNTS = {
    "failed": "Num failed ({})",  # pulls, by error code
    "leases": "Num leases {}",  # those that have ended, by outcome
    "defects": "Num defects ({})",  # exceptions that vLLM's scheduler did not see, by the method that raised them
    "untagged": "Num untagged requests ({})",  # neither ask for a ticket nor bring one, by their parameters
    "prefixes": "Num prefixes ({})",  # prompts that sources were asked for, by what came of it, and ignored hints
}
"""Counts by key, and the name of each in vLLM's log line."""

Counters = dict[str, Any]
"""Counters of a rank, or of the scheduler's side: a list for each name in ``SERIES``, a dict for each in ``COUNTS``."""


def empty_counters() -> Counters:
    """Return counters with nothing in them."""
    return {**{name: [] for name in SERIES}, **{name: {} for name in COUNTS}}


def is_empty(counters: Counters) -> bool:
    """Return whether nothing was counted."""
    return not any(counters.values())


class Tally:
    """Counters since the last call of ``take``. Thread: the caller's."""

    def __init__(self) -> None:
        self._counters = empty_counters()

    def count(self, name: str, key: str) -> None:
        """Add one to the count of a key."""
        counts = self._counters[name]
        counts[key] = counts.get(key, 0) + 1

    def count_ends(self, ends: Iterable[Finished]) -> None:
        """Count the ends of pulls and of leases."""
        for end in ends:
            if end.report is not None:
                for name in PHASES:
                    self._counters[name].append(end.report.timings_s.get(name.removesuffix("_s"), 0.0))
                self._counters["nbytes"].append(end.report.nbytes)
                self._counters["descriptors"].append(end.report.descriptors)
            elif end.side == "producer":
                self.count("leases", end.outcome)
            else:
                self.count("failed", end.error.code if end.error else "unknown")

    def take(self) -> Counters | None:
        """Return the counters, or None if nothing was counted."""
        if is_empty(self._counters):
            return None
        counters, self._counters = self._counters, empty_counters()
        return counters


def add_counters(counters: Counters, other: Counters) -> None:
    """Add other counters to the first ones, in place."""
    for name in SERIES:
        counters[name].extend(other[name])
    for name in COUNTS:
        for key, number in other[name].items():
            counters[name][key] = counters[name].get(key, 0) + number


def summary(counters: Counters) -> dict[str, int | float]:
    """Return the figures of vLLM's log line ``KV Transfer metrics``."""
    transfers = len(counters["total_s"])
    line: dict[str, int | float] = {"Num successful transfers": transfers}
    if transfers:
        seconds, megabytes = sum(counters["total_s"]), sum(counters["nbytes"]) / 2**20
        late = sorted(counters["total_s"])[int(transfers * 0.9)]
        line |= {
            "Avg transfer time (ms)": round(seconds / transfers * 1e3, 3),
            "P90 transfer time (ms)": round(late * 1e3, 3),
            "Avg MB per transfer": round(megabytes / transfers, 3),
            "Throughput (MB/s)": round(megabytes / seconds, 3) if seconds else 0.0,
            "Avg number of descriptors": round(sum(counters["descriptors"]) / transfers, 1),
        }
    line["Num failed transfers"] = sum(counters["failed"].values())
    for name, label in COUNTS.items():
        line |= {label.format(key): number for key, number in sorted(counters[name].items())}
    return line
