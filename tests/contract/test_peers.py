"""What a worker promises of its peers, whoever they are and whenever they are lost: real workers."""

import asyncio
from functools import partial

import msgspec
import pytest

from handshake import ClusterSecurity, Publication
from kvflow.errors import ReleaseMismatch, TicketInvalid
from kvflow.events import PeerConnected, PeerDropped
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.leases.tickets import Ticket
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.integration.strangers import publishing, ticket_to
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, cache_of, turns
from tests.unit.kvflow.worker.pulling import FaultyNetwork, config, opened
from tests.unit.kvflow.worker.virtual import LONG_S, virtual

ADDRESS = "tcp://127.0.0.1:1"
OTHER_SECRET = "another secret of the tests, long enough"


async def test_of_two_that_are_dialed_side_by_side_neither_ends_the_other():
    """Both are linked later than either was dialed, and the first message of the one that died may come last."""
    network = FaultyNetwork()
    environment = msgspec.structs.replace(PRODUCTION, network=network)
    at_address = config(advertise=ADDRESS)
    async with (
        open_worker(at_address, cache_of(), environment=environment) as old,
        open_worker(at_address, cache_of(), environment=environment) as new,
        opened(ranks=0, network=network) as world,
    ):
        network.at[ADDRESS] = network.listening[:2]
        network.hold(ADDRESS)
        tickets = [worker.offer("r", [[3, 4]], 8) for worker in (old, new)]
        handles = [world.start(ticket, blocks) for ticket, blocks in zip(tickets, ((1, 2), (5, 6)), strict=True)]
        await network.heard(2)
        network.let(ADDRESS)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*handles)
        assert len(world.of(PeerConnected)) == 2
        assert world.of(PeerDropped) == []


async def test_a_pull_of_a_peer_that_is_being_left_connects_it_again():
    network = FaultyNetwork()
    async with opened(network=network) as world:
        await world.connect()
        network.leaving.clear()
        network.cut(world.producer.endpoint)
        handle = world.start()
        await turns(50)
        assert len(network.dialed) == 1
        network.leaving.set()
        async with asyncio.timeout(PATIENCE_S):
            await handle
        assert len(network.dialed) == 2


def test_a_ticket_that_another_worker_has_verified_is_verified_again():
    with virtual() as world:
        addresses = [each.worker.rank_address for each in world.producers]
        ticket, _ = TicketMint("prefill-0", addresses, cluster_secret=OTHER_SECRET).offer(
            "r", block_ids=[[1]], num_tokens=4
        )
        lenient = world.open("decode-1", cluster_secret_accepted=OTHER_SECRET)
        read = world.do(lambda: lenient.worker.read_ticket(ticket.to_params()), life=lenient)
        with pytest.raises(TicketInvalid):
            world.pull(read)


@pytest.mark.parametrize("schema", [MANIFEST_SCHEMA - 1, MANIFEST_SCHEMA + 1])
async def test_a_manifest_of_another_release_is_a_mismatch(schema):
    security = ClusterSecurity.from_secret(SECRET)
    async with (
        publishing(Publication.of(b"of another release", schema=schema), security=security) as endpoint,
        opened(ranks=0) as world,
    ):
        with pytest.raises(ReleaseMismatch) as caught:
            await world.pull(Ticket.from_params(ticket_to(endpoint, ((1, 2),), secret=SECRET)))
        assert (caught.value.what, caught.value.theirs) == ("manifest schema", str(schema))


def test_a_lease_that_was_given_back_on_another_rank_ends_no_pull():
    with virtual(ranks=2, reader=(1, 2), fence_s=LONG_S) as world:
        first, second = world.producers
        other = world.open("decode-1")
        addresses = [each.worker.rank_address for each in world.producers]
        mint = TicketMint("prefill-0", addresses, cluster_secret=SECRET)
        ticket, grant = mint.offer("r", block_ids=[[2]], num_tokens=4)
        world.do(partial(first.worker.admit, grant), life=first)
        pull = world.start(ticket, (2,))
        world.wires.part("10.0.0.2", "10.0.0.4")
        other.process.create_task(other.worker.release(ticket), name="give back")
        world.pass_time(8.0)
        assert world.leases() == 0
        assert not pull.done()
        world.do(partial(second.worker.admit, grant), life=second)
        world.pass_time(0.1)
        assert pull.result().early > 0
