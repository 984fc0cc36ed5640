"""What a request that was sent through two servers shows: their counters, and conclusions from them. Pure."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvflow.errors import FailureCode, counted
from kvflow.observability.logs import default_remedies
from kvflow.tools.doctor.codes import Finding, found, ok
from kvflow.tools.trace.text import printable, shown_bytes, shown_rate

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

LINE_MAX: Final = 16 << 10
"""Characters of a line. Names of models are the longest labels."""

HopKey = tuple[str, str]
"""Our name of a counter, and the value of its label; empty if it has none."""


class Counted(Struct, frozen=True):
    """What a server has counted, or how much of it came between two moments; all its engines together."""

    numbers: Mapping[HopKey, float]
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
    numbers: dict[HopKey, float] = {}
    vllm = kvflow = False
    for line in islice((each for each in text.splitlines() if "vllm:" in each), SERIES_MAX):
        vllm = True
        kvflow = kvflow or "vllm:kvflow_" in line
        for sample in _samples(line):
            name, label = NAMES[sample.name]
            key = name, sample.labels.get(label, "")[:200] if label else ""
            if 0.0 <= sample.value <= NUMBER_MAX and (key in numbers or len(numbers) < KEYS_MAX):
                numbers[key] = numbers.get(key, 0.0) + sample.value
    return Counted(numbers, vllm=vllm, kvflow=kvflow)


def _samples(line: str) -> list[Sample]:
    if line.partition("{")[0].partition(" ")[0] not in NAMES or len(line) > LINE_MAX:
        return []
    try:
        return [sample for family in text_string_to_metric_families(line) for sample in family.samples]
    except (ValueError, IndexError):
        return []


TOLD_ERROR: Final = "its stream ends with an error"


class HttpAnswer(Struct, frozen=True):
    """What a server or the router answered, as far as it came. ``error``: why it is not whole. Status 0: no answer."""

    status: int = 0
    content: bytes = b""
    error: str = ""

    @property
    def sound(self) -> bool:
        """Whether it is whole, and no error."""
        return not self.error and 200 <= self.status < 300

    def __str__(self) -> str:
        if self.error and not self.status:
            return self.error
        text = printable(" ".join(self.content[:400].decode(errors="replace").split()), 200)
        broken = f"; {self.error}" if self.error else ""
        return f"HTTP {self.status}: {text or 'nothing'}{broken}"


class ServerCounts(Struct, frozen=True):
    """A server, and its counters before and after a request."""

    name: str
    url: str
    before: Counted
    after: Counted

    @property
    def grown(self) -> Counted:
        """By how much its counters have grown."""
        return self.after.since(self.before)

    @property
    def busy(self) -> float:
        """Requests that the server had in hand, before or after ours."""
        return max(each.of("running") + each.of("waiting") for each in (self.before, self.after))

    @property
    def untagged(self) -> float:
        """Requests that neither asked for a ticket nor brought one."""
        return self.grown.of("untagged", "absent") + self.grown.of("untagged", "decline")

    def told(self, name: str, key: str = "") -> str:
        """Return a counter as evidence."""
        label = f"{{{printable(key, 60)}}}" if key else ""
        numbers = f"{self.before.of(name, key):.12g} before, {self.after.of(name, key):.12g} after"
        return f"{SERVED[name]}{label} of the {self.name} server: {numbers}"


class Exchange(Struct, frozen=True):
    """A request, and what the last server answered that was asked.

    Attributes:
        request_id: its name, which the logs of all servers have.
        offered: of the prefill server, if the request was sent directly; ``ticket``: whether that had one.
    """

    request_id: str
    answer: HttpAnswer
    offered: HttpAnswer | None = None
    ticket: bool = False


class Probe(Struct, frozen=True):
    """A request, and by how much the counters of both servers have grown meanwhile."""

    sent: Exchange
    prefill: ServerCounts
    decode: ServerCounts

    @property
    def quiet(self) -> bool:
        """Whether no other request has moved the counters."""
        most = 2 if self.prefill.url == self.decode.url else 1
        return all(side.grown.of("requests") <= most and not side.busy for side in (self.prefill, self.decode))

    @property
    def unmixed(self) -> bool:
        """Whether all requests meanwhile, ours and others, were transferred."""
        moved, asked = self.decode.grown, self.prefill.grown
        wrong = moved.all("failed") + self.decode.untagged + self.prefill.untagged
        return not wrong and bool(moved.of("transfers") and moved.of("requests") and asked.of("requests"))

    @property
    def restarted(self) -> ServerCounts | None:
        """The server that was started again; None if none was."""
        return next((side for side in (self.prefill, self.decode) if side.grown.restarted), None)

    @property
    def settled(self) -> bool:
        """Whether all is counted that a request with a transfer moves."""
        moved, asked = self.decode.grown, self.prefill.grown
        ended = moved.of("transfers") + moved.all("failed")
        return bool(ended and moved.of("requests") and asked.of("requests") and asked.all("leases"))

    @property
    def computed(self) -> bool:
        """Whether the decode server was asked, without a ticket, and has answered."""
        return bool(self.decode.untagged and self.decode.grown.of("requests") and not self.decode.busy)


def direct_findings(probe: Probe) -> Iterator[Finding]:
    """Say what the two servers did without a router."""
    prefill, decode = probe.prefill, probe.decode
    offered = probe.sent.offered or HttpAnswer()
    if not offered.sound:
        yield found("request_failed", subject_of("prefill", prefill.url), f"asked for a ticket: {offered}")
        return
    if not probe.sent.ticket:
        code = "ticket_unanswered" if prefill.after.kvflow else "connector_missing"
        evidence = f"asked with do_remote_decode, and answered no ticket ({probe.sent.request_id})"
        yield found(code, subject_of("prefill", prefill.url), evidence)
        return
    for side in (prefill, decode):
        if side.after.kvflow:
            yield ok(subject_of(side.name, side.url), "/metrics has vllm:kvflow_ metrics")
    yield ok(subject_of("prefill", prefill.url), f"a ticket for request {probe.sent.request_id}")
    if not decode.after.kvflow:
        yield found("connector_missing", subject_of("decode", decode.url), "/metrics has no vllm:kvflow_ metrics")
        return
    if not probe.sent.answer.sound:
        yield found("request_failed", subject_of("decode", decode.url), f"given the ticket: {probe.sent.answer}")
    if not probe.quiet:
        yield _interfered(probe)
    if probe.quiet or probe.unmixed:
        yield from transfer_findings(probe, "direct path")
        if not decode.grown.of("transfers") and not decode.grown.all("failed") and probe.sent.answer.sound:
            evidence = f"{decode.told('transfers')}; {decode.told('untagged', 'absent')}"
            yield found("ticket_unused", subject_of("decode", decode.url), evidence)


def router_findings(probe: Probe, direct: Probe, url: str) -> Iterator[Finding]:
    """Say what the router did, where the servers did without it what ``direct`` tells."""
    subject, answer = subject_of("router", url), probe.sent.answer
    if not answer.sound:
        broken = answer.error not in ("", TOLD_ERROR) and 200 <= answer.status < 300
        requests = ", ".join(side.told("requests") for side in (probe.prefill, probe.decode))
        yield found("answer_broken" if broken else "request_failed", subject, f"{answer}; {requests}")
    elif probe.quiet or probe.unmixed:
        yield ok(subject, f"a complete answer to request {probe.sent.request_id}")
    if not probe.quiet:
        yield _interfered(probe)
    if probe.quiet or probe.unmixed:
        yield from _hops(probe, direct, subject)
        yield from transfer_findings(probe, "routed path")


def _hops(probe: Probe, direct: Probe, subject: str) -> Iterator[Finding]:
    """Say whether the router asked for a ticket and carried it."""
    prefill, decode = probe.prefill, probe.decode
    absent = f"{prefill.told('untagged', 'absent')}; {decode.told('untagged', 'absent')}"
    requests = f"{prefill.told('requests')}; {decode.told('requests')}"
    skips = (("router_skips_prefill", prefill, f"{requests}; {absent}"), ("router_skips_decode", decode, requests))
    skipped = {code: evidence for code, side, evidence in skips if not side.grown.of("requests")}
    if decode.grown.of("transfers") and "router_skips_prefill" not in skipped:
        if not prefill.untagged:  # a prefill server with "offer": "always" needs no router that asks
            yield ok(subject, absent)
        yield ok(subject, f"{decode.told('transfers')}; {requests}")
    elif decode.grown.of("transfers"):
        yield found("router_skips_prefill", subject, f"the cache came from another server; {requests}")
    elif decode.grown.of("failed", FailureCode.TICKET_INVALID) and direct.decode.grown.of("transfers"):
        evidence = (
            f"{decode.told('failed', FailureCode.TICKET_INVALID)}; the same servers transferred without the router"
        )
        yield found("router_changes_ticket", subject, evidence)
    elif prefill.untagged or (decode.untagged and "router_skips_prefill" in skipped):
        yield found("router_does_not_ask", subject, f"{absent}; {requests}")
    elif skipped:
        if probe.sent.answer.sound or "router_skips_decode" not in skipped:  # otherwise the answer says more
            yield from (found(code, subject, evidence) for code, evidence in skipped.items())
    elif decode.untagged and direct.sent.ticket:
        yield found("router_drops_ticket", subject, absent)
    elif direct.decode.grown.of("transfers") and not decode.grown.all("failed"):
        yield found("ticket_unused", subject_of("decode", decode.url), f"{decode.told('transfers')}; {requests}")


def transfer_findings(probe: Probe, path: str) -> Iterator[Finding]:
    """Say what was transferred, what failed, and how the lease ended."""
    moved, decode = probe.decode.grown, probe.decode
    for code in moved.keys("failed"):
        remedy = default_remedies().get(code, "")
        evidence = decode.told("failed", code)
        if remedy:
            yield Finding(code=code, status="failed", subject=path, evidence=evidence, remedy=remedy)
        else:
            yield found(FailureCode.TRANSFER_FAILED, path, evidence)
    for method in moved.keys("defects"):
        yield found("connector_defect", path, decode.told("defects", method))
    transfers, nbytes, seconds = (moved.of(name) for name in ("transfers", "nbytes", "seconds"))
    if transfers:
        rate = f", {shown_rate(nbytes / seconds / 1e9)}" if seconds > 0 else ""
        evidence = (
            f"{shown_bytes(int(nbytes))} in {counted(int(transfers), 'transfer')}, "
            f"{counted(int(moved.of('descriptors')), 'descriptor')}, "
            f"{seconds * 1e3:.3g} ms{rate}; {decode.told('nbytes')}"
        )
        yield ok(path, evidence)
    if transfers and ("loaded_tokens", "") in decode.after.numbers:
        loaded = moved.of("loaded_tokens")
        told = decode.told("loaded_tokens")
        yield ok(path, told) if loaded else found("prompt_recomputed", path, told)
    elif moved.all("failed") and probe.sent.answer.sound:
        yield found("prompt_recomputed", path, "the transfer failed, and the answer is complete")
    yield from _lease_findings(probe, path)


def _lease_findings(probe: Probe, path: str) -> Iterator[Finding]:
    ended = probe.prefill.grown.keys("leases")
    for outcome in ended:
        told = probe.prefill.told("leases", outcome)
        yield ok(path, told) if outcome == "released" else found("lease_lost", path, told)
    asked = probe.prefill.grown.of("requests") and not probe.prefill.untagged
    offered = probe.sent.ticket or (probe.sent.offered is None and asked)
    if not ended and offered:
        yield found("lease_held", path, probe.prefill.told("leases", "released"))


def _interfered(probe: Probe) -> Finding:
    requests = [f"{side.told('requests')}, {side.busy:.0f} in hand" for side in (probe.prefill, probe.decode)]
    return found("others_interfered", "servers", f"request {probe.sent.request_id}; {'; '.join(requests)}")


def subject_of(name: str, url: str) -> str:
    """Return what a finding calls a server or the router."""
    return f"{'router' if name == 'router' else f'{name} server'} {url}"
