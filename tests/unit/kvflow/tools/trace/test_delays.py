"""A delay in one phase shows in that phase and in no other: in the record, the metric, the trace and its title.

Real workers run on virtual time, so that nothing else takes time, and every run is the same.
"""

import json
import re
from contextlib import contextmanager, nullcontext

import pytest

from kvflow.config import WorkerConfig
from kvflow.leases.tickets import Ticket
from kvflow.observability.logs import record_logger
from kvflow.observability.metrics import Metrics
from kvflow.planning.plan import PlanCache
from kvflow.reads.scheduler import Scheduler
from kvflow.reads.staging import Scatterer
from kvflow.report import PHASES
from kvflow.tools.trace.joining import read_trace
from kvflow.worker.environment import Environment
from kvflow.worker.runtime import open_worker
from tests.fakes import Fabric, FabricFaults, NetworkFaults, Process, Wires, World, bury
from tests.fakes.fabric import SimulatedBackend
from tests.fakes.memory import SimulatedCache
from tests.fakes.models import NUM_BLOCKS, Shape
from tests.fakes.network import SimulatedNetwork
from tests.fakes.staging import STAGE_ALL, STAGING_BYTES, PlansAt
from tests.fakes.transport import SmallChunks, opener

DELAY_S = 0.05
NOISE_S = 0.002
"""What the order of random draws changes: pauses of the network and of threads, some 100 us each."""

PREFILL_S, TICKET_S, STEP_S = 0.2, 0.01, 0.03
DEADLINE_S = 100.0
OURS, THEIRS = "10.0.0.2", "10.0.0.1"
BLOCKS = [[1, 2, 3, 7]]
SKEW_S = {THEIRS: 3.0, OURS: -2.0}
"""By how much wall clocks are wrong."""

FAULTS = FabricFaults(at_once=0.0, inline=0.0)


class Side:
    """A worker in a process of its own."""

    def __init__(self, fabric, name, host, layout, kv, *, staged=False):
        self.process = Process(fabric.world, name, host, began_s=len(name) * 100.0, skew_s=SKEW_S[host])
        self.cache = SimulatedCache(Shape("full", 4, 1, layout, kv), 0, (int(host[-1]) << 40) + (1 << 32))
        self._leave = self.process.create_future()
        self._fabric, self._staged = fabric, staged
        self.worker = None
        self.metrics = Metrics()
        self.process.create_task(self._live(name, host), name=f"life of {name}")

    async def _live(self, name, host):
        config = WorkerConfig(engine_id=name, bind=f"tcp://{host}:5000", cluster_secret="a secret of a simulation")
        environment = Environment(
            clock=self.process.time,
            network=SimulatedNetwork(self._fabric.wires, self.process),
            open_transport=opener(self._fabric, self.process, self.cache, [1] * NUM_BLOCKS),
            draw_bits=self._fabric.world.chance.getrandbits,
            make_plans=lambda: PlansAt(STAGE_ALL),
            staging=lambda _config, _manifest: STAGING_BYTES if self._staged else 0,
        )
        hooks = self.metrics.hooks()
        async with open_worker(config, self.cache, hooks=hooks, environment=environment) as self.worker:
            await self._leave

    def leave(self):
        self._leave.set_result(None)

    def seconds(self):
        """Return the sums of the histograms of seconds, by phase, as Prometheus collects them."""
        samples = [sample for family in self.metrics.collect() for sample in family.samples]
        found = {each.labels["phase"]: each.value for each in samples if each.name == "kvflow_pull_phase_seconds_sum"}
        found["total"] = sum(each.value for each in samples if each.name == "kvflow_pull_seconds_sum")
        return found


