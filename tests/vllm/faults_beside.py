# ruff: noqa: T201 - a program prints what it finds
"""Do the same harm to engines with vLLM's own connector and with kvflow's, and print what becomes of their requests.

From the root of the repository, with the interpreter of an environment that has vLLM::

    python -m tests.vllm.faults_beside
    python -m tests.vllm.faults_beside --connector NixlConnector --fault 'prefill killed, then asked' -o table.md

Each fault happens to two decode engines, of which one has the policy ``fail`` and the other ``recompute``. Leases last
for 6 s with either connector. Tokens are compared with those of one engine alone.
"""

import argparse
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from tests.stopping import stopped

from .asking import LONG, Asked
from .engines import KVFLOW, NIXL, PYTHON, ROOT, EngineFailed, Nursery, Request
from .pairs import model_folder
from .prompts import prompt_of
from .tiny_models import CONTEXT
from .victims import LEASE_S, SETTINGS, Cluster, Victim

LIMIT_S = 45.0
"""A request that has not ended by then hangs; blocks that are not back by then are lost."""
STEP_S = 0.25
SERVES = "right tokens"
"""Of the next request with either policy."""
SHORT = 8
"""Tokens of an answer that only shows that engines serve."""

LEASES: dict[str, dict[str, Any]] = {KVFLOW: dict(SETTINGS), NIXL: {"kv_lease_duration": int(LEASE_S)}}
"""``kv_connector_extra_config`` of either."""


@dataclass
class Row:
    """What has become of one fault.

    Attributes:
        fault: in words.
        ends: of the requests that met it, by policy, with seconds since the harm.
        others: of requests to another prefill engine meanwhile, and of those that came afterwards.
        blocks: seconds until all blocks of either side were free again.
        died: engines that have ended by themselves, or do not answer any more.
    """

    fault: str
    ends: dict[str, str] = field(default_factory=dict)
    others: str = ""
    blocks: str = ""
    died: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        ends = [self.ends.get(policy, "") for policy in ("fail", "recompute")]
        return [self.fault, *ends, self.others, self.blocks, ", ".join(self.died) or "none"]


HEADS = ["fault", "policy fail", "policy recompute", "next request", "blocks free again", "engines that died or hang"]


def end_of(request: Request, alone: Sequence[int], since_s: float) -> str:
    """Return how a request has ended, in words."""
    try:
        answer = request.wait(max(0.1, since_s + LIMIT_S - time.monotonic()))
    except EngineFailed:
        return "engine died" if not request.engine.alive else f"hangs ({LIMIT_S:g} s)"
    took_s = time.monotonic() - since_s
    tokens = answer.get("tokens") or []
    if answer.get("finish_reason") == "abort":
        return f"aborted, {took_s:.1f} s"
    if answer.get("finish_reason") == "error" or "error" in answer:
        reason = request.engine.reason(request.request_id)
        return f"fails{f' ({reason})' if reason else ''}, {took_s:.1f} s"
    return f"{'right tokens' if tokens == alone else 'WRONG TOKENS'}, {took_s:.1f} s"


def answers(engine: Victim) -> bool:
    """Return whether an engine answers at all."""
    try:
        engine._await(engine._command("stages", f"probe-{time.monotonic()}"), LIMIT_S)
    except EngineFailed:
        return False
    return True


class Harm:
    """The engines to which harm is done, and the row that comes of it."""

    def __init__(self, cluster: Cluster, fault: str) -> None:
        self.cluster = cluster
        self.row = Row(fault)
        self.since_s = time.monotonic()

    def done(self) -> None:
        """Count seconds from now on."""
        self.since_s = time.monotonic()

    def restart(self, name: str) -> None:
        """Start an engine again at its address, under a new id, as vLLM does unless it is given one."""
        self.cluster.restart(name, f"{self.cluster.prefix}-{name}-{secrets.token_hex(2)}")

    def ends(self, asked: Asked) -> None:
        """Note how these requests have ended."""
        for request in asked.requests:
            self.row.ends[request.engine.options.failure_policy] = end_of(request, asked.alone, self.since_s)

    def ask(self, asked: Asked) -> None:
        """Send requests now, and note how they have ended."""
        self.done()
        asked.submit()
        self.ends(asked)

    def next_request(self, prefill: Victim) -> str:
        """Ask for something that nothing is wrong with."""
        if not (prefill.alive and all(decode.alive for decode in self.cluster.decodes)):
            return "no engine"
        asked = Asked(self.cluster, prefill, f"next {time.monotonic()}", max_tokens=SHORT).submit()
        since_s = time.monotonic()
        ends = {end_of(request, asked.alone, since_s).partition(",")[0] for request in asked.requests}
        return " / ".join(sorted(ends))

    def finish(self) -> Row:
        """Wait for the blocks, and see who lives."""
        self.row.blocks = self._blocks()
        self.row.died = [
            name for name, engine in self.cluster.engines.items() if not engine.alive or not answers(engine)
        ]
        if not self.row.others and not self.row.died:
            self.row.others = self.next_request(self.cluster.first)
        return self.row

    def _blocks(self) -> str:
        spans = []
        for side, names in (("prefill", ("first", "second")), ("decode", ("failing", "recomputing"))):
            try:
                for name in names:
                    self._wait_free(name)
                spans.append(f"{side} {time.monotonic() - self.since_s:.1f} s")
            except EngineFailed:
                spans.append(f"{side} NOT")
        return ", ".join(spans)

    def _wait_free(self, name: str) -> None:
        engine = self.cluster.engines[name]
        if engine.alive:
            left_s = max(1.0, self.since_s + LIMIT_S - time.monotonic())
            answer: Future[dict[str, Any]] = engine._command("state", f"free-{time.monotonic()}")
            engine._await(answer, left_s)
            engine.settle(left_s)


