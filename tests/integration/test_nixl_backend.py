"""What only NIXL can get wrong: errors on an endpoint that lives, and a NIXL that is not there."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import (
    BackendError,
    CheckedList,
    Chunk,
    Envelope,
    Portion,
    PostedWork,
    Share,
    decode_envelope,
    encode_envelope,
)
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import PeerAddress, PreparedList
from kvflow.reads.nixl import backend as nixl
from kvflow.reads.nixl import binding as nixl_binding
from kvflow.reads.nixl.backend import USUAL, NixlBackend, Uses
from kvflow.reads.nixl.reading import SPANS

LEASE = LeaseName(3, 0)


class WatchedAgent:
    """A real agent that calls a function before each post, and raises what the test wants after it.

    Attributes:
        posts: how many there were.
        forgotten: names of the agents whose connections were closed.
    """

    def __init__(self, agent, errors=(), before=lambda: None):
        self._agent, self._errors, self._before = agent, list(errors), before
        self.posts, self.forgotten = 0, []

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def post(self, handle):
        self._before()
        done = self._agent.post(handle)
        self.posts += 1
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return done

    def remove_remote(self, name):
        self.forgotten.append(name)
        self._agent.remove_remote(name)


class Ends:
    """A reader and an exporter, driven without a thread."""

    def __init__(self, reads=USUAL, exports=USUAL, *, meets=True, **options):
        self.caches = [np.zeros(4096, np.uint8), np.arange(4096, dtype=np.uint8)]
        self.epochs = np.arange(100, 108, dtype=np.uint64)
        self.table = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        self.regions = [Region(cache.ctypes.data, cache.nbytes) for cache in self.caches]
        self.reader, self.exporter = (
            NixlBackend(name, [region], self.table, uses=uses, **options)
            for name, region, uses in zip(("reader", "exporter"), self.regions, (reads, exports), strict=True)
        )
        if meets:
            self.meet(self.exporter)

    def meet(self, exporter, region=None):
        """Add an exporter as the peer, and prepare to read a region of it; that of ``exporter`` if none is named."""
        self.reader.add(PeerAddress("p", {"nixl": exporter.metadata}, self.table))
        target, source = (
            np.array([[each.address, 64, 0, 64, 64]]) for each in (self.regions[0], region or self.regions[1])
        )
        prepared_list = PreparedList(1, "p", source, target)
        self.reader.prepare(CheckedList(prepared_list, check_rows(source), check_rows(target)))

    def chunk(self):
        index = np.arange(64, dtype=np.int32)
        return Chunk(Portion("p", 1, index, index, np.array([0, 64]), 4096, (Share(1, LEASE, 64),)), 0, 64)

    def check(self, first=3, last=3, peer="p"):
        """Post a check of some slots."""
        return self.reader.post_check(peer, first, last, [(1, LEASE)], fence=True)

    def finish(self, outcome):
        """Poll to the end. It is bounded by the test's own time limit."""
        while isinstance(outcome, PostedWork):
            value = self.reader.poll(outcome)
            if value is not None:
                return value
        return outcome

    def flaky(self, *errors):
        self.reader._reader.agent = WatchedAgent(self.reader._reader.agent, errors)

    def close(self):
        self.reader.close()
        self.exporter.close()


@pytest.fixture
def open_ends():
    """Open ends, and close them."""
    made = []

    def make(*uses, **options):
        made.append(Ends(*uses, **options))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture
def ends(open_ends):
    return open_ends()


@pytest.mark.nixl
def test_an_error_on_a_living_endpoint_is_reported_after_a_flush(ends):
    """Descriptors before the failing one may still fly; a small read behind them proves that they have landed."""
    spans = len(ends.reader._reader.free_spans)
    backend_error = type("nixlBackendError", (RuntimeError,), {})
    ends.flaky(backend_error("NIXL_ERR_BACKEND"))
    with pytest.raises(BackendError) as caught:
        ends.finish(ends.reader.post(ends.chunk()))
    assert caught.value.reason.code == "transport_error"
    assert "NIXL_ERR_BACKEND" in caught.value.reason.detail
    assert len(ends.reader._reader.free_spans) == spans
    assert ends.finish(ends.reader.post(ends.chunk())) == 0
    assert np.array_equal(*ends.caches)
    assert ends.finish(ends.check()) == [103]