class Scene:
    """A router, a prefill worker and a decode worker. The router's clock is that of the decode worker's machine."""

    def __init__(self, *, staged=False):
        self.world = World(1)
        self.wires = Wires(self.world, NetworkFaults())
        fabric = Fabric(self.world, self.wires, FAULTS)
        self.prefill = Side(fabric, "prefill", THEIRS, "LBNHC", "split", staged=staged)
        self.decode = Side(fabric, "decode", OURS, "BHLNC", "content", staged=staged)
        self.until(lambda: self.prefill.worker and self.decode.worker)

    def until(self, holds):
        assert self.world.run(holds, self.world.now + DEADLINE_S), self.world.violation

    def wait(self, seconds):
        self.world.run(lambda: False, self.world.now + seconds)

    def call(self, side, coroutine):
        """Run a coroutine in the process of a side and return its task."""
        return side.process.create_task(coroutine, name="drive a request")

    def disturb(self, seconds):
        """Hold up everything between the two machines."""
        self.wires.part(OURS, THEIRS)
        self.world.after(seconds, self.wires.join)

    def phase(self):
        """Return the phase of the only read of the decode worker; nothing if there is none."""
        pulls = self.decode.worker._consumer.pulls.by_id.values()
        return next((read.phase for pull in pulls for each in pull.ranges for read in each.reads), "")

    def request(self, name, delayed):
        """Send one request through both workers, as a router does, with a delay in one phase, or in none."""

        def late(phase):
            return DELAY_S if phase == delayed else 0.0

        began = self.world.now
        called_at = self.decode.process.wall()
        self.wait(PREFILL_S + late("prefill"))

        async def offer():
            return self.prefill.worker.offer(name, BLOCKS, 16).to_params()

        offered = self.call(self.prefill, offer())
        self.until(offered.done)
        prefilled = self.world.now
        self.wait(TICKET_S + late("ticket"))

        async def pull():
            return await self.decode.worker.pull(Ticket.from_params(offered.result()), block_ids=BLOCKS)

        pulled = self.call(self.decode, pull())
        for phase in ("wire", "fence"):
            if late(phase):
                self.until(lambda phase=phase: self.phase() == phase)
                self.disturb(DELAY_S)
        self.until(pulled.done)
        pulled.result()
        self.wait(STEP_S + late("decode step"))
        record_logger("kvflow.proxy").info(
            "request.answered",
            request_id=name,
            called_at=called_at,
            prefill_s=prefilled - began,
            first_bytes_s=self.world.now - began,
            elapsed_s=self.world.now - began + 1.0,
        )
        self.wait(1.0)  # until the producer has counted the release

    def close(self):
        self.decode.leave()
        self.prefill.leave()
        self.wait(10.0)
        self.world.over = True
        bury(self.world)


@contextmanager
def slow_call(monkeypatch, world, kind, name):
    """Let the next call of a method take longer."""
    method, delays = getattr(kind, name), [DELAY_S]

    def slow(self, *given, **named):
        result = method(self, *given, **named)
        if delays:
            world.spend(delays.pop())
        return result

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, slow)
        yield
    assert not delays, f"{name} was not called"


@contextmanager
def late_thread(monkeypatch, world, transport):
    """Let the read thread of the decode worker begin its next step late."""
    before, delays = transport.wake, [DELAY_S]

    def wake():
        if delays and transport._step is None:
            transport._step = world.after(delays.pop(), transport._take_step)
        else:
            before()

    with monkeypatch.context() as patched:
        patched.setattr(transport, "wake", wake)
        yield
    assert not delays


SLOW_CALLS = {
    "handshake": (PlanCache, "plan"),
    "bind": (SmallChunks, "bind"),
    "post": (SimulatedBackend, "post"),
    "scatter": (Scatterer, "start"),
    "deliver": (Scheduler, "on_read_ended"),  # the event loop is busy when the answer comes
}


