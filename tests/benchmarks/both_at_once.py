# ruff: noqa: T201 - a benchmark prints its table
"""From the end of a prefill to the first token of the decode server, if a router asks both at once, or one by one.

Two prefill servers, one of which offers prompts when they arrive, and one decode server, each a real vLLM on CPUs that
computes 128 tokens in a step. Before them, in turns, ``vllm-router`` and ``kvflow proxy``. No two prompts are alike::

    .venv-vllm/bin/python -m tests.benchmarks.both_at_once [--rounds 8] [--lengths 500 4000] [--fronts "kvflow proxy"]

The ranks of vLLM spin for a second behind each step, also behind one that computes nothing, and so take a core from the
prefill server while their request waits. With ``--nice 19`` they take what it leaves.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.vllm.clients import client_of
from tests.vllm.engines import free_port
from tests.vllm.howto import DECODE_PORT, PREFILL_PORT, PROXY_PORT, ROUTERS_PAGE, SOURCE_PORT, command, members
from tests.vllm.pairs import await_all, model_folder
from tests.vllm.prompts import prompt_of
from tests.vllm.servers import Deployment

MODEL = "wide"
FLAGS = " --max-num-batched-tokens 128"
FLOWS = ("serial", "concurrent")
TOKENS = 5
NUMBERS = itertools.count()


@dataclass
class Sample:
    """Seconds of one request.

    ``prefill``: until the prompt is computed. ``lag``: from there to the first token. ``step``: between two tokens.
    ``waiting``, ``computing``: CPU of the decode and of the prefill server, until the first token.
    """

    prefill: float
    lag: float
    step: float
    waiting: float
    computing: float


def cpu_of(server):
    """Return the seconds of CPU that the processes of a server have spent."""
    spent = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == server.pid:  # it leads a session
                spent += sum(int((each / "schedstat").read_text().split()[0]) for each in stat.parent.glob("task/*"))
        except FileNotFoundError:
            continue
    return spent / 1e9


class Flows(Deployment):
    """The servers, by what they do, and routers before either prefill server. ``nice``: of the decode server."""

    def __init__(self, model, folder, nice):
        super().__init__(model, folder)
        self._nice = nice

    def start(self):
        self.ports[SOURCE_PORT] = free_port()
        self.servers = {
            "serial": self.start_side("serial", "kv_producer", ""),
            "concurrent": self.start_side("concurrent", "kv_producer", f"{members('dispatch')}, "),
            "decode": self.start_side("decode", "kv_consumer", f'{members("rendezvous_from")}, "rendezvous_s": 60, '),
        }
        return self.servers.values()

    def start_side(self, name, role, settings):
        port = free_port()
        shell = command("vllm serve", role).strip().replace('_config": {"', f'_config": {{{settings}"')
        fitted = self.fitted(shell.replace("prefill.jsonl", f"{name}.jsonl"), {PREFILL_PORT: port, DECODE_PORT: port})
        nice = f"nice -n {self._nice} " if name == "decode" else ""
        return self.serve(name, nice + fitted + FLAGS, port)

    def start_front(self, name, flow):
        prefill, decode, port = self.servers[flow].url, self.servers["decode"].url, free_port()
        shell = f"kvflow proxy --prefill {prefill} --decode {decode} --dispatch {flow} --listen 127.0.0.1:{port}"
        if name == "vllm-router":
            ports = {PREFILL_PORT: self.servers[flow].port, DECODE_PORT: self.servers["decode"].port, PROXY_PORT: port}
            metrics = f" --prometheus-host 127.0.0.1 --prometheus-port {free_port()}"
            shell = self.fitted(command("vllm-router", page=ROUTERS_PAGE), ports).strip() + metrics
        front = self.serve(f"{name}-{flow}".replace(" ", "-"), shell, port)
        front.wait_ready()
        return front

    def ended(self, flow, event, number=1):
        return await_all(lambda: [each for each in self.records(flow) if each["event"] == event], number)

    def measure(self, front, flow, length):
        """Send one prompt; return its sample."""
        prefill, decode = self.servers[flow], self.servers["decode"]
        known = len([each for each in self.records(flow) if each["event"] == "lease.ended"])
        spent, sent, times = (cpu_of(decode), cpu_of(prefill)), time.time(), []
        with client_of(front) as client:
            chunks = client.completions.create(
                model=self.model,
                prompt=prompt_of(length, f"both-{next(NUMBERS)}"),
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for chunk in chunks:
                if any(choice.token_ids for choice in chunk.choices):
                    times.append(time.time())
                    if len(times) == 1:
                        spent = [cpu_of(decode) - spent[0], cpu_of(prefill) - spent[1]]
        lease = self.ended(flow, "lease.ended", known + 1)[-1]
        begun = datetime.fromisoformat(lease["timestamp"]).timestamp() - lease["held_s"]
        done = begun + (lease["advances"][-1][0] if flow == "concurrent" else 0)
        return Sample(
            done - sent, times[0] - done, statistics.median(b - a for a, b in itertools.pairwise(times)), *spent
        )


def slope_of(points):
    """Return the slope of the line that fits best."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.both_at_once", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--fronts", nargs="+", default=["vllm-router", "kvflow proxy"])
    parser.add_argument("--nice", type=int, default=0, help="of the decode server")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Flows(model_folder(MODEL), Path(folder), chosen.nice) as flows:
        ways = [(name, flow) for name in chosen.fronts for flow in FLOWS]
        fronts = {way: flows.start_front(*way) for way in ways}
        for way in ways * 2:  # a router learns from the first answer
            flows.measure(fronts[way], way[1], 300)
        found = {(*way, length): [] for way in ways for length in chosen.lengths}
        for turn in range(chosen.rounds):
            for length in chosen.lengths:
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    found[*way, length].append(flows.measure(fronts[way], way[1], length))
            print(f"round {turn + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
    print(f"{MODEL}, medians of {chosen.rounds} rounds, milliseconds; decode at nice {chosen.nice}")
    print("router        flow        tokens  prefill  to first token  step  CPU: decode  prefill")
    medians = {}
    for key, samples in found.items():
        fields = ("prefill", "lag", "step", "waiting", "computing")
        row = [1e3 * statistics.median(getattr(each, field) for each in samples) for field in fields]
        medians[key] = row
        spent = f"{row[3]:12.0f} {row[4]:8.0f}"
        print(f"{key[0]:13} {key[1]:10} {key[2]:7d} {row[0]:8.0f} {row[1]:15.1f} {row[2]:5.1f} {spent}")
    for name in chosen.fronts:
        for title, of in (("to the first token", lambda row: row[1]), ("less one step", lambda row: row[1] - row[2])):
            serial, both = (slope_of([(at, of(medians[name, flow, at])) for at in chosen.lengths]) for flow in FLOWS)
            print(f"{name}: {title}: {1e3 * serial:.2f} and {1e3 * both:.2f} ms a thousand tokens: {both / serial:.0%}")
        for field in ("prefill", "computing"):
            pairs = [zip(*(found[name, flow, at] for flow in FLOWS), strict=True) for at in chosen.lengths]
            more = [statistics.median(getattr(b, field) / getattr(a, field) - 1 for a, b in each) for each in pairs]
            print(f"{name}: {field} takes more by {', '.join(f'{each:.1%}' for each in more)}: paired medians")


if __name__ == "__main__":
    main()