def killed_then_asked(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "killed")
    harm.cluster.first.kill()
    harm.ask(asked)
    harm.restart("first")


def killed_during(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "killed")
    with asked.held("data"):
        harm.cluster.first.kill()
        harm.done()
    harm.ends(asked)
    harm.restart("first")


def restarted(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "restarted")
    harm.cluster.first.kill()
    harm.restart("first")
    harm.ask(asked)


def stopped_met(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "stopped")
    harm.cluster.first.generate(asked.prompt, max_tokens=1)  # kvflow admits a lease in the step after its ticket's
    with stopped(harm.cluster.first.pid):
        harm.ask(asked)
    harm.done()


def stopped_not_met(harm: Harm) -> None:
    harm.cluster.first.stop()
    harm.restart("first")
    asked = Asked(harm.cluster, harm.cluster.first, "stopped")
    with stopped(harm.cluster.first.pid):
        harm.done()
        asked.submit()
        elsewhere = Asked(harm.cluster, harm.cluster.second, "elsewhere", max_tokens=SHORT).submit()
        since_s = time.monotonic()
        elsewhere_ends = sorted({end_of(request, elsewhere.alone, since_s) for request in elsewhere.requests})
        harm.ends(asked)
    harm.row.others = f"to another prefill meanwhile: {' / '.join(elsewhere_ends)}"
    harm.done()


def decode_killed(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "reading", decodes=[harm.cluster.failing])
    with asked.held("data"):
        harm.cluster.failing.kill()
        harm.done()
    harm.cluster.first.wait_state(lambda state: state["held"] == 0, LIMIT_S)
    harm.row.ends["fail"] = f"prefill has its blocks after {time.monotonic() - harm.since_s:.1f} s"
    harm.restart("failing")


def late(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "late")
    harm.cluster.first.wait_state(lambda state: state["held"] == 0, LIMIT_S)
    harm.cluster.first.overwrite()
    harm.ask(asked)


def late_in_the_middle(harm: Harm) -> None:
    cluster = harm.cluster
    harm.next_request(cluster.second)  # nobody can be met over a wire that is stalled
    asked = Asked(cluster, cluster.second, "late")
    with cluster.wire.stalled():
        with asked.held("data"):
            cluster.second.wait_state(lambda state: state["held"] == 0, LIMIT_S)
            cluster.second.overwrite()
            harm.done()
        harm.ends(asked)


def queued(harm: Harm) -> None:
    """All blocks of the decode engines are taken for longer than a lease, while they take steps."""
    fillers = []
    with ExitStack() as stack:
        for decode in harm.cluster.decodes:
            stack.enter_context(decode.paused())
            fillers += [decode.submit(prompt_of(CONTEXT - 64, f"filler {each}"), max_tokens=64) for each in range(2)]
            decode.step(2)
        asked = Asked(harm.cluster, harm.cluster.first, "queued").submit()
        until_s = time.monotonic() + 1.5 * LEASE_S
        while time.monotonic() < until_s:
            for decode in asked.decodes:
                decode.step(1)
            time.sleep(STEP_S)
        for filler in fillers:
            filler.abort()
        harm.done()
    harm.ends(asked)


def killed_afterwards(harm: Harm) -> None:
    asked = Asked(harm.cluster, harm.cluster.first, "decoding", max_tokens=LONG).submit().wait_begun()
    harm.cluster.first.kill()
    harm.done()
    harm.ends(asked)
    harm.restart("first")


def garbage(harm: Harm) -> None:
    """One message without a form, to the control port of the prefill engine; then somebody new asks it."""
    cluster = harm.cluster
    context = zmq.Context()
    try:
        for frames in ([b"", b"\xff\xfe"], [b"\xff"], [b"", b"\x93\xa1x\x00\x07"]):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 1000
                dealer.connect(cluster.endpoint("first"))
                dealer.send_multipart(frames)
                dealer.poll(500)
    finally:
        context.term()
    cluster.failing.kill()
    cluster.recomputing.kill()
    harm.restart("failing")
    harm.restart("recomputing")
    asked = Asked(cluster, cluster.first, "garbage")
    harm.ask(asked)


