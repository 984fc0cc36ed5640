"""Several data planes are one: each peer is read over the best that can serve it, and one that fails stops no other."""

import numpy as np
import pytest

from kvflow.errors import TransportUnavailable
from kvflow.events import PlaneOmitted
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import BackendError, CheckedList, Chunk, Envelope, Portion, PostedWork, Share, encode_envelope
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import SERVES_NOTHING, Carrier, PeerAddress, PreparedList, Published
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.planes import PlaneBackends, open_planes

NBYTES = 256
LEASE = LeaseName(3, 0)
READS = [(1, LEASE)]


class Memory:
    """A cache and a table of epochs."""

    def __init__(self, value=0):
        self.cache = np.full(NBYTES, value, np.uint8)
        self.epochs = np.full(8, value, np.uint64)
        self.region = Region(self.cache.ctypes.data, self.cache.nbytes)
        self.table = Region(self.epochs.ctypes.data, self.epochs.nbytes)


class Late(PostedWork):
    """A chunk or a check that ends when it is asked about."""

    def __init__(self, outcome):
        self.outcome = outcome


class OverOne(LoopbackBackend):
    """A data plane of its own: the loopback under another name, whose posts fly, and which may refuse or fail.

    Attributes:
        calls: what it was asked to do.
        refusal: what ``add`` raises.
        failure: what ``reset`` and ``close`` raise.
    """

    def __init__(self, plane, memory, *, refusal=None, failure=None, descriptor=-1):
        super().__init__(f"{plane} of {id(memory)}", (memory.region,), memory.table)
        self.plane, self.refusal, self.failure, self.descriptor = plane, refusal, failure, descriptor
        self.calls = []

    def add(self, address):
        self.calls.append("add")
        if self.refusal is not None:
            raise self.refusal
        # The loopback knows one name only.
        planes = {"loopback": address.planes[self.plane]}
        return super().add(PeerAddress(address.peer, planes, address.epochs))

    def remove(self, peer_id, *, gone):
        self.calls.append(("remove", peer_id, gone))
        super().remove(peer_id, gone=gone)

    def post(self, chunk):
        self.calls.append("post")
        return Late(super().post(chunk))

    def post_check(self, peer_id, first, last, reads, *, fence):
        self.calls.append(("check", first, last, reads, fence))
        return Late(super().post_check(peer_id, first, last, reads, fence=fence))

    def progress(self):
        self.calls.append("progress")

    def poll(self, posted):
        self.calls.append("poll")
        return posted.outcome

    def fileno(self):
        return self.descriptor

    def reset(self):
        self.calls.append("reset")
        super().reset()
        if self.failure is not None:
            raise self.failure

    def close(self):
        self.calls.append("close")
        super().close()
        if self.failure is not None:
            raise self.failure


class World:
    """Our planes, and peers that publish planes of their own."""

    def __init__(self, **ours):
        self.ours = Memory()
        self.backends = {name: OverOne(name, self.ours, **settings) for name, settings in ours.items()}
        self.backend = PlaneBackends(self.backends, {})
        self.open = [*self.backends.values()]

    def peer(self, *planes, value=7):
        """Return the memory of a peer, and what we are told of its planes."""
        memory = Memory(value)
        theirs = {name: OverOne(name, memory) for name in planes}
        self.open += theirs.values()
        return memory, {name: backend.metadata for name, backend in theirs.items()}

    def reads(self, name, memory):
        """Read a peer's cache and an epoch over whatever plane it was added to."""
        rows = [np.array([[region.address, 16, 0, 16, 16]], np.int64) for region in (memory.region, self.ours.region)]
        backend = self.backend.of(name)
        backend.prepare(CheckedList(PreparedList(1, name, *rows), *map(check_rows, rows)))
        index = np.arange(16, dtype=np.int32)
        portion = Portion(name, 1, index, index, np.array([0, 16]), NBYTES, (Share(1, LEASE, 16),))
        assert backend.poll(backend.post(Chunk(portion, 0, 16))) == 0
        assert (self.ours.cache == memory.cache).all()
        values = backend.poll(backend.post_check(name, 3, 5, READS, fence=True))
        assert values == memory.epochs[3:6].tolist()

    def used(self):
        return {name for name, backend in self.backends.items() if "post" in backend.calls}