@pytest.mark.nixl
def test_a_load_that_fails_behind_its_connection_is_made_again(open_ends):
    """NIXL then refuses its name for ever. It happens if a device of the address is said to have another's memory."""
    ends = open_ends(meets=False)
    truth = decode_envelope(ends.exporter.metadata, transport="nixl")
    blob = truth.blob
    start = blob.index(b"UCX|")
    domains = [at for at in range(start, blob.index(b"MemSection")) if blob[at] in (1, 2)]
    stuck = 0
    for at in domains:
        lie = replace(truth, blob=blob[:at] + b"\0" + blob[at + 1 :])
        try:
            ends.reader.add(PeerAddress("liar", {"nixl": encode_envelope(lie)}, ends.table))
        except BackendError as error:
            stuck += error.reason.code == "peer_lost"
        ends.reader.remove("liar", gone=True)
        ends.meet(ends.exporter)
        ends.caches[0][:] = 0
        assert ends.finish(ends.reader.post(ends.chunk())) == 0
        assert np.array_equal(*ends.caches)
        assert ends.finish(ends.check()) == [103]
        ends.reader.remove("p", gone=False)
    assert stuck


@pytest.mark.nixl
def test_metadata_that_always_fails_is_loaded_a_few_times_only(open_ends, monkeypatch):
    """NIXL keeps a connection each time."""
    ends = open_ends(meets=False)
    truth = decode_envelope(ends.exporter.metadata, transport="nixl")
    load, failing, tried = ends.reader._reader.agent.add_remote, [True], []

    class Backend(RuntimeError):
        """As NIXL names it."""

    class Known(RuntimeError):
        """The same."""

    Backend.__name__, Known.__name__ = "nixlBackendError", "nixlInvalidParamError"

    def fail(blob):
        tried.append(blob)
        if not failing:
            return load(blob)
        raise Known("known") if len(tried) > 1 and blob == truth.blob else Backend("no such segment")

    monkeypatch.setattr(ends.reader._reader, "agent", WatchedAgent(ends.reader._reader.agent))
    ends.reader._reader.agent.add_remote = fail
    for number in range(100):
        said = "no such segment" if number < 9 else "could not be connected 8 times, and is not tried again"
        with pytest.raises(BackendError, match=said) as caught:
            ends.meet(ends.exporter)
        assert caught.value.reason.code == "peer_lost"
    assert caught.value.reason.remedy
    renamed = [blob for blob in tried if blob != truth.blob]
    assert len(renamed) == len(set(renamed)) == 8
    failing.clear()
    ends.reader.reset()
    ends.meet(ends.exporter)
    assert ends.finish(ends.reader.post(ends.chunk())) == 0


@pytest.mark.nixl
def test_without_a_flush_a_post_never_ends(ends):
    backend_error = type("nixlBackendError", (RuntimeError,), {})
    ends.flaky(backend_error("first"), backend_error("the flush too"))
    posted = ends.reader.post(ends.chunk())
    assert isinstance(posted, PostedWork)
    assert [ends.reader.poll(posted) for _ in range(3)] == [None] * 3


@pytest.mark.nixl
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 7), (2, 5), (7, 7)])
def test_a_check_reads_a_span_of_slots(ends, first, last):
    all_posted = [ends.check(first, last) for _ in range(3)]
    assert [ends.finish(posted) for posted in all_posted] == [[*range(100 + first, 101 + last)]] * 3
    assert len(set(ends.reader._reader.free_spans)) == len(ends.reader._reader.free_spans) == SPANS


@pytest.mark.nixl
def test_two_threads_use_one_reader_in_turns(ends):
    """Calls come from the event loop and from the read thread, one at a time: UCX asks for no more."""
    ends.caches[1][:] = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    turn, wrong, barrier = threading.Lock(), [], threading.Barrier(2)

    def use():
        barrier.wait(60)
        for number in range(3000):
            with turn:
                ends.caches[0][:] = 0
                moved = ends.finish(ends.reader.post(ends.chunk()))
                values = ends.finish(ends.check(0, number % 8))
                if moved or values != [*range(100, 101 + number % 8)] or not np.array_equal(*ends.caches):
                    wrong.append(number)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.nixl
def test_a_lost_endpoint_is_terminal_at_once(ends):
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})("NIXL_ERR_REMOTE_DISCONNECT"))
    with pytest.raises(BackendError) as caught:
        ends.check(0, 0)
    assert caught.value.reason.code == "peer_lost"


