"""What goes wrong in a scenario: drawn from its seed, each kind with a strength of its own.

Strengths are drawn over orders of magnitude, so that a seed has one fault that dominates, or two that meet, and not
always the same noise of all of them.
"""

from collections.abc import Callable

from msgspec import Struct

from kvflow.reads.contract import RESET_DRAIN_S
from tests.fakes.fabric import Fabric, FabricFaults
from tests.fakes.network import NetworkFaults
from tests.fakes.world import World
from tests.simulation.engines import Engine, Settings

HANG_S = 1e-3
"""How often it is looked whether a host is read that is to hang."""

INLINE = (0.0, 0.3, 1.0)
CHUNK_BYTES = (256, 768, 4096)

DRAIN_S = 0.1
"""Mean time that an engine drains before it leaves, if it does."""


class Faults(Struct, frozen=True, kw_only=True):
    """Everything that goes wrong in one scenario.

    Attributes:
        network: what happens to messages.
        fabric: what happens to reads.
        kills: engines that are killed, and started anew.
        leaves: engines that close in peace, and are started anew.
        stops: ranks that are stopped for a while.
        hangs: ranks whose host hangs until the end.
        partitions: pairs of hosts that are parted for a while.
        outage_s: mean duration of a stop, a partition, or of being dead.
        cancelled: share of pulls that are cancelled.
        revoked: share of leases that are revoked.
        forged: share of tickets that are changed on their way.
        skew_s: how far the wall clocks of hosts are apart.
        jumps: wall clocks that are set anew.
        hang_up_s: mean time until the kernel hangs up for a process that was killed.
        calm: nothing goes wrong but what callers do: they cancel, revoke and change tickets all the same.
    """

    network: NetworkFaults
    fabric: FabricFaults
    kills: int
    leaves: int
    stops: int
    hangs: int
    partitions: int
    outage_s: float
    cancelled: float
    revoked: float
    forged: float
    skew_s: float
    jumps: int
    hang_up_s: float
    calm: bool = False


def draw_calm(world: World) -> Faults:
    """Draw a scenario in which nothing goes wrong but what callers do; in some, a read lasts for several leases."""
    chance = world.chance
    piece_s = chance.choice((100e-6, 5e-3, 0.1, 0.3))
    return Faults(
        network=NetworkFaults(),
        fabric=FabricFaults(
            piece_s=piece_s,
            at_once=chance.choice((0.5, 1.0)) if piece_s < 1e-3 else 0.0,
            inline=chance.choice(INLINE),
            chunk_bytes=chance.choice(CHUNK_BYTES),
        ),
        kills=0,
        leaves=0,
        stops=0,
        hangs=0,
        partitions=0,
        outage_s=0.0,
        cancelled=0.1,
        revoked=0.05,
        forged=0.02,
        skew_s=0.0,
        jumps=0,
        hang_up_s=0.0,
        calm=True,
    )


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
            inline=chance.choice(INLINE),
            chunk_bytes=chance.choice(CHUNK_BYTES),
            at_once=chance.choice((chance.random(), 1.0)),
            piece_s=share(20e-6, 50e-3),
            pieces_max=chance.randint(1, 4),
            failed=share(1e-4, 0.05),
            noticed_s=share(1e-4, 0.3),
            rdma=chance.random() < 0.5,
        ),
        kills=chance.randint(1, 3),
        leaves=chance.randint(0, 1),
        stops=chance.randint(1, 4),
        hangs=int(chance.random() < 0.5),
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
    if faults.calm:
        return Settings(
            lease_s=chance.choice((1.0, 1.5, 3.0)),
            unread_s=10.0,
            lease_slots=chance.choice((4, 16, 64)),
            connect_s=2.0,
            handshake_s=5.0,
            queue_s=30.0 + 200 * faults.fabric.piece_s,  # a read waits for the chunks of all others
            wire_s=30.0,
            fence_s=10.0,
            compute_s=5.0,
            follow_bytes_min=256,
            quarantine_s_max=120.0,
            quarantine_bytes_max=1 << 32,
        )
    return Settings(
        lease_s=chance.choice((0.05, 0.2, 1.0, 3.0)),
        unread_s=0.1,
        lease_slots=chance.choice((2, 4, 16, 64)),
        connect_s=chance.uniform(0.05, 0.5),
        handshake_s=chance.uniform(0.1, 0.5),
        queue_s=chance.uniform(0.2, 1.0),
        wire_s=chance.uniform(0.1, 0.5),
        fence_s=chance.uniform(0.1, 0.5),
        compute_s=1.0,
        follow_bytes_min=256,
        quarantine_s_max=chance.choice((0.02, 0.2, 2.0)),
        quarantine_bytes_max=chance.choice((0, 1 << 10, 1 << 30)),
    )