@pytest.fixture
def make():
    worlds = []

    def new(**ours):
        worlds.append(World(**ours))
        return worlds[-1]

    yield new
    for world in worlds:
        for backend in world.open:
            if "close" not in backend.calls:
                backend.failure = None
                backend.close()


def refuses(code, detail, remedy=""):
    return {"refusal": BackendError(code, detail, remedy)}


@pytest.mark.parametrize(
    ("theirs", "chosen"), [(("a", "b"), "a"), (("b", "a"), "a"), (("b",), "b"), (("a",), "a"), (("c", "b"), "b")]
)
def test_a_peer_is_read_over_the_best_plane_that_both_sides_have(make, theirs, chosen):
    world = make(a={}, b={})
    memory, planes = world.peer(*theirs)
    carrier = world.backend.add(PeerAddress("p", planes, memory.table))
    told = "a: the peer does not have this data plane" if chosen == "b" else ""
    assert carrier == Carrier("loopback", "kind", chosen, told)
    world.reads("p", memory)
    assert world.used() == {chosen}
    assert ("check", 3, 5, READS, True) in world.backends[chosen].calls
    assert world.backend.of("p") is world.backends[chosen]


def test_peers_of_different_planes_are_read_side_by_side(make):
    world = make(a={}, b={})
    both, one = world.peer("a", "b", value=1), world.peer("b", value=2)
    for name, (memory, planes) in zip("pq", (both, one), strict=True):
        world.backend.add(PeerAddress(name, planes, memory.table))
    world.reads("p", both[0])
    world.reads("q", one[0])
    world.reads("p", both[0])
    assert (world.backends["a"].calls.count("post"), world.backends["b"].calls.count("post")) == (2, 1)


def test_a_plane_that_does_not_fit_is_passed_over_and_no_failure(make, caplog):
    world = make(a=refuses("plane_unfit", "no one-sided path", "Buy cards."), b={})
    memory, planes = world.peer("a", "b")
    carrier = world.backend.add(PeerAddress("p", planes, memory.table))
    assert carrier == Carrier("loopback", "kind", "b", "a: no one-sided path", "Buy cards.")
    world.reads("p", memory)
    assert caplog.text == ""


@pytest.mark.parametrize(("order", "told"), [("ab", "a: it did not start here: no library"), ("ba", "")])
def test_a_plane_that_did_not_start_is_told_if_it_is_preferred(make, order, told):
    world = make(b={})
    planes = PlaneBackends(world.backends, [PlaneOmitted("a", "transport_unavailable", "no library", "")], order)
    memory, published = world.peer("a", "b")
    assert planes.add(PeerAddress("p", published, memory.table)) == Carrier("loopback", "kind", "b", told)


def test_a_plane_that_fails_is_passed_over_and_told(make, caplog):
    world = make(a=refuses("transport_error", "no memory left"), b={})
    memory, planes = world.peer("a", "b")
    assert world.backend.add(PeerAddress("p", planes, memory.table)).plane == "b"
    assert "'p' is read over b, because a failed: 'no memory left'" in caplog.text


@pytest.mark.parametrize(
    ("a", "b", "theirs", "code", "detail"),
    [
        (
            ("plane_unfit", "far"),
            ("plane_unfit", "odd"),
            ("a", "b"),
            "plane_unfit",
            "a: far; b: odd",
        ),
        (
            ("plane_unfit", "far"),
            ("plane_unfit", "odd"),
            ("a",),
            "plane_unfit",
            "a: far; b: the peer does not have this data plane",
        ),
        (("plane_unfit", "far"), ("peer_lost", "gone"), ("a", "b"), "peer_lost", "a: far; b: gone"),
        (("metadata_invalid", "lie"), ("peer_lost", "gone"), ("a", "b"), "metadata_invalid", "a: lie; b: gone"),
    ],
)
def test_a_peer_that_no_plane_can_read_is_refused_with_the_reason_of_each(make, a, b, theirs, *, code, detail):
    world = make(a=refuses(*a), b=refuses(*b))
    memory, planes = world.peer(*theirs)
    with pytest.raises(BackendError) as caught:
        world.backend.add(PeerAddress("p", planes, memory.table))
    assert (caught.value.reason.code, caught.value.reason.detail) == (code, detail)
    world.backends["b"].refusal = None
    memory, planes = world.peer("b")
    assert world.backend.add(PeerAddress("p", planes, memory.table)).plane == "b", "it may come again"