@pytest.mark.nixl
def test_checks_of_hung_peers_cannot_take_more_than_the_scratch_has(ends):
    ends.reader._reader.free_spans.clear()
    with pytest.raises(BackendError, match="too many checks"):
        ends.check(0, 0)


@pytest.mark.nixl
def test_a_failed_connection_is_not_shared_and_is_made_again(ends):
    ends.reader.add(PeerAddress("q", {"nixl": ends.exporter.metadata}, ends.table))
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})("NIXL_ERR_REMOTE_DISCONNECT"))
    with pytest.raises(BackendError):
        ends.check(0, 0)
    ends.reader.remove("p", gone=False)
    with pytest.raises(BackendError, match="peer_lost"):
        ends.reader.add(PeerAddress("p", {"nixl": ends.exporter.metadata}, ends.table))
    ends.reader.remove("q", gone=False)
    ends.meet(ends.exporter)
    assert ends.finish(ends.check()) == [103]


@pytest.mark.nixl
def test_two_workers_cannot_share_an_agent(ends):
    impostor = NixlBackend("exporter", [ends.regions[0]], ends.table)
    try:
        with pytest.raises(BackendError, match="metadata_invalid"):
            ends.reader.add(PeerAddress("q", {"nixl": impostor.metadata}, ends.table))
        assert ends.finish(ends.check()) == [103]
    finally:
        impostor.close()


def test_a_missing_nixl_says_what_to_install(monkeypatch):
    def refuse(name):
        raise ImportError(f"no module {name}")

    for name in [name for name in sys.modules if name.endswith("._bindings")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(nixl_binding.importlib, "import_module", refuse)
    with pytest.raises(TransportUnavailable, match="Install nixl"):
        nixl_binding.load_binding()


@pytest.mark.parametrize(
    ("taken", "operators", "ours"),
    [
        ("tcp", "all", "^tcp"),
        ("tcp", "tcp", "posix"),
        ("tcp", "tcp,cuda_copy", "cuda_copy,posix"),
        ("tcp", "rc,cma,tcp:aux,\\\\tcp", "rc,cma,posix"),
        ("tcp", "rc,cma,posix", "rc,cma,posix"),
        ("tcp", "^cuda_ipc", "^cuda_ipc,tcp"),
        ("tcp", "^cuda_ipc,tcp", "^cuda_ipc,tcp,tcp"),
        # Of an engine that sleeps.
        ("tcp,cuda_ipc", "all", "^tcp,cuda_ipc"),
        ("tcp,cuda_ipc", "cuda_ipc,rc", "rc"),
        ("tcp,cuda_ipc", "rc,cuda,tcp", "rc,cuda_copy,gdr_copy,posix"),
        ("tcp,cuda_ipc", "^rc", "^rc,tcp,cuda_ipc"),
    ],
)
def test_transports_are_taken_out_of_what_the_operator_allows(taken, operators, ours):
    assert nixl_binding.without(operators, taken.split(",")) == ours


def noting_agent(made):
    """Return the type of what stands for NIXL's agent and notes how its backend is made."""

    def create(kind, parameters):
        made.append((kind, parameters["engine_config"].split(","), os.environ.get("UCX_TLS")))

    calls = dict.fromkeys(("makeXferReq", "postXferReq", "releaseXferReq"))
    return lambda _name, _config: SimpleNamespace(createBackend=create, **calls)


@pytest.mark.parametrize("operators", [None, "rc,cuda", "^rc"])
@pytest.mark.parametrize("sleeps", [False, True])
def test_memory_that_is_freed_asleep_is_not_lent_over_cuda_ipc(monkeypatch, operators, sleeps):
    monkeypatch.delenv("UCX_TLS", raising=False)
    if operators is not None:
        monkeypatch.setenv("UCX_TLS", operators)
    made = []
    names = ("DRAM_SEG", "VRAM_SEG", "NIXL_READ", "NIXL_SUCCESS", "NIXL_THREAD_SYNC_NONE")
    binding = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=noting_agent(made), **dict.fromkeys(names, 0))
    nixl_binding.Agent(binding, "an agent", progress=False, sleeps=sleeps)
    ((kind, config, transports),) = made
    assert kind == "UCX"
    assert ("RCACHE_ENABLE=n" in config) is sleeps
    if sleeps:
        assert (
            transports
            == {None: "^tcp,cuda_ipc", "rc,cuda": "rc,cuda_copy,gdr_copy", "^rc": "^rc,tcp,cuda_ipc"}[operators]
        )
    assert os.environ.get("UCX_TLS") == operators