def pull_s_max(settings: Settings, faults: Faults) -> float:
    """Return the seconds after which every pull has ended and nothing writes into its blocks.

    In a calm scenario that is twice what the slowest pull of 16,000 seeds took: one of the lowest priority, while
    others of a higher priority arrived for 20 seconds. Otherwise it is the sum of all budgets. A handshake may be
    awaited three times, and resetting the reader takes its own time.
    """
    if faults.calm:
        return 0.1 + 440 * faults.fabric.piece_s
    budgets = settings.connect_s + 3 * settings.handshake_s + settings.queue_s + settings.wire_s + settings.fence_s
    return budgets + settings.quarantine_s_max + 2 * RESET_DRAIN_S


def is_slow(settings: Settings, faults: Faults) -> bool:
    """Tell whether the network or the data plane alone may use a budget up."""
    network, fabric = faults.network, faults.fabric
    meeting = 20 * network.delay_s > min(settings.connect_s, settings.handshake_s)
    return meeting or 50 * (fabric.piece_s + fabric.step_s) > min(settings.wire_s, settings.fence_s, settings.queue_s)


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
            (self._faults.hangs, self._hang),
            (self._faults.partitions, self._part),
            (self._faults.jumps, self._jump),
        )
        for times, do in kinds:
            for _ in range(times):
                self._world.after(self._world.chance.uniform(0.0, duration_s), do)

    def end(self) -> None:
        """Let everything be well from now on: hosts are joined, stopped processes go on, dead ones come back.

        Only a host that hangs is not woken.
        """
        self._over = True
        if not self._faults.calm:
            self._fabric.wires.faults = NetworkFaults()
            self._fabric.faults = FabricFaults()
        self._fabric.wires.join()
        for number, engine in enumerate(self.engines):
            for rank in engine.ranks:
                rank.process.resume()
            if not engine.alive:
                self._start(number)

    def replace_hung(self) -> None:
        """Start anew whatever hangs."""
        for number, engine in enumerate(self.engines):
            if engine.hung:
                engine.kill()
                self._start(number)

    def _kill(self) -> None:
        number = self._world.chance.randrange(len(self.engines))
        if self.engines[number].alive and not self._over:
            self.engines[number].kill()
            self._world.later(self._faults.outage_s, self._start, number)

    def _start(self, number: int) -> None:
        if not self.engines[number].alive and not self._world.over:
            self.gone.append(self.engines[number])
            self.engines[number] = self.engines[number].next_life()

    def _leave(self) -> None:
        number = self._world.chance.randrange(len(self.engines))
        engine = self.engines[number]
        if engine.open and not self._over:
            self._world.note(engine.name, "leaves")
            engine.leave(self._world.delay(DRAIN_S) if self._world.happens(0.5) else 0.0)
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
            self._fabric.wires.troubles.note("stopped", rank.process.host)
            rank.process.stop()
            self._world.later(self._faults.outage_s, rank.process.resume)

    def _hang(self) -> None:
        engine = self._world.chance.choice(self.engines)
        rank = self._world.chance.choice(engine.ranks)
        if self._over:
            return
        if not engine.alive or not self._fabric.reads_from(rank.process):
            self._world.after(HANG_S, self._hang)  # its host hangs while it is read, or not at all
        else:
            self._fabric.wires.troubles.note("hung", rank.process.host)
            self._world.note(rank.name, "hangs")
            rank.process.hang()

    def _jump(self) -> None:
        rank = self._world.chance.choice(self._world.chance.choice(self.engines).ranks)
        rank.process.skew_s = self._world.chance.gauss(0.0, self._faults.skew_s)
        self._world.note(rank.name, "clock set", f"{rank.process.skew_s:.3f}")

    def _part(self) -> None:
        hosts = [rank.process.host for engine in self.engines for rank in engine.ranks]
        one, other = self._world.chance.sample(hosts, 2)
        if not self._over:
            self._fabric.wires.part(one, other)
            self._world.later(self._faults.outage_s, self._fabric.wires.join)