def test_a_peer_is_removed_from_its_plane_and_a_gone_peer_from_all(make):
    world = make(a={}, b={})
    memory, planes = world.peer("b")
    world.backend.add(PeerAddress("p", planes, memory.table))
    world.backend.remove("p", gone=False)
    assert [backend.calls for backend in world.backends.values()] == [[], ["add", ("remove", "p", False)]]
    world.backend.remove("p", gone=True)
    assert all(backend.calls[-1] == ("remove", "p", True) for backend in world.backends.values())


def test_every_plane_is_reset_and_closed_also_if_another_one_fails(make):
    world = make(a={"failure": BackendError("transport_error", "a fails")}, b={})
    memory, planes = world.peer("b")
    address = PeerAddress("p", planes, memory.table)
    world.backend.add(address)
    with pytest.raises(BackendError, match="a fails"):
        world.backend.reset()
    world.backend.add(address)
    world.reads("p", memory)
    with pytest.raises(BackendError, match="a fails"):
        world.backend.close()
    for backend in world.backends.values():
        assert (backend.calls.count("reset"), backend.calls.count("close")) == (1, 1)


def test_the_descriptor_is_that_of_the_plane_that_has_one(make):
    assert make(a={}, b={"descriptor": 9}).backend.fileno() == 9
    assert make(a={}).backend.fileno() == -1


# Opening.


def opened(factories, required=()):
    memory = Memory()
    given = {"regions": (memory.region,), "epochs": memory.table, "serving": SERVES_NOTHING}
    return open_planes(factories, frozenset(required), **given), memory


def missing(*_given):
    raise TransportUnavailable("it is not installed")


def listening(*given):
    regions, epochs, *_ = given
    backend = LoopbackBackend("one that listens", regions, epochs)
    backend.data_endpoint = "tcp://node-7:5700"
    return backend


def quiet(*given):
    regions, epochs, *_ = given
    return LoopbackBackend("one that does not", regions, epochs)


def metadata_of(name):
    return encode_envelope(Envelope("loopback", name, b""))


def test_what_is_published_names_every_plane_and_where_one_listens():
    backend, _ = opened({"nixl": quiet, "tcp": listening})
    planes = {"nixl": metadata_of("one that does not"), "tcp": metadata_of("one that listens")}
    assert backend.published == Published(planes=planes, data_endpoint="tcp://node-7:5700")
    assert backend.published.names == "nixl+tcp"
    backend.close()


def test_a_plane_that_cannot_start_is_left_out_and_told():
    backend, _ = opened({"nixl": missing, "tcp": listening}, required=["tcp"])
    assert set(backend.published.planes) == {"tcp"}
    (omitted,) = backend.published.missing
    assert (omitted.plane, omitted.code, omitted.detail) == ("nixl", "transport_unavailable", "it is not installed")
    assert omitted.remedy == TransportUnavailable.default_remedy
    backend.close()


@pytest.mark.parametrize(
    ("factories", "required", "words"),
    [
        ({"nixl": missing}, (), "it is not installed"),
        ({"nixl": missing, "tcp": missing}, (), "nixl: it is not installed; tcp: it is not installed"),
        ({"nixl": quiet, "tcp": missing}, ("tcp",), "it is not installed"),
    ],
)
def test_nothing_starts_or_stays_open_without_a_required_plane(factories, required, words):
    for _ in range(2):  # the second would find the name of the first taken
        with pytest.raises(TransportUnavailable, match=words):
            opened(factories, required)


def test_a_defect_closes_what_was_open():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            opened({"nixl": quiet, "tcp": lambda *_: 1 / 0})


def test_progress_is_made_on_every_plane(make):
    world = make(a={}, b={})
    memory, planes = world.peer("a")
    world.backend.add(PeerAddress("p", planes, memory.table))
    world.backend.progress()
    assert all("progress" in backend.calls for backend in world.backends.values())