class Seen:
    """What the logs say of one request: seconds of each phase, by its name in the record, the trace and the title.

    ``metric`` is by how much the sum of each phase has grown in the metrics of the decode worker.
    """

    def __init__(self, log, name, metric):
        self.metric = metric
        lines = log.read_text().splitlines(keepends=True)
        files = {}
        for line in lines:
            files.setdefault(json.loads(line).get("engine_id", "router"), []).append(line)
        paths = [log.with_name(f"{each}.jsonl") for each in files]
        for path, its in zip(paths, files.values(), strict=True):
            path.write_text("".join(its))
        (told,) = [
            record
            for record in map(json.loads, lines)
            if record["event"] == "transfer.completed" and record["request_id"] == name
        ]
        self.record = {phase: told[f"{phase}_s"] for phase in PHASES}
        self.total_s = told["total_s"]
        (self.request,) = [request for request in read_trace(paths).requests if request.request_id == name]
        self.trace = {phase.name: phase.seconds for phase in self.request.phases}
        parts = re.sub(r" \([^)]*\)", "", self.request.title.partition(": ")[2])
        self.title = {words[1]: float(words[0]) / 1e3 for words in (each.split(" ", 1) for each in parts.split(", "))}


def seen(log, monkeypatch, delayed):
    """Run a scene with a delay in one phase, or in none, and return what its logs say."""
    log.write_text("")
    scene = Scene(staged=delayed.startswith("scatter") or delayed == "staged")
    phase = "" if delayed in {"none", "staged", "first"} else delayed
    try:
        if delayed not in {"first", "handshake"}:
            scene.request("before", "")
        if phase in SLOW_CALLS:
            delay = slow_call(monkeypatch, scene.world, *SLOW_CALLS[phase])
        elif phase == "queue":
            delay = late_thread(monkeypatch, scene.world, scene.decode.worker._consumer._transport)
        else:
            delay = nullcontext()
        counted = scene.decode.seconds()
        with delay:
            scene.request("measured", phase)
        metric = {name: sum_s - counted.get(name, 0.0) for name, sum_s in scene.decode.seconds().items()}
    finally:
        scene.close()
    return Seen(log, "measured", metric)


BASELINES = {"handshake": "first", "scatter": "staged"}
IN_TITLE = {"post": "wire", "scatter": "wire"}
ALL = ("prefill", "ticket", *PHASES, "decode step")


def changes(before, after):
    """Return by how much each phase has changed, of those that have changed."""
    found = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in before | after}
    return {name: change for name, change in found.items() if abs(change) > NOISE_S}


@pytest.mark.parametrize("phase", ALL)
def test_a_delay_shows_in_its_phase_alone(log, monkeypatch, phase):
    before = seen(log, monkeypatch, BASELINES.get(phase, "none"))
    after = seen(log, monkeypatch, phase)
    for each in (before, after):
        assert sum(each.record.values()) == pytest.approx(each.total_s, rel=0.01)
        metric = {**each.metric}
        assert metric.pop("total") == pytest.approx(each.total_s, rel=0.01)
        assert sum(metric.values()) == pytest.approx(each.total_s, rel=0.01)
        assert sum(each.trace.values()) == pytest.approx(each.request.total_s, rel=0.01)
        assert each.request.total_s == pytest.approx(each.request.first_token_s, rel=0.01)
        assert sum(each.title.values()) == pytest.approx(each.request.total_s, rel=0.01)
    delayed = pytest.approx(DELAY_S, abs=NOISE_S)
    assert changes(before.record, after.record) == ({phase: delayed} if phase in PHASES else {})
    assert changes(before.metric, after.metric) == ({phase: delayed, "total": delayed} if phase in PHASES else {})
    assert changes(before.trace, after.trace) == {phase: delayed}
    assert changes(before.title, after.title) == {IN_TITLE.get(phase, phase): delayed}
    assert after.request.total_s - before.request.total_s == delayed


def test_clocks_that_are_seconds_apart_do_not_show(log, monkeypatch):
    shown = seen(log, monkeypatch, "none")
    assert 0.0 < shown.request.clock_error_s < TICKET_S + NOISE_S
    assert shown.trace["prefill"] == pytest.approx(PREFILL_S, abs=NOISE_S)
    assert shown.trace["ticket"] == pytest.approx(TICKET_S, abs=NOISE_S)
    assert shown.trace["decode step"] == pytest.approx(STEP_S, abs=NOISE_S)
