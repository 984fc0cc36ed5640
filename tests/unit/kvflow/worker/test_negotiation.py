"""Which data planes a peer is read over: those that both sides have, and whose settings agree."""

import pytest

from kvflow.errors import FailureCode, LayoutMismatch, PeerLost
from kvflow.events import PeerConnected

from .pulling import DATA_ENDPOINT, FaultyNetwork, failure, opened

BOTH = ("nixl", "tcp")
NUMERIC = "tcp://127.0.0.1:5700"


SIXTH = "tcp://[fd00::7]:5700"
REQUIRED = {"require_encryption": True}


def negotiating(ours, theirs, names=(SIXTH, NUMERIC), encryption="off", *, open_at=None, required=""):
    """Open a consumer with our planes and a producer with its planes; ``required``: who requires encryption."""
    network = FaultyNetwork()
    network.names[DATA_ENDPOINT], network.open_at = names, open_at
    settings = {"transport": "auto", "tcp_encryption": encryption}
    if required == "theirs":
        settings |= REQUIRED
    own = REQUIRED if required == "ours" else {}
    return opened(network=network, planes=(ours, theirs), theirs=settings, transport="auto", **own)


async def refusal(world):
    error = await failure(world.start())
    assert isinstance(error, LayoutMismatch)
    return error


@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [
        (BOTH, ("tcp", "nixl"), {"nixl", "tcp"}),
        (BOTH, ("tcp",), {"tcp"}),
        (("tcp",), ("nixl", "tcp", "of a newer release"), {"tcp"}),
        (BOTH, ("nixl",), {"nixl"}),
    ],
)
async def test_the_first_of_our_planes_that_both_sides_have_is_taken(ours, theirs, both):
    async with negotiating(ours, theirs) as world:
        report = await world.pull()
        assert world.holds((1, 2), (3, 4))
        assert (report.plane, report.transport) == (next(plane for plane in ours if plane in both), "loopback")
        (address,) = world.faults.called("add")
        assert address.planes.keys() == both
        assert address.data_endpoint == (NUMERIC if "tcp" in both else "")


@pytest.mark.parametrize(("names", "open_at"), [((SIXTH, NUMERIC), SIXTH), ((SIXTH,), None)])
async def test_the_address_of_a_name_that_accepts_connections_is_taken(names, open_at):
    async with negotiating(("tcp",), BOTH, names, open_at=open_at) as world:
        await world.pull()
        (address,) = world.faults.called("add")
        assert address.data_endpoint == SIXTH


@pytest.mark.parametrize("planes", [("tcp",), ("nixl",)])
async def test_a_lost_peer_is_named_with_its_data_port_where_it_is_read_over_tcp(planes):
    async with negotiating(planes, BOTH) as world:
        world.faults.refused = FailureCode.PEER_LOST
        lost = await failure(world.start())
        assert isinstance(lost, PeerLost)
        assert (f"(its data port is {NUMERIC}, by tcp_advertise)" in lost.message) == (planes == ("tcp",))
        assert "tcp_advertise" in lost.remedy


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("no name"), ValueError("embedded null")])
async def test_an_unresolvable_tcp_plane_is_left_out_if_another_plane_exists(error):
    async with negotiating(BOTH, BOTH, error) as world:
        assert (await world.pull()).plane == "nixl"
        (address,) = world.faults.called("add")
        assert (address.planes.keys(), address.data_endpoint) == ({"nixl"}, "")
    async with negotiating(("tcp",), BOTH, error) as world:
        lost = await failure(world.start())
        assert isinstance(lost, PeerLost)
        assert f"{DATA_ENDPOINT}, which cannot be resolved" in lost.message
        assert world.faults.called("add") == []


async def test_different_encryption_is_refused_where_only_tcp_could_serve():
    async with negotiating(("tcp",), BOTH, encryption="tls") as world:
        error = await refusal(world)
        assert (error.field, error.source, error.target) == ("tcp_encryption", "tls", "off")
        assert "tcp_encryption" in error.remedy
        assert world.faults.called("add") == []


async def test_different_encryption_does_not_keep_another_plane_from_serving():
    async with negotiating(BOTH, BOTH, encryption="tls") as world:
        assert (await world.pull()).plane == "nixl"
        (address,) = world.faults.called("add")
        assert address.planes.keys() == {"nixl"}
    async with negotiating(BOTH, BOTH, encryption="tls") as world:
        world.faults.refused = FailureCode.PLANE_UNFIT
        assert (await refusal(world)).field == "tcp_encryption"
        assert world.of(PeerConnected) == []


@pytest.mark.parametrize("required", ["ours", "theirs"])
async def test_tcp_between_hosts_is_refused_by_name_if_encryption_is_required(required):
    far = ("tcp://10.0.0.7:5700",)
    async with negotiating(("tcp",), BOTH, far, required=required) as world:
        error = await refusal(world)
        assert error.field == "require_encryption"
        assert "tcp_encryption is 'off'" in error.message
        assert "tcp_encryption" in error.remedy
        assert world.faults.called("add") == []
    async with negotiating(BOTH, BOTH, far, required=required) as world:
        assert (await world.pull()).plane == "nixl"
        (address,) = world.faults.called("add")
        assert (address.planes.keys(), address.encrypted) == ({"nixl"}, True)
    async with negotiating(("tcp",), BOTH, required=required) as world:
        assert (await world.pull()).plane == "tcp"  # over a loopback address