@pytest.mark.nixl
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("roles", [("consumer", "producer"), ("producer", "producer"), ("both", "both")])
def test_every_role_that_may_read_reads_what_may_be_read(open_ends, roles, sleeps):
    ends = open_ends(*(Uses(role, sleeps) for role in roles))
    assert ends.finish(ends.reader.post(ends.chunk())) == 0
    assert np.array_equal(*ends.caches)
    assert ends.finish(ends.check()) == [103]
    ends.reader.reset()
    ends.meet(ends.exporter)
    assert ends.finish(ends.check()) == [103]


@pytest.mark.nixl
def test_the_cache_of_a_consumer_cannot_be_read(open_ends):
    ends = open_ends(Uses(), Uses("consumer"), meets=False)
    with pytest.raises(BackendError, match="bounds"):
        ends.meet(ends.exporter)


@pytest.mark.nixl
def test_a_reset_without_a_reader_makes_one(open_ends):
    ends = open_ends(Uses("producer"), meets=False)
    ends.reader.reset()
    ends.meet(ends.exporter)
    assert ends.finish(ends.reader.post(ends.chunk())) == 0


@pytest.mark.nixl
def test_a_consumer_knows_that_its_cache_is_on_a_device(ends):
    envelope = decode_envelope(ends.reader.metadata, transport="nixl", agent=None)
    assert [nixl.inspect_own(envelope, on_device=each).on_device for each in (True, False)] == [True, False]


@pytest.mark.nixl
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("case", ["a newer NIXL there", "a NIXL here that nobody can read"])
def test_nixl_that_cannot_be_compared_is_told_before_a_read(ends, monkeypatch, on_device, case):
    """Between GPUs, with what to do about it: bytes then go over TCP."""
    monkeypatch.setattr(ends.reader, "_known_only", True)
    monkeypatch.setattr(ends.reader, "_facts", replace(ends.reader._facts, on_device=on_device))
    envelope = decode_envelope(ends.exporter.metadata, transport="nixl")
    envelope = replace(envelope, facts=replace(envelope.facts, on_device=on_device))
    words = "the transports of UCX on both sides cannot be compared"
    if case == "a newer NIXL there":
        envelope = replace(envelope, settings=envelope.settings | {"NIXL": "1.6"}, blob=b"nixlSerDes 2.0|")
        words = "NIXL is '1.5' here and '1.6' at the peer; install the same release on both sides"
    else:
        monkeypatch.setattr(ends.reader, "_ours", None)
    with pytest.raises(BackendError, match="plane_unfit") as refused:
        ends.reader.add(PeerAddress("q", {"nixl": encode_envelope(envelope)}, ends.table))
    assert words in refused.value.reason.detail
    assert refused.value.reason.remedy == (nixl_binding.SAME_NIXL if on_device else "")


