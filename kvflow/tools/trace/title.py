"""Say in one sentence where the time of a request went. Numbers in a sentence add up exactly."""

import math
from collections.abc import Mapping
from typing import Final

from kvflow.reprs import counted
from kvflow.tools.trace.model import RequestTrace

ONE: Final = {"post": "wire", "scatter": "wire"}
"""Phases that the sentence counts with another one."""


def title_of(request: RequestTrace) -> str:
    """Return the title of a request."""
    whole, parts = shown_ms(_merged(request), request.total_s)
    moved = _moved(request)
    if moved and "wire" in parts:
        parts["wire"] = parts["wire"] or "0"
    spent = [
        f"{text} {name}{f' ({moved})' if name == 'wire' and moved else ''}" for name, text in parts.items() if text
    ]
    sentence = f"{_beginning(request, whole)}: {', '.join(spent)}" if spent else _beginning(request, whole)
    failure = request.failure
    if failure is None:
        return sentence
    remedy = f". {printable(failure.remedy)}" if failure.remedy else ""
    return f"{sentence}{remedy}"


def _beginning(request: RequestTrace, whole: str) -> str:
    since = "request" if request.router else "offer" if _has(request, "ticket") else "call of pull"
    failure = request.failure
    if failure is not None:
        after = f"{whole} ms after the {since}"
        verb = "answered without the cache" if request.router else "failed"
        if request.router and request.router.failure:
            verb, sent = "failed", request.router.sent_bytes
            after += f" and {shown_bytes(sent)} of the answer" if sent else ""
        return f"{verb} {after}, {printable(failure.code)} in {printable(failure.phase)}"
    if request.outcome == "offered" and not request.router:
        ends = [offer for offer in request.offers if offer.held_s is not None]
        if not ends:
            return "offered, and no pull is recorded"
        held_s = max(offer.held_s or 0.0 for offer in ends)
        return f"offered for {held_s:.3g} s, {printable(ends[-1].outcome)}, and no pull is recorded"
    if request.first_token_s is not None:
        return f"first token {whole} ms after the {since}"
    if request.router is not None:
        return f"answered {whole} ms after the request"
    return f"cache delivered {whole} ms after the {since}"


def _has(request: RequestTrace, name: str) -> bool:
    return any(phase.name == name for phase in request.phases)


def _merged(request: RequestTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase in request.phases:
        name = ONE.get(phase.name, phase.name)
        found[name] = found.get(name, 0.0) + phase.seconds
    return found


def _moved(request: RequestTrace) -> str:
    if not request.nbytes:
        return ""
    rate = f", {shown_rate(request.gb_per_s)}" if request.gb_per_s else ""
    reads = f" in {counted(request.reads, 'read')}" if request.reads else ""
    return f"{shown_bytes(request.nbytes)}{reads}{rate}"


def shown_ms(seconds: Mapping[str, float], total_s: float) -> tuple[str, dict[str, str]]:
    """Return a time in milliseconds, and its parts, which add up to it as they are shown; parts of zero are empty."""
    total_ms = total_s * 1e3
    digits = min(3, max(0, 2 - math.floor(math.log10(total_ms)))) if total_ms > 0 else 0
    scale = 1e3 * 10**digits
    units = {name: int(each * scale) for name, each in seconds.items()}
    missing = round(total_s * scale) - sum(units.values())
    by_rest = sorted(units, key=lambda name: seconds[name] * scale - units[name], reverse=True)
    for name in by_rest[: max(0, missing)]:
        units[name] += 1
    shown = {name: f"{each / 10**digits:.{digits}f}" if each else "" for name, each in units.items()}
    return f"{round(total_s * scale) / 10**digits:.{digits}f}", shown


def shown_rate(gb_per_s: float) -> str:
    """Return a rate with three digits."""
    return f"{gb_per_s:.{0 if gb_per_s >= 100 else 1 if gb_per_s >= 10 else 2}f} GB/s"


def shown_bytes(nbytes: int) -> str:
    """Return a size in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.{1 if nbytes < 100 * size else 0}f} {unit}"
    return f"{nbytes} B"


def printable(text: str, length: int = 200) -> str:
    """Return text for a terminal: whatever it holds, it moves no cursor and ends no line."""
    shown = "".join(each if each.isprintable() else "\ufffd" for each in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."
