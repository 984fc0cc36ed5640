"""What goes wrong in a scenario: drawn from its seed, each kind with a strength of its own.

Strengths are drawn over orders of magnitude, so that a seed has one fault that dominates, or two that meet, and not
always the same noise of all of them.
"""

from collections.abc import Callable

from msgspec import Struct

from kvflow.testing.engines import Engine, Settings
from kvflow.testing.fabric import Fabric, FabricFaults
from kvflow.testing.wires import NetworkFaults
from kvflow.testing.world import World


class Faults(Struct, frozen=True, kw_only=True):
    """Everything that goes wrong in one scenario.

    Attributes:
        network: what happens to messages.
        fabric: what happens to reads.
        kills: engines that are killed, and started anew.
        leaves: engines that close in peace, and are started anew.
        stops: ranks that are stopped for a while.
        partitions: pairs of hosts that are parted for a while.
        outage_s: mean duration of a stop, a partition, or of being dead.
        cancelled: share of pulls that are cancelled.
        revoked: share of leases that are revoked.
        forged: share of tickets that are changed on their way.
        skew_s: how far the wall clocks of hosts are apart.
        jumps: wall clocks that are set anew.
        hang_up_s: mean time until the kernel hangs up for a process that was killed.
    """

    network: NetworkFaults
    fabric: FabricFaults
    kills: int
    leaves: int
    stops: int
    partitions: int
    outage_s: float
    cancelled: float
    revoked: float
    forged: float
    skew_s: float
    jumps: int
    hang_up_s: float


CALM = Faults(
    network=NetworkFaults(),
    fabric=FabricFaults(),
    kills=0,
    leaves=0,
    stops=0,
    partitions=0,
    outage_s=0.0,
    cancelled=0.0,
    revoked=0.0,
    forged=0.0,
    skew_s=0.0,
    jumps=0,
    hang_up_s=0.0,
)
"""Nothing goes wrong: every pull must then be delivered."""


def draw_faults(world: World) -> Faults:
    """Draw everything that goes wrong in a scenario; every kind of fault is in each."""
    chance = world.chance

    def share(lowest: float, highest: float) -> float:
        return float(lowest * (highest / lowest) ** chance.random())

    return Faults(
        network=NetworkFaults(
            delay_s=share(20e-6, 20e-3),
            duplicated=share(1e-3, 0.1),
            cut=share(1e-3, 0.1),
            clogged=share(1e-3, 0.1),
            clog_s=share(1e-3, 0.3),
        ),
        fabric=FabricFaults(
            step_s=share(5e-6, 2e-3),
            at_once=chance.random(),
            piece_s=share(20e-6, 50e-3),
            pieces_max=chance.randint(1, 4),
            failed=share(1e-4, 0.05),
            noticed_s=share(1e-4, 0.3),
            rdma=chance.random() < 0.5,
        ),
        kills=chance.randint(1, 3),
        leaves=chance.randint(0, 1),
        stops=chance.randint(1, 4),
        partitions=chance.randint(1, 4),
        outage_s=share(1e-3, 0.5),
        cancelled=share(0.01, 0.3),
        revoked=share(0.01, 0.3),
        forged=share(0.005, 0.05),
        skew_s=share(1e-3, 1e4),
        jumps=chance.randint(1, 3),
        hang_up_s=share(1e-5, 0.1),
    )


def draw_settings(world: World, faults: Faults) -> Settings:
    """Draw what workers are told; without faults everything has the time that it needs."""
    chance = world.chance
    if faults is CALM:
        return Settings(
            lease_s=30.0,
            lease_slots=64,
            connect_s=2.0,
            handshake_s=5.0,
            queue_s=30.0,
            wire_s=30.0,
            fence_s=10.0,
            quarantine_s_max=120.0,
            quarantine_bytes_max=1 << 32,
        )
    return Settings(
        lease_s=chance.choice((0.05, 0.2, 1.0, 3.0)),
        lease_slots=chance.choice((3, 6, 16, 64)),
        connect_s=chance.uniform(0.05, 0.5),
        handshake_s=chance.uniform(0.1, 0.5),
        queue_s=chance.uniform(0.2, 1.0),
        wire_s=chance.uniform(0.1, 0.5),
        fence_s=chance.uniform(0.1, 0.5),
        quarantine_s_max=chance.choice((0.02, 0.2, 2.0)),
        quarantine_bytes_max=chance.choice((0, 1 << 10, 1 << 30)),
    )


