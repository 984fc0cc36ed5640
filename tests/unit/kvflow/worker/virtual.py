"""One consumer and the ranks of one producer on virtual time: real workers over a simulated network and data plane."""

from contextlib import contextmanager
from functools import partial

import msgspec

from kvflow.events import LeaseEnded, OfferAdmitted
from kvflow.leases.tickets import join_tickets
from kvflow.planning.plan import PlanCache
from kvflow.worker.environment import Environment
from kvflow.worker.runtime import open_worker
from tests.fakes import Fabric, FabricFaults, NetworkFaults, Process, Wires, World, bury
from tests.fakes.memory import SimulatedCache
from tests.fakes.models import NUM_BLOCKS, Shape, plan_of
from tests.fakes.network import SimulatedNetwork
from tests.fakes.transport import opener
from tests.helpers.settings import flat_config

from .helpers import SECRET

LONG_S = 3600.0
"""In virtual time: longer than anything takes."""
PLANS = PlanCache()
SHAPE = Shape("full", 4, 1, "BLHNC", "content")


def bytes_per_block(shape):
    """Return the bytes of one block of a cache."""
    return plan_of(shape, 0).bytes_per_block


class Life:
    """One worker in a process of its own.

    Attributes:
        process: an event loop on virtual time.
        worker: open until ``leave``.
        events: what it reported.
    """

    def __init__(self, fabric, config, cache):
        self.config, self.cache = config, cache
        name, host = f"{config.engine_id}/{config.rank}", config.bind.removeprefix("tcp://").partition(":")[0]
        self.process = Process(fabric.world, name, host, began_s=1.0, skew_s=0.0)
        self.worker, self.events = None, []
        self._left, self._world = self.process.create_future(), fabric.world
        environment = Environment(
            clock=self.process.time,
            network=SimulatedNetwork(fabric.wires, self.process),
            open_transport=opener(fabric, self.process, cache, [1] * NUM_BLOCKS),
            draw_bits=fabric.world.chance.getrandbits,
            make_plans=lambda: PLANS,
            staging=lambda _config, _manifest: 0,
        )
        self._task = self.process.create_task(self._live(config, cache, environment), name="life")
        assert fabric.world.run(lambda: self.worker is not None, LONG_S)

    async def _live(self, config, cache, environment):
        async with open_worker(config, cache, hooks=[self.events.append], environment=environment) as worker:
            self.worker = worker
            await self._left

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def leave(self):
        """Close the worker."""
        self._left.set_result(None)
        assert self._world.run(self._task.done, self._world.now + LONG_S)


class VirtualWorld:
    """The workers, the time, and what they said to each other.

    Attributes:
        consumer, producers: the workers.
        wires, fabric: what is between them.
    """

    def __init__(self, ranks, shape, theirs, ours, *, reader):
        self._world = World(1, recording=True)
        self.wires = Wires(self._world, NetworkFaults())
        self.fabric = Fabric(self._world, self.wires, FabricFaults(at_once=1.0, inline=1.0))
        self.producers = [self.open("prefill-0", shape, rank, ranks, **theirs) for rank in range(ranks)]
        self.consumer = self.open("decode-0", shape, *reader, **ours)
        self._count = 0

    def open(self, engine_id, shape=SHAPE, rank=0, ranks=1, **settings):
        """Open a worker on a host of its own."""
        config = flat_config(
            engine_id=engine_id,
            rank=rank,
            num_ranks=ranks,
            bind=f"tcp://10.0.0.{len(self.fabric.agents) + 1}:5000",
            cluster_secret=SECRET,
            **settings,
        )
        cache = SimulatedCache(
            msgspec.structs.replace(shape, num_ranks=ranks), rank, (len(self.fabric.agents) + 1) << 32
        )
        return Life(self.fabric, config, cache)

    def reborn(self, life):
        """Start the worker of a process that has ended anew, at its address."""
        return Life(self.fabric, life.config, life.cache)

    @property
    def now(self):
        return self._world.now

    def do(self, call, life=None):
        """Call a function on the loop of a worker, the consumer's if none is named; await what it returns."""

        async def called():
            found = call()
            return await found if hasattr(found, "__await__") else found

        task = (life or self.consumer).process.create_task(called(), name="drive a call")
        assert self._world.run(task.done, self._world.now + LONG_S), self._world.violation
        return task.result()

    def offer(self, blocks=(1,), **how):
        """Offer blocks on every rank, under a new name."""
        self._count += 1
        given = f"request-{self._count}", [list(blocks)], 4 * len(blocks)
        return join_tickets([self.do(partial(each.worker.offer, *given, **how), life=each) for each in self.producers])

    def start(self, ticket, blocks=(1,), **how):
        """Start a pull in a task of its own."""

        async def pull():
            return await self.consumer.worker.pull(ticket, [list(blocks)], **how)

        return self.consumer.process.create_task(pull(), name="drive a pull")

    def pull(self, *given, **how):
        """Carry a pull out."""
        task = self.start(*given, **how)
        assert self._world.run(task.done, self._world.now + LONG_S), self._world.violation
        return task.result()

    def cut(self):
        """Cut every connection, and wait until both ends know."""
        for line in list(self.wires._connections.values()):
            line.cut()
        self.pass_time(0.01)

    def pass_time(self, seconds):
        """Let time pass."""
        self._world.run(lambda: False, self._world.now + seconds)
        assert self._world.violation is None

    def leases(self, rank=0):
        """Return how many leases a rank of the producer holds."""
        producer = self.producers[rank]
        return len(producer.of(OfferAdmitted)) - len(producer.of(LeaseEnded))

    def heard(self, message, rank=0, since=0.0, life=None):
        """Return when a rank of the producer, or another worker, has heard each message of a kind."""
        name = (life or self.producers[rank]).process.name
        lines = [line.split(" ", 3) for line in self._world.record if f" {name} heard" in line]
        return [float(when) for when, *_, what in lines if what == message and float(when) >= since]


@contextmanager
def virtual(*, ranks=1, reader=(0, 1), shape=SHAPE, lease_s=6.0, theirs=(), **ours):
    """Open a world on virtual time.

    Args:
        ranks: of the producer, each with an equal share of the heads.
        reader: rank of the consumer, and how many of its engine there are.
        shape: of every cache.
        lease_s, theirs: settings of the producer's workers.
        ours: settings of the consumer.
    """
    world = VirtualWorld(ranks, shape, {"lease_s": lease_s, **dict(theirs)}, ours, reader=reader)
    try:
        yield world
        assert world._world.violation is None
    finally:
        bury(world._world)
