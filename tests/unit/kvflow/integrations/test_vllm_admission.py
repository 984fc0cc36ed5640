"""A lease is held as soon as its ticket is signed, once, and its end is reported once, whatever comes first."""

import hmac
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from kvflow import FullAttention, TicketMint, WorkerConfig, allocate
from kvflow.integrations.vllm import admission
from kvflow.integrations.vllm.admission import MESSAGE_BYTES_MAX, Contact, EarlyAdmission, Listener, reachable
from kvflow.integrations.vllm.orders import Admit
from kvflow.integrations.vllm.worker import RankRuntime

from .vllm_like import SECRET, FullAttentionSpec, new_request, new_ticket, rank_address, side

PATIENCE_S = 60.0
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
TICKET = new_ticket()


class Rank:
    """Notes what it is told to hold."""

    def __init__(self):
        self.told = []
        self.event = threading.Event()
        self.error = None

    def admit_early(self, grant):
        self.told.append(grant)
        self.event.set()
        if self.error:
            raise self.error

    def await_told(self):
        assert self.event.wait(PATIENCE_S)
        self.event.clear()
        return self.told


def message(ticket, key):
    text = ticket.to_params()["kvflow"].encode()
    return hmac.digest(key, text, "sha256") + text


# A rank that is told twice.


class World:
    """A rank with a lease, what the engine is told of it, and the two ways to admit it."""

    def __init__(self):
        spec = FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")
        config = WorkerConfig(engine_id="engine", cluster_secret=SECRET, transport="loopback", lease_slots=1)
        self.runtime = RankRuntime(config, allocate({"a": spec}, num_blocks=8))
        self.sent = []
        mint = TicketMint("engine", [self.runtime.rank.address], cluster_secret=SECRET, block_sizes=(4,))
        self.grant = mint.offer("r", block_ids=[[1]], num_tokens=4)[1]
        mint.retire("r")
        self.next = mint.offer("next", block_ids=[[1]], num_tokens=4)[1]

    def early(self):
        self.runtime.rank.admit_early(self.grant)

    def order(self):
        self.runtime.rank.execute([Admit("r", self.grant)])

    def end(self):
        self.runtime._worker.revoke("r")

    def collect(self):
        self.sent += sorted(self.runtime.rank.collect().sent)

    def sleep(self):
        self.runtime.suspend()

    def wake(self):
        self.runtime.resume()

    def held(self):
        return self.runtime._worker.snapshot().leases


@pytest.fixture
def world():
    world = World()
    yield world
    world.runtime.close()


BOTH_WAYS = sorted(set(itertools.permutations(["early", "order", "early"])))


@pytest.mark.parametrize("ways", BOTH_WAYS, ids="-".join)
def test_a_grant_that_comes_several_times_is_held_and_reported_once(world, ways):
    for way in ways:
        getattr(world, way)()
        assert world.held() == 1
    world.collect()
    assert world.sent == []
    world.end()
    world.collect()
    world.collect()
    assert world.sent == ["r"]


@pytest.mark.parametrize("first", ["early", "order"])
@pytest.mark.parametrize(
    "between", [[], ["collect"], ["sleep"], ["sleep", "wake"], ["sleep", "collect", "wake"]], ids=str
)
def test_a_lease_that_has_ended_is_not_held_again(world, first, between):
    for step in [first, "end", *between]:
        getattr(world, step)()
    for step in ["early", "order", "early"]:
        if step != first or first == "early":
            getattr(world, step)()
    if "wake" not in between and "sleep" in between:
        world.wake()
    assert world.held() == 0
    world.collect()
    world.collect()
    assert world.sent == ["r"]


def test_the_end_of_an_early_lease_is_reported_after_its_order(world):
    """``MultiConnector`` learns with the order's step whether another connector still saves the blocks."""
    for step in ["early", "end", "collect"]:
        getattr(world, step)()
    assert world.sent == []
    world.order()
    world.collect()
    assert world.sent == ["r"]


@pytest.mark.parametrize("slept", [["sleep"], ["sleep", "wake"]], ids="-".join)
@pytest.mark.parametrize("first", ["early", "order"])
def test_a_lease_that_ends_because_the_engine_sleeps_is_reported_once(world, first, slept):
    second = {"early": "order", "order": "early"}[first]
    for step in [first, *slept, second, "collect", "collect"]:
        getattr(world, step)()
    assert world.sent == ["r"]