def listening():
    """Sockets of this process that listen on TCP."""
    links = list(Path("/proc/self/fd").iterdir())  # the one of the folder itself is closed by then
    open_here = {str(link.readlink()) for link in links if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"} & open_here


@pytest.mark.nixl
@pytest.mark.parametrize("transports", [None, "tcp", "all", "tcp,cma,posix", "^cuda_ipc"])
def test_no_agent_has_tcp_whatever_the_operator_allows(open_ends, monkeypatch, transports):
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    before = listening()
    ends = open_ends(meets=False)
    if transports == "tcp":
        with pytest.raises(BackendError, match="plane_unfit: neither shared memory nor RDMA"):
            ends.meet(ends.exporter)
    else:
        ends.meet(ends.exporter)
        assert ends.finish(ends.reader.post(ends.chunk())) == 0
        assert np.array_equal(*ends.caches)
    for backend in (ends.reader, ends.exporter):
        assert "tcp" not in {each.transport for each in backend._ours.interfaces}
    assert listening() <= before  # some of an earlier test may end meanwhile
    assert os.environ.get("UCX_TLS") == transports


@pytest.mark.nixl
def test_the_reader_has_the_requested_progress_thread_also_after_a_reset(ends):
    def threads():
        return {each.name for each in Path("/proc/self/task").iterdir()}

    def added(**options):
        before = threads()  # some of an earlier test may end meanwhile
        backend = NixlBackend("another", [ends.regions[0]], ends.table, **options)
        try:
            first = threads() - before
            backend.reset()
            return [len(first), len(threads() - before)]
        finally:
            backend.close()

    assert added() == [1, 1]  # of the exporter
    assert added(reader_progress=True) == [2, 2]


@pytest.mark.nixl
def test_a_failed_start_names_the_transports_of_ucx_and_leaves_them_set(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "cma")
    memory = np.zeros(64, np.uint64)
    region = Region(memory.ctypes.data, memory.nbytes)
    with pytest.raises(TransportUnavailable, match="UCX_TLS is 'cma'"):
        NixlBackend("alone", [region], region)
    assert os.environ["UCX_TLS"] == "cma"


def test_the_published_environment_is_bounded_and_holds_what_must_agree():
    binding = SimpleNamespace(__name__="no such package._bindings")
    environment = {
        "UCX_UNIFIED_MODE": "y",
        "UCX_POSIX_FIFO_SIZE": "4" * 100,
        "UCX_TCP_TX_SEG_SIZE": "1m",
        "UCX_LOG_LEVEL": "info",
        "SECRET_SEG_SIZE": "1",
    }
    published = nixl_binding.published_settings(binding, environment, {})
    assert published == {"NIXL": "", "UCX_UNIFIED_MODE": "y", "UCX_POSIX_FIFO_SIZE": "4" * 64}
    many = {f"UCX_{number}_{'X' * (number % 100)}_SEG_SIZE": "1" for number in range(200)}
    published = nixl_binding.published_settings(binding, many, {})
    envelope = Envelope("nixl", "agent", b"", published)
    assert len(published) == 32
    assert decode_envelope(encode_envelope(envelope), transport="nixl") == envelope


def test_parameters_of_the_user_win_and_ours_stay():
    given = {"engine_config": "CUDA_IPC_ENABLE_GET_ZCOPY=n, IB_GID_INDEX=3", "ucx_devices": "mlx5_0"}
    parameters = nixl_binding.backend_parameters(given, connects=True)
    assert parameters == {
        "engine_config": "TLS=^tcp,MM_ERROR_HANDLING=y,CUDA_IPC_ENABLE_GET_ZCOPY=n,IB_GID_INDEX=3",
        "ucx_devices": "mlx5_0",
        "ucx_error_handling_mode": "peer",
    }
    assert "CUDA_IPC_ENABLE_GET_ZCOPY=y" in nixl_binding.backend_parameters({}, connects=False)["engine_config"]


def test_parameters_that_must_agree_are_published_as_variables_are():
    binding = SimpleNamespace(__name__="no such package._bindings")
    given = {"engine_config": "POSIX_SEG_SIZE=16k,IB_GID_INDEX=3,SYSV_SEG_SIZE=8k"}
    published = nixl_binding.published_settings(binding, {"UCX_SYSV_SEG_SIZE": "4k"}, given)
    assert published == {"NIXL": "", "UCX_POSIX_SEG_SIZE": "16k", "UCX_SYSV_SEG_SIZE": "4k"}


@pytest.mark.nixl
def test_both_agents_get_the_parameters_also_after_a_reset(ends, monkeypatch):
    params = {"engine_config": "POSIX_SEG_SIZE=16k"}
    seen = []
    original = nixl_binding.backend_parameters
    monkeypatch.setattr(
        nixl_binding, "backend_parameters", lambda given, **rest: seen.append(given) or original(given, **rest)
    )
    backend = NixlBackend("with parameters", ends.regions[:1], ends.table, params=params)
    try:
        backend.reset()
        assert seen == [params] * 3
        with pytest.raises(BackendError, match="UCX_POSIX_SEG_SIZE"):
            ends.reader.add(PeerAddress("p2", {"nixl": backend.metadata}, ends.table))
    finally:
        backend.close()


@pytest.mark.nixl
def test_parameters_that_nixl_refuses_are_named(monkeypatch):
    memory = np.zeros(8, np.uint64)
    region = Region(memory.ctypes.data, memory.nbytes)
    # A parameter that kvflow decides passes no check of settings, and is one that NIXL reads.
    with pytest.raises(TransportUnavailable, match=r"nixl_backend_params is .'num_workers': 'many'"):
        NixlBackend("alone", [region], region, params={"num_workers": "many"})


@pytest.mark.nixl
def test_the_release_of_the_installed_nixl_is_published():
    release = nixl_binding.published_settings(nixl_binding.load_binding(), {}, {})["NIXL"]
    assert tuple(int(each) for each in release.split(".")) >= (1, 5)


def test_whose_memory_the_kernel_gives_us():
    assert nixl_binding.may_copy_from(os.getpid())
    assert nixl_binding.may_copy_from(2**22 + 1), "there is no such process, and NIXL will say so"


@pytest.mark.nixl
def test_peers_with_incomparable_transports_are_refused_if_required(ends, monkeypatch):
    monkeypatch.setattr(ends.reader, "_ours", None)
    ends.reader.add(PeerAddress("q", {"nixl": ends.exporter.metadata}, ends.table))
    monkeypatch.setattr(ends.reader, "_known_only", True)
    with pytest.raises(BackendError, match="plane_unfit: the transports of UCX"):
        ends.reader.add(PeerAddress("r", {"nixl": ends.exporter.metadata}, ends.table))


@pytest.fixture
def forgotten(ends):
    """Names of the agents whose connections were closed, as the test goes on."""
    ends.flaky()
    return ends.reader._reader.agent.forgotten


@pytest.mark.nixl
def test_the_oldest_kept_connection_is_closed_when_there_are_too_many(ends, forgotten, monkeypatch):
    monkeypatch.setattr(ends.reader, "kept_max", 1)
    ends.reader.remove("p", gone=False)
    assert forgotten == []
    ends.reader.add(PeerAddress("itself", {"nixl": ends.reader.metadata}, ends.table))
    ends.reader.remove("itself", gone=False)
    assert forgotten == ["exporter/exporter"]
    ends.meet(ends.exporter)
    assert ends.finish(ends.reader.post(ends.chunk())) == 0
    assert np.array_equal(*ends.caches)


@pytest.mark.nixl
def test_a_connection_over_which_something_failed_is_not_kept(ends, forgotten):
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})())
    with pytest.raises(BackendError, match="peer_lost"):
        ends.finish(ends.reader.post(ends.chunk()))
    ends.reader.remove("p", gone=False)
    assert forgotten == ["exporter/exporter"]