def flood(harm: Harm) -> None:
    """A member of the cluster that sends garbage all the time."""
    command = [PYTHON, "-m", "tests.fuzz.attacker", harm.cluster.endpoint("first"), harm.cluster.secret]
    with subprocess.Popen([*command, "faults"], cwd=ROOT, stdout=subprocess.DEVNULL) as member:
        try:
            asked = Asked(harm.cluster, harm.cluster.first, "flood")
            harm.ask(asked)
        finally:
            member.kill()


def absurd(harm: Harm) -> None:
    """What any client may write into its request."""
    asked = Asked(harm.cluster, harm.cluster.first, "absurd", tickets=[{"do_remote_prefill": True}] * 2)
    harm.ask(asked)


def mixed_up(harm: Harm) -> None:
    """A ticket of one prompt comes with another, which a system prompt may be; then others ask with that one."""
    cluster = harm.cluster
    tickets = Asked(cluster, cluster.first, "a prompt of its own").tickets
    asked = Asked(cluster, cluster.second, "shared", tickets=tickets)
    harm.ask(asked)
    others = Asked(cluster, cluster.second, "shared", tickets=[{}, {}]).submit()
    since_s = time.monotonic()
    ends = {end_of(request, others.alone, since_s).partition(",")[0] for request in others.requests}
    harm.row.others = " / ".join(sorted(ends))


FAULTS: dict[str, Callable[[Harm], None]] = {
    "prefill killed, then asked": killed_then_asked,
    "prefill killed in the middle of a read": killed_during,
    "prefill killed after the read": killed_afterwards,
    "prefill killed and restarted, old ticket": restarted,
    "prefill stopped (SIGSTOP), known to the decode engine": stopped_met,
    "prefill stopped (SIGSTOP), not known yet": stopped_not_met,
    "decode killed in the middle of a read": decode_killed,
    "lease over and blocks used again, then asked": late,
    "lease over and blocks used again in the middle of a read": late_in_the_middle,
    "waits in the decode engine's queue for longer than a lease": queued,
    "three malformed messages at the control port, then a new decode engine": garbage,
    "a member floods the control port": flood,
    "a client sends {do_remote_prefill: true} and nothing else": absurd,
    "a ticket of another prompt; next, others with that prompt and no ticket": mixed_up,
}
CACHED = (mixed_up,)
"""Those that need engines with prefix caching."""


def suffer(cluster: Cluster, fault: str) -> Row:
    """Do one harm, and mend what has died of it."""
    harm = Harm(cluster, fault)
    try:
        FAULTS[fault](harm)
    except (EngineFailed, AssertionError) as error:
        harm.row.others = f"{type(error).__name__} {error}".strip().splitlines()[0][:60]
    row = harm.finish()
    if row.died or "NOT" in row.blocks or row.others not in ("", SERVES):
        for name in cluster.engines:  # what comes next shall not suffer from this
            with suppress(EngineFailed):
                cluster.engines[name].kill()
            harm.restart(name)
        harm.next_request(cluster.first)
        harm.next_request(cluster.second)
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.faults_beside", description=__doc__.partition("\n")[0])
    parser.add_argument("--connector", nargs="*", default=[NIXL, KVFLOW])
    parser.add_argument("--fault", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--model", default="llama", choices=["llama", "gptoss"])
    parser.add_argument("-o", "--output", type=Path, help="write the table there, too")
    return parser.parse_args()


def table(model: str, connector: str, faults: Sequence[str], nursery: Nursery, *, cached: bool) -> list[str]:
    """Do these harms to engines with one connector, and return a line for each."""
    lines = []
    settings = LEASES.get(connector, {})
    with Cluster(
        model_folder(model), model, nursery, connector=connector, settings=settings, prefix_caching=cached
    ) as cluster:
        warm = Harm(cluster, "")
        print(connector, "serves:", warm.next_request(cluster.first), warm.next_request(cluster.second))
        for fault in faults:
            cells = suffer(cluster, fault).cells()
            lines.append(f"| {connector} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> int:
    chosen = arguments()
    lines = [f"| connector | {' | '.join(HEADS)} |", f"|{'---|' * (len(HEADS) + 1)}"]
    with Nursery() as nursery:
        for connector in chosen.connector:
            for cached in (False, True):
                faults = [fault for fault in chosen.fault if (FAULTS[fault] in CACHED) is cached]
                lines += table(chosen.model, connector, faults, nursery, cached=cached) if faults else []
    if chosen.output:
        chosen.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