@pytest.mark.parametrize("ways", [["early", "order"], ["order", "early"]], ids="-".join)
def test_a_grant_that_comes_while_the_engine_sleeps_is_refused_once_and_for_all(world, ways):
    first, second = ways
    world.sleep()
    getattr(world, first)()
    world.wake()
    getattr(world, second)()
    assert world.held() == 0
    world.collect()
    world.collect()
    assert world.sent == ["r"]


def test_what_is_refused_with_the_step_is_not_held_later(world):
    """Its blocks are the engine's again by then."""
    world.runtime.rank.execute([Admit("next", world.next)])  # it takes the only slot
    world.grant = msgspec.structs.replace(world.grant, epoch=str(world.next.epoch_value + 2))
    world.order()
    world.collect()
    assert world.sent == ["r"]
    world.runtime._worker.revoke("next")
    world.early()
    assert world.held() == 0


@pytest.mark.parametrize("way", ["early", "order"])
def test_an_admission_that_was_interrupted_leaves_no_lease_of_blocks_that_are_freed(world, monkeypatch, way):
    worker = world.runtime._worker
    whole = worker.admit

    def interrupted(grant):
        whole(grant)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(world, way)()
    world.order()
    world.collect()
    world.collect()
    assert (world.held(), world.sent) == (0, ["r"])


def test_a_late_message_leaves_the_slot_to_the_next_lease(world):
    world.order()
    world.end()
    world.runtime.rank.admit_early(world.next)
    world.early()
    assert world.held() == 1
    world.runtime.rank.execute([Admit("next", world.next)])
    world.collect()
    assert world.sent == ["r"]
    assert world.runtime.rank.take_tally()["leases"] == {"revoked": 1}


# The scheduler's side.


def offered(producer, request_id="r"):
    request = new_request(OFFER, request_id=request_id)
    producer.on_new_request(request)
    return producer.on_finished(request, ([1, 2, 3],))


def test_a_lease_is_held_before_the_ticket_leaves_the_scheduler():
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    with reachable(rank, apart=False) as contact:
        producer.meet_ranks([rank_address()], [contact])
        keep, params = offered(producer)
        assert (keep, params["do_remote_prefill"]) == (True, True)
        (order,) = producer.take_orders()
        assert rank.told == [order.grant]


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), OSError("a defect")], ids=repr)
def test_a_request_is_on_offer_though_its_rank_could_not_be_told(error):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    rank.error = error
    with reachable(rank, apart=False) as contact:
        producer.meet_ranks([rank_address()], [contact])
        keep, params = offered(producer)
    assert (keep, params["do_remote_prefill"]) == (True, True)
    assert [order.request_id for order in producer.take_orders()] == ["r"]
    assert producer.guard.take() == {}


def test_no_rank_is_told_of_an_offer_that_fails(monkeypatch):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    monkeypatch.setattr("kvflow.integrations.vllm.offering.ticket_params", lambda _: 1 / 0)
    with reachable(rank, apart=False) as contact:
        producer.meet_ranks([rank_address()], [contact])
        assert offered(producer) == (False, None)
    assert rank.told == []
    assert producer.take_orders() == []
    producer.offering.sent("r")  # its slot is free already


def test_a_rank_that_has_gone_or_was_never_here_waits_for_the_step(caplog):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    elsewhere = Contact("another", "ipc:///nowhere/at/all", b"k" * 32)
    with reachable(rank, apart=False) as contact, caplog.at_level("INFO", logger="vllm.kvflow"):
        producer.meet_ranks([rank_address()], [contact, elsewhere, Contact("alone", "", b"k" * 32)])
    assert caplog.text.count("on another host") == 2
    assert offered(producer)[0]
    assert rank.told == []
    assert len(producer.take_orders()) == 1


def test_a_scheduler_that_is_closed_tells_nobody():
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    with reachable(rank, apart=True) as contact:
        producer.meet_ranks([rank_address()], [contact])
        producer.close()
        producer.close()
        assert offered(producer)[0]
    assert rank.told == []


def test_a_key_is_not_printed():
    assert repr(b"k" * 32) not in repr(Contact("name", "ipc:///x", b"k" * 32))


# The socket.


@pytest.fixture
def socket(monkeypatch):
    """A rank, how it is reached, and a scheduler that reaches it as if it were in another process."""
    rank, early = Rank(), EarlyAdmission()
    with reachable(rank, apart=True) as contact:
        monkeypatch.setattr(admission, "_ranks", {})
        early.meet([contact])
        yield rank, contact, early
        early.close()


def send_until_told(rank, early, ticket=TICKET):
    """Send until it has arrived: a connection takes a moment, and nothing is kept for it."""
    for _ in range(int(PATIENCE_S / 0.01)):
        early.admit(ticket)
        if rank.event.wait(0.01):
            rank.event.clear()
            return
    raise AssertionError("nothing has arrived")