@pytest.mark.nixl
def test_a_connection_to_a_peer_that_is_gone_is_not_kept(ends, forgotten):
    ends.reader.remove("p", gone=True)
    assert forgotten == ["exporter/exporter"]


@pytest.mark.nixl
def test_a_kept_connection_does_not_serve_another_peer_of_the_same_name(ends, forgotten):
    ends.reader.remove("p", gone=False)
    other = np.full(4096, 7, np.uint8)
    region = Region(other.ctypes.data, other.nbytes)
    successor = NixlBackend("exporter", [region], ends.table)
    try:
        ends.meet(successor, region)
        assert forgotten == ["exporter/exporter"]
        assert ends.finish(ends.reader.post(ends.chunk())) == 0
        assert np.array_equal(ends.caches[0], other)
    finally:
        successor.close()


@pytest.mark.nixl
@pytest.mark.parametrize("first", ["p", "q"])
def test_two_peers_of_one_worker_share_its_connection_until_both_are_gone(ends, forgotten, first):
    ends.reader.add(PeerAddress("q", {"nixl": ends.exporter.metadata}, ends.table))
    assert [ends.finish(ends.check(peer=peer)) for peer in "pq"] == [[103], [103]]
    ends.reader.remove(first, gone=True)
    last = "q" if first == "p" else "p"
    assert ends.finish(ends.check(4, 4, last)) == [104]
    assert forgotten == []
    ends.reader.remove(last, gone=False)
    assert forgotten == ["exporter/exporter"], "one of them has said that it is gone"


def test_rocm_loads_its_own_variant_of_nixl_and_never_cudas(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=None, hip="7.0")))
    for variant in ("nixl_cu13", "nixl_cu12", "nixl"):
        monkeypatch.delitem(sys.modules, f"{variant}._bindings", raising=False)
    asked = []

    def refuse(name):
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(nixl_binding.importlib, "import_module", refuse)
    with pytest.raises(TransportUnavailable):
        nixl_binding.load_binding()
    assert asked == ["nixl_rocm._bindings", "nixl._bindings"]