class Mischief:
    """Does to processes and hosts what a scenario's faults say, at moments drawn from its seed.

    Attributes:
        engines: the engines as they are now; whoever is started anew takes its place.
        gone: engines of earlier lives.
    """

    def __init__(self, world: World, fabric: Fabric, faults: Faults, engines: list[Engine]) -> None:
        self.engines = engines
        self.gone: list[Engine] = []
        self._world = world
        self._fabric = fabric
        self._faults = faults
        self._over = False

    def plan(self, duration_s: float) -> None:
        """Choose the moments."""
        kinds: tuple[tuple[int, Callable[[], object]], ...] = (
            (self._faults.kills, self._kill),
            (self._faults.leaves, self._leave),
            (self._faults.stops, self._stop),
            (self._faults.partitions, self._part),
            (self._faults.jumps, self._jump),
        )
        for times, do in kinds:
            for _ in range(times):
                self._world.after(self._world.chance.uniform(0.0, duration_s), do)

    def end(self) -> None:
        """Let everything be well from now on: hosts are joined, whoever is stopped goes on, who is dead comes back."""
        self._over = True
        self._fabric.wires.faults = CALM.network
        self._fabric.faults = CALM.fabric
        self._fabric.wires.join()
        for number, engine in enumerate(self.engines):
            for rank in engine.ranks:
                rank.process.resume()
            if not engine.alive:
                self._start(number)

    def _kill(self) -> None:
        number = self._world.chance.randrange(len(self.engines))
        if self.engines[number].alive and not self._over:
            self.engines[number].kill()
            self._world.after(self._world.delay(self._faults.outage_s), self._start, number)

    def _start(self, number: int) -> None:
        if not self.engines[number].alive and not self._world.over:
            self.gone.append(self.engines[number])
            self.engines[number] = self.engines[number].next_life()

    def _leave(self) -> None:
        number = self._world.chance.randrange(len(self.engines))
        engine = self.engines[number]
        if engine.open and not self._over:
            self._world.note(engine.name, "leaves")
            engine.leave()
            self._await_end(number, engine)

    def _await_end(self, number: int, engine: Engine) -> None:
        """Start an engine anew as soon as it has left; it may be killed first."""
        if self.engines[number] is not engine or not engine.alive:
            return
        if all(rank.left for rank in engine.ranks):
            engine.kill()  # its processes end
            self._start(number)
        else:
            self._world.after(0.01, self._await_end, number, engine)

    def _stop(self) -> None:
        engine = self._world.chance.choice(self.engines)
        rank = self._world.chance.choice(engine.ranks)
        if engine.alive and not self._over:
            rank.process.stop()
            self._world.after(self._world.delay(self._faults.outage_s), rank.process.resume)

    def _jump(self) -> None:
        rank = self._world.chance.choice(self._world.chance.choice(self.engines).ranks)
        rank.process.skew_s = self._world.chance.gauss(0.0, self._faults.skew_s)
        self._world.note(rank.name, "clock set", f"{rank.process.skew_s:.3f}")

    def _part(self) -> None:
        hosts = [rank.process.host for engine in self.engines for rank in engine.ranks]
        one, other = self._world.chance.sample(hosts, 2)
        if not self._over:
            self._fabric.wires.part(one, other)
            self._world.after(self._world.delay(self._faults.outage_s), self._fabric.wires.join)