def test_a_rank_of_another_process_is_told_over_its_socket(socket):
    rank, contact, early = socket
    folder = Path(contact.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    send_until_told(rank, early)
    assert rank.told[0] == TICKET.grants[0]


def hostile(key):
    text = TICKET.to_params()["kvflow"].encode()
    longer = b"kvf2." + b"A" * (8 << 20)
    signed = {
        "not a ticket": b"hello",
        "not ASCII": "kvf2.ü".encode(),
        "nothing behind the MAC": b"",
        "a ticket that is cut": text[:-40],
        "a grant of nonsense": b"kvf2." + b"A" * 4000,
        "too long a ticket": longer[: MESSAGE_BYTES_MAX - 32],
    }
    return {
        "nothing": b"",
        "less than a MAC": b"x" * 31,
        "another key": message(TICKET, b"k" * 32),
        "a client's ticket": text,
        "a bit flipped": bytes([message(TICKET, key)[0] ^ 1]) + message(TICKET, key)[1:],
        "more than is read": bytes(MESSAGE_BYTES_MAX + 1),
        **{name: hmac.digest(key, each, "sha256") + each for name, each in signed.items()},
    }


@pytest.mark.parametrize("name", hostile(b""))
def test_what_the_scheduler_has_not_signed_is_dropped_and_the_rank_goes_on(socket, name):
    rank, contact, early = socket
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger = 0
        stranger.connect(contact.endpoint)
        for _ in range(3):
            stranger.send(hostile(contact.key)[name])
            stranger.send_multipart([hostile(contact.key)[name], b""])
        honest = new_ticket(request_id=f"after {name}")
        stranger.send(message(honest, contact.key))  # behind them, unless they have ended its connection
        if name == "more than is read":
            send_until_told(rank, early, honest)
        else:
            rank.await_told()
    assert {grant.request_id for grant in rank.told} == {honest.request_id}


def test_a_rank_that_fails_at_one_message_takes_the_next(socket, caplog):
    rank, _, early = socket
    rank.error = RuntimeError("a defect")
    send_until_told(rank, early)
    rank.error = None
    send_until_told(rank, early)
    assert "a defect" in caplog.text


def test_a_socket_is_removed_when_its_rank_ends():
    with reachable(Rank(), apart=True) as contact:
        folder = Path(contact.endpoint.removeprefix("ipc://")).parent
        assert folder.exists()
    assert not folder.exists()


def test_a_rank_without_a_folder_for_its_socket_is_served_by_steps(monkeypatch, tmp_path, caplog):
    deep = tmp_path / ("d" * 120)  # longer than the path of a socket may be
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with reachable(Rank(), apart=True) as contact:
        assert contact.endpoint == ""
    assert list(deep.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with reachable(Rank(), apart=True) as contact:
        assert contact.endpoint == ""
    assert caplog.text.count("no socket for admissions") == 2


def test_a_forked_child_leaves_the_socket_to_its_parent():
    rank = Rank()
    listener = Listener(rank, b"k" * 32)
    child = os.fork()
    if not child:
        listener.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(listener.endpoint.removeprefix("ipc://")).exists()
    listener.close()


RANK_PROCESS = """
import sys
from kvflow.integrations.vllm.admission import reachable

class Rank:
    def admit_early(self, grant):
        print(grant.request_id, flush=True)

with reachable(Rank(), apart=True) as contact:
    print(contact.name, contact.endpoint, contact.key.hex(), flush=True)
    sys.stdin.read()
"""


def test_a_rank_that_is_killed_costs_the_scheduler_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", RANK_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        name, endpoint, key = process.stdout.readline().split()
        early = EarlyAdmission()
        early.meet([Contact(name, endpoint, bytes.fromhex(key))])
        arrived = threading.Event()
        threading.Thread(target=lambda: process.stdout.readline() and arrived.set(), daemon=True).start()
        while not arrived.wait(0.01):
            early.admit(TICKET)
        process.send_signal(signal.SIGSTOP)
        large = new_ticket(num_tokens=16 * 4096, block_ids=(tuple(range(4096)),))
        for _ in range(1000):  # more than its queues keep
            early.admit(large)
        process.kill()
        process.wait()
        for _ in range(1000):
            early.admit(TICKET)
        early.close()
    Path(endpoint.removeprefix("ipc://")).unlink()
    Path(endpoint.removeprefix("ipc://")).parent.rmdir()
