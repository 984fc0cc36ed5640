"""Who gets in, and who does not: both sides of an opening over real sockets."""

import errno
import hashlib
import re
import select
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvflow.config import TcpSettings
from kvflow.errors import TransportUnavailable
from kvflow.ids import Credentials, ReaderId, pass_of
from kvflow.reads.contract import Serving
from kvflow.reads.tcp import access, opening
from kvflow.reads.tcp.access import Access, Accounts, Entrant
from kvflow.reads.tcp.certificates import TlsIdentity, draw_identity
from kvflow.reads.tcp.opening import Opening, Rejected, introduction
from kvflow.reads.tcp.stream import ChannelClosed, Stream
from tests.helpers.waiting import wait_until

PASS_KEY = bytes(range(32))
KEY, OTHER_KEY = "ab" * 32, "cd" * 32
IN_TIME_S = 60.0
HERD_S = 300.0  # 256 readers over TLS take 3 s of processor time, of which a busy host may give a hundredth

OURS, THEIRS, NOBODYS = draw_identity(), draw_identity(), draw_identity()
"""Certificates of the exporter, of its readers, and of someone else."""

BOTH_WAYS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


class Exporter:
    """An entrance that keeps whom it has let in."""

    def __init__(
        self, *, tls: bool, keys_differ: bool = False, admits: Callable[[str], bool] = lambda _key: True
    ) -> None:
        anywhere = "tcp://127.0.0.1:0"
        settings = TcpSettings(bind=anywhere, advertise=anywhere, connections=2, encryption="tls" if tls else "off")
        serving = Serving((), lambda _slot, _epoch: None, admits, PASS_KEY, keys_differ=keys_differ)
        self.tls = tls
        self.members: list[Entrant] = []
        self._changed = threading.Condition()
        self.access = Access(settings, serving, OURS if tls else None, self._admit)
        self.place = ("127.0.0.1", int(self.access.endpoint.rpartition(":")[2]))
        self.access.start()

    def _admit(self, member: Entrant) -> None:
        with self._changed:
            self.members.append(member)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something has come in."""
        with self._changed:
            assert self._changed.wait_for(until, IN_TIME_S)

    def credentials(self, name: str = "decode-0", key: str = KEY, *, identity: TlsIdentity = THEIRS) -> Credentials:
        """Return what a reader has got over the control channel."""
        mine, producers = (identity.certificate, OURS.certificate) if self.tls else (b"", b"")
        who = (key, name, 0, "ef" * 16)
        return Credentials(*who, pass_of(PASS_KEY, *who, certificate=mine), producers)

    def reader(
        self,
        who: Credentials | None = None,
        *,
        at: tuple[str, int] | None = None,
        within_s: float = IN_TIME_S,
        identity: TlsIdentity = THEIRS,
    ) -> Opening:
        """Begin to open a connection, ``at`` another place."""
        said = introduction(who or self.credentials(), identity if self.tls else None)
        return Opening(at or self.place, said, time.monotonic() + within_s)

    def stranger(self, words: bytes = b"") -> socket.socket:
        """Connect without a pass."""
        sock = socket.create_connection(self.place, IN_TIME_S)
        sock.sendall(words)
        return sock

    def close(self) -> None:
        """Close everything."""
        self.access.close()
        for member in self.members:
            member.account.leave()
            member.stream.close()


@contextmanager
def exporting(
    *, tls: bool, keys_differ: bool = False, admits: Callable[[str], bool] = lambda _key: True
) -> Iterator[Exporter]:
    exporter = Exporter(tls=tls, keys_differ=keys_differ, admits=admits)
    with closing(exporter):
        yield exporter


def opened(*openings: Opening) -> list[Stream]:
    """Advance openings as a read thread does, until all are open; raise what one of them raises."""
    with select.epoll() as epoll, ExitStack() as stack:
        waiting = {each.fileno(): stack.enter_context(closing(each)) for each in openings}
        streams: dict[int, Stream] = {}
        for descriptor in waiting:
            epoll.register(descriptor, select.EPOLLIN)
        ready = set(waiting)
        while len(streams) < len(openings):
            for descriptor in ready - set(streams):
                if (stream := waiting[descriptor].advance()) is not None:
                    streams[descriptor] = stream
            due = min((waiting[each].due for each in waiting if each not in streams), default=0.0)
            ready = {descriptor for descriptor, _ in epoll.poll(max(0.0, due - time.monotonic()))}
            ready |= {each for each in waiting if waiting[each].due <= time.monotonic()}
        return [streams[each.fileno()] for each in openings]


def read(stream: Stream, nbytes: int) -> bytes:
    """Read from a stream."""
    content = bytearray(nbytes)
    done = 0
    while done < nbytes:
        done += stream.read(memoryview(content)[done:])
        select.select([stream], [], [], 0.01)
    return bytes(content)


@contextmanager
def forwarding(
    to: tuple[str, int], *, at_once: int = 65536, first: Iterable[Callable[[socket.socket], None]] = ()
) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """Forward one connection; treat others ``first``. Yield where to dial, and what the dialing side has said."""
    recorded = bytearray()

    def forward(listener: socket.socket) -> None:
        for treat in first:
            sock, _ = listener.accept()
            with sock:
                treat(sock)
        sock, _ = listener.accept()
        with sock, socket.create_connection(to) as onward:
            onward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                for each in select.select([sock, onward], [], [], IN_TIME_S)[0]:
                    content = _received(each, at_once)
                    if not content:
                        return
                    (onward if each is sock else sock).sendall(content)
                    if each is sock:
                        recorded.extend(content)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=forward, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname(), recorded
        thread.join(IN_TIME_S)
        assert not thread.is_alive()


def _received(sock: socket.socket, nbytes: int = 4096) -> bytes:
    try:
        return sock.recv(nbytes)
    except ConnectionError:
        return b""


@BOTH_WAYS
def test_a_reader_gets_in_and_both_ends_have_a_stream(tls):
    with exporting(tls=tls) as exporter:
        [stream] = opened(exporter.reader())
        exporter.wait(lambda: len(exporter.members) == 1)
        member = exporter.members[0]
        assert str(member.who) == "decode-0/0/" + "ef" * 16
        assert (member.who.public_key, bool(member.who.certificate)) == (KEY, tls)
        stream.write(b"a request")
        assert read(member.stream, 9) == b"a request"
        member.stream.write(b"an answer")
        assert read(stream, 9) == b"an answer"
        stream.close()


@BOTH_WAYS
@pytest.mark.parametrize("number", [64, 256])
def test_readers_that_arrive_together_all_get_in(tls, number):
    with exporting(tls=tls) as exporter:
        readers = [exporter.reader(exporter.credentials(f"decode-{each}"), within_s=HERD_S) for each in range(number)]
        streams = opened(*readers)
        exporter.wait(lambda: len(exporter.members) == number)
        assert len({str(member.who) for member in exporter.members}) == number
        for stream in streams:
            stream.close()


@BOTH_WAYS
@pytest.mark.parametrize("wrong", ["pass", "name", "key", "certificate"])
def test_a_wrong_pass_is_refused_at_once_and_for_good(tls, wrong):
    with exporting(tls=tls) as exporter:
        who = exporter.credentials()
        changed = {
            "pass": {"pass_": bytes(32)},
            "name": {"engine_id": "decode-1"},
            "key": {"public_key": OTHER_KEY},
            "certificate": {"pass_": exporter.credentials(identity=NOBODYS).pass_ if tls else bytes(32)},
        }[wrong]
        fields = {name: getattr(who, name) for name in who.__struct_fields__}
        with pytest.raises(Rejected, match="does not accept our pass"):
            opened(exporter.reader(Credentials(**fields | changed)))
        assert exporter.members == []


@BOTH_WAYS
@pytest.mark.parametrize("said", ["another name", "the same name", "no reader"])
def test_a_pass_is_good_for_one_identity_only(tls, said):
    """The proof is right; what follows it is, or is not, what the pass is made for."""
    with exporting(tls=tls) as exporter, exporter.stranger() as sock:
        who = exporter.credentials()
        mine = THEIRS.certificate if tls else b""
        own = msgspec.msgpack.encode(ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, mine))
        other = msgspec.msgpack.encode(ReaderId(OTHER_KEY, "decode-9", who.rank, who.incarnation, mine))
        follows = {"another name": other, "the same name": own, "no reader": b"\xc1"}[said]
        greeting = sock.recv(opening.GREETING_BYTES, socket.MSG_WAITALL)
        nonces = greeting[len(opening.MAGIC) :], bytes(32)
        proof = opening.proof_of(who.pass_, "reader", nonces, OURS.certificate if tls else b"")
        hello = opening._HELLO.pack(nonces[1], hashlib.sha256(own).digest(), proof, len(follows))
        sock.sendall(hello + follows)
        if said != "the same name":
            assert _received(sock, 32) == opening.REJECTION
        elif not tls:
            assert _received(sock, 32) == opening.proof_of(who.pass_, "exporter", nonces, b"")
        exporter.access.close()
        assert len(exporter.members) == (said == "the same name" and not tls)


@BOTH_WAYS
def test_a_key_that_is_not_allowed_any_longer_is_refused(tls):
    with exporting(tls=tls, admits=lambda key: key != KEY) as exporter:
        with pytest.raises(Rejected):
            opened(exporter.reader())
        [stream] = opened(exporter.reader(exporter.credentials(key=OTHER_KEY)))
        stream.close()


@contextmanager
def greeted_by_another():
    """Yield a reader, and the socket of who has greeted it in place of its producer."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        exporting(tls=False) as exporter,
        closing(exporter.reader(at=listener.getsockname())) as reader,
    ):
        reader.advance()
        sock, _ = listener.accept()
        with sock:
            sock.sendall(opening.MAGIC + bytes(32))
            yield reader, sock
            with pytest.raises(Rejected, match="not proven"):
                opened(reader)


def test_an_exporter_without_the_pass_key_is_no_producer():
    """It greets, and can then only answer with a proof of its own."""
    with greeted_by_another() as (_, sock):
        sock.sendall(b"x" * 32)


def test_who_sends_a_proof_back_is_no_producer():
    """The proofs of both sides are of one pass and the same nonces."""
    with greeted_by_another() as (reader, sock):
        while reader.advance() is None and not select.select([sock], [], [], 0.01)[0]:
            pass
        hello = opening.decode_hello(sock.recv(opening.HELLO_BYTES, socket.MSG_WAITALL))
        sock.sendall(hello.proof)


def test_a_reader_with_a_stolen_pass_and_another_key_stays_out():
    """Whoever has read a pass has not the private key."""
    with exporting(tls=True) as exporter:
        thief = TlsIdentity(THEIRS.certificate, NOBODYS.key)
        with pytest.raises(ChannelClosed):
            opened(exporter.reader(within_s=1.0, identity=thief))
        exporter.access.close()
        assert exporter.members == []
        assert exporter.access.accounts.count == 0


class Mistaken(TlsIdentity):
    """Expects another certificate of the producer than it has stated."""

    def context(self, theirs: bytes, *, server: bool) -> ssl.SSLContext:
        return super().context(NOBODYS.certificate, server=server)


def test_a_reader_refuses_a_producer_with_another_certificate():
    with exporting(tls=True) as exporter:
        with pytest.raises(Rejected, match="another certificate"):
            opened(exporter.reader(identity=Mistaken(*THEIRS)))
        assert exporter.members == []


@BOTH_WAYS
def test_a_recorded_opening_does_not_get_in_again(tls):
    with exporting(tls=tls) as exporter:
        with forwarding(exporter.place) as (place, recorded):
            [stream] = opened(exporter.reader(at=place))
            exporter.wait(lambda: len(exporter.members) == 1)
            stream.close()
        with exporter.stranger(bytes(recorded)) as sock:
            said = b""
            while part := _received(sock):
                said += part
        assert said[opening.GREETING_BYTES :] in (opening.REJECTION, b"")
        assert len(exporter.members) == 1


@BOTH_WAYS
@pytest.mark.parametrize(
    "words", [b"", b"kvft", b"kvftcp02", b"kvftcp02" + bytes(50)], ids=["silent", "part", "ours", "half"]
)
def test_strangers_in_all_places_keep_no_reader_out(tls, words, monkeypatch):
    monkeypatch.setattr(access, "PLACES_MAX", 4)
    with exporting(tls=tls) as exporter, ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(exporter.stranger(words))
        [stream] = opened(exporter.reader())
        assert len(exporter.access._places) <= 4
        stream.close()


@pytest.mark.parametrize("trouble", ["too many files", "too many at once"])
def test_the_door_opens_again_after_a_burst_though_nobody_is_opening(trouble, monkeypatch):
    """It does not watch the listener meanwhile, and nothing else would wake it."""
    with exporting(tls=False) as exporter:
        door, turned_away = exporter.access, threading.Event()

        class Listener:
            """The listener, which has no file left for one connection."""

            def __init__(self, listener: socket.socket) -> None:
                self.fileno = listener.fileno

            def accept(self) -> tuple[socket.socket, object]:
                door._listener = listener
                turned_away.set()
                raise OSError(errno.EMFILE, "Too many open files")

        def refuse(_tokens: float, _now: float) -> bool:
            monkeypatch.undo()
            turned_away.set()
            return False

        listener = door._listener
        if trouble == "too many files":
            monkeypatch.setattr(access, "_SPOKEN_EVERY_S", 0.05)
            door._listener = Listener(listener)
        else:
            monkeypatch.setattr(door._accepted, "take", refuse)
        reader = exporter.reader()
        with closing(reader):
            reader.advance()
            assert turned_away.wait(IN_TIME_S)
            assert door._places == {}
            [stream] = opened(reader)
        stream.close()


@BOTH_WAYS
def test_a_stranger_pushes_out_nobody_who_is_opening(tls, monkeypatch):
    monkeypatch.setattr(access, "PLACES_MAX", 2)
    monkeypatch.setattr(access, "YOUNG_S_MAX", IN_TIME_S)
    monkeypatch.setattr(access, "STRANGER_S_MAX", IN_TIME_S)
    with exporting(tls=tls) as exporter, ExitStack() as stack:
        reader = exporter.reader()
        with closing(reader):
            stream = reader.advance()
            for _ in range(32):
                stack.enter_context(exporter.stranger())
            if stream is None:
                [stream] = opened(reader)
            assert reader._failures == 0  # it was dialed once
        stream.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the door's clock, and returns a function that moves it on."""
    now = [1000.0]

    def move(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return move


@pytest.mark.parametrize("step", ["nothing", "its proof", "who it is"])
def test_who_opens_has_its_time_from_the_first_moment_and_no_more(step, clock):
    """What it says meanwhile buys none. The door looks each tenth of a second, without a word of anybody."""
    with exporting(tls=True) as exporter, exporter.stranger() as sock:
        greeting = sock.recv(opening.GREETING_BYTES, socket.MSG_WAITALL)
        wait_until(lambda: exporter.access._places)
        (place,) = exporter.access._places.values()
        clock(access.STRANGER_S_MAX * 0.9)
        if step != "nothing":
            who = exporter.credentials()
            reader = msgspec.msgpack.encode(
                ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, THEIRS.certificate)
            )
            nonces = greeting[len(opening.MAGIC) :], bytes(32)
            proof = opening.proof_of(who.pass_, "reader", nonces, OURS.certificate)
            hello = opening._HELLO.pack(nonces[1], hashlib.sha256(reader).digest(), proof, len(reader))
            sock.sendall(hello + (reader if step == "who it is" else b""))
            wait_until(lambda: place.account is not None if step == "who it is" else place.hello is not None)
            clock(access.OPENING_S_MAX - access.STRANGER_S_MAX)
        sock.settimeout(3 * access._TICK_S)
        with pytest.raises(TimeoutError):  # the door looks meanwhile
            sock.recv(1)
        clock(access.STRANGER_S_MAX * 0.2)
        sock.settimeout(IN_TIME_S)
        assert _received(sock) == b""
        wait_until(lambda: not exporter.access._places and not exporter.access.accounts.count)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01", b"kvftcp01"])
@BOTH_WAYS
def test_a_stranger_that_speaks_something_else_is_closed(tls, content):
    with exporting(tls=tls) as exporter, exporter.stranger(content) as sock:
        while _received(sock):
            pass
        assert exporter.members == []


@BOTH_WAYS
def test_bytes_may_arrive_one_by_one(tls):
    with exporting(tls=tls) as exporter, forwarding(exporter.place, at_once=1) as (place, _):
        [stream] = opened(exporter.reader(at=place))
        stream.close()


@BOTH_WAYS
def test_a_connection_that_ends_before_the_welcome_is_dialed_again(tls):
    dialed: list[str] = []

    def reset(sock: socket.socket) -> None:
        dialed.append("reset")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def greet(sock: socket.socket) -> None:
        dialed.append("greeted")
        sock.sendall(opening.MAGIC + bytes(32))

    treated = (lambda _sock: dialed.append("closed"), reset, greet)
    with exporting(tls=tls) as exporter, forwarding(exporter.place, first=treated) as (place, _):
        [stream] = opened(exporter.reader(at=place))
        assert dialed == ["closed", "reset", "greeted"]
        stream.close()


def test_an_exporter_that_never_answers_is_given_up_at_the_deadline():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, exporting(tls=False) as exporter:
        reader = exporter.reader(at=listener.getsockname(), within_s=0.3)
        with pytest.raises(ChannelClosed, match="did not open in time: the other side does not answer"):
            opened(reader)
        assert not reader.late


def test_an_opening_that_has_heard_its_news_sleeps_until_there_is_more():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, exporting(tls=False) as exporter:
        reader = exporter.reader(at=listener.getsockname())
        with closing(reader), select.epoll() as epoll:
            reader.advance()
            epoll.register(reader.fileno(), select.EPOLLIN)
            sock, _ = listener.accept()
            with sock:
                assert epoll.poll(IN_TIME_S), "it is connected"
                assert reader.advance() is None
                assert not epoll.poll(0)
                sock.sendall(opening.MAGIC)
                assert epoll.poll(IN_TIME_S)
                assert reader.advance() is None
                assert not epoll.poll(0)


def test_an_address_at_which_nobody_listens_is_given_up_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = listener.getsockname()
    with exporting(tls=False) as exporter, pytest.raises(ChannelClosed, match="nobody listens"):
        opened(exporter.reader(at=place))


def test_a_producer_that_states_no_certificate_is_not_dialed():
    with exporting(tls=True) as exporter:
        who = exporter.credentials()
        fields = {name: getattr(who, name) for name in who.__struct_fields__} | {"certificate": b"none"}
        with pytest.raises(Rejected, match="certificate"):
            exporter.reader(Credentials(**fields))


def test_an_address_that_is_taken_is_named():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        bind = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        settings = TcpSettings(bind=bind, advertise=bind, connections=1, encryption="off")
        serving = Serving((), lambda _slot, _epoch: None, lambda _key: True, PASS_KEY)
        with pytest.raises(TransportUnavailable, match="cannot listen"):
            Access(settings, serving, None, lambda _member: None)


# --- accounts ---


@contextmanager
def connections(accounts: Accounts, keys: str) -> Iterator[list[tuple[access.Account, socket.socket]]]:
    """Enter one connection for each letter; each with the other end of its socket."""
    with ExitStack() as stack:
        found = []
        for key in keys:
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            theirs.setblocking(False)
            account = accounts.enter(key, ours)
            assert account is not None
            found.append((account, theirs))
        yield found


def is_ended(end: socket.socket) -> bool:
    """Return whether the connection has been shut down."""
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_key_with_too_many_connections_loses_its_own(monkeypatch):
    monkeypatch.setattr(access, "CONNECTIONS_OF_ONE_MAX", 2)
    accounts = Accounts()
    with connections(accounts, "baa") as [(other, at_other), (first, at_first), (second, at_second)]:
        for account, at in ((other, 0.0), (first, 2.0), (second, 1.0)):
            account.used_at = at
        with connections(accounts, "a"):
            assert [is_ended(each) for each in (at_other, at_first, at_second)] == [False, False, True]
            assert accounts.count == 3


def test_when_all_connections_are_taken_a_key_pays_for_itself(monkeypatch):
    monkeypatch.setattr(access, "CONNECTIONS_MAX", 3)
    accounts = Accounts()
    with connections(accounts, "aab") as [(first, at_first), (_, at_second), (_, at_other)], ExitStack() as stack:
        ours, _ = (stack.enter_context(each) for each in socket.socketpair())
        assert accounts.enter("new", ours) is None
        first.touch()
        with connections(accounts, "a"):
            assert [is_ended(each) for each in (at_first, at_second, at_other)] == [False, True, False]
        assert accounts.count == 3
        first.leave()
        first.leave()
        assert accounts.count == 2
        assert accounts.enter("new", ours) is not None


def test_half_requests_of_one_key_end_its_largest_connection(monkeypatch):
    monkeypatch.setattr(access, "BUFFERED_OF_ONE_MAX", 100)
    accounts = Accounts()
    with connections(accounts, "aab") as [(small, at_small), (large, at_large), (other, at_other)]:
        assert other.grow(100)
        assert large.grow(60)
        assert small.grow(40)
        assert small.grow(1)  # above the bound; another connection ends for it
        assert [is_ended(each) for each in (at_small, at_large, at_other)] == [False, True, False]
        assert not large.grow(1)
        assert accounts.buffered == 141
        assert not small.grow(60)  # it is the largest itself
        assert accounts.buffered == 100
        other.grow(-30)
        assert accounts.buffered == 70
        other.leave()
        assert (accounts.buffered, accounts.count) == (0, 0)
        assert not accounts._of_key, "keys that have left are kept"
        assert not accounts._buffered


def test_half_requests_of_all_end_the_largest_of_the_largest_key(monkeypatch):
    monkeypatch.setattr(access, "BUFFERED_BYTES_MAX", 100)
    accounts = Accounts()
    with connections(accounts, "aaab") as [*many, (honest, at_honest)]:
        for account, _ in many:
            assert account.grow(30)
        assert honest.grow(20)
        assert not is_ended(at_honest)
        assert [is_ended(each) for _, each in many].count(True) == 1
        assert accounts.buffered == 80


@pytest.mark.parametrize("keys_differ", [False, True])
def test_readers_with_their_own_keys_are_counted_by_key(keys_differ, monkeypatch):
    monkeypatch.setattr(access, "CONNECTIONS_OF_ONE_MAX", 2)
    with exporting(tls=False, keys_differ=keys_differ) as exporter:
        [honest] = opened(exporter.reader(exporter.credentials("decode-0", OTHER_KEY)))
        names = opened(*[exporter.reader(exporter.credentials(f"decode-{each}")) for each in range(6)])
        exporter.wait(lambda: len(exporter.members) == 7)
        assert exporter.access.accounts.count == (3 if keys_differ else 7)
        for stream in (honest, *names):
            stream.close()


@pytest.mark.parametrize("keys_differ", [False, True], ids=["one key for all", "own keys"])
def test_a_reader_opens_only_so_many_connections_in_a_second_others_go_on(keys_differ, monkeypatch):
    """Readers are told apart by key if each has its own, and else by the identity that their pass proves."""
    monkeypatch.setattr(access, "OPENED_AT_ONCE", 256)
    monkeypatch.setattr(access, "OPENED_PER_S", 0)
    with exporting(tls=False, keys_differ=keys_differ) as exporter, ExitStack() as stack:
        greedy = exporter.credentials("decode-0")
        for stream in opened(*[exporter.reader(greedy) for _ in range(256)]):
            stack.callback(stream.close)
        with pytest.raises(ChannelClosed, match="did not open in time"):
            opened(exporter.reader(greedy, within_s=0.5))
        another_name = exporter.credentials("decode-1")
        if keys_differ:
            with pytest.raises(ChannelClosed, match="did not open in time"):
                opened(exporter.reader(another_name, within_s=0.5))
            another_name = exporter.credentials("decode-1", OTHER_KEY)
        [stream] = opened(exporter.reader(another_name))
        stack.callback(stream.close)
        exporter.wait(lambda: len(exporter.members) == 257)


def test_an_opening_that_fails_is_dialed_later_and_later(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(opening, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dialed: list[float] = []
    reader = Opening(("127.0.0.1", 9), lambda _sock: iter(()), now[0] + 5.0)

    def dial() -> Iterator[None]:
        dialed.append(now[0])
        yield
        raise ChannelClosed("it has no place")

    reader._dial = dial
    with closing(reader):
        while now[0] < 1005.0:
            assert reader.advance() is None
            if reader._attempt is not None:
                assert reader.due == 1005.0, "until the other side speaks, only its deadline wakes it"
                continue
            assert now[0] < reader.due <= 1005.0
            dials, now[0] = len(dialed), (now[0] + reader.due) / 2
            assert reader.advance() is None
            assert len(dialed) == dials, "it was dialed before its pause was over"
            now[0] = reader.due
        with pytest.raises(ChannelClosed, match="did not open in time: it has no place"):
            reader.advance()
    assert now[0] == 1005.0
    pauses = [later - earlier for earlier, later in pairwise(dialed)]
    wanted = [0.05, 0.1, 0.2, 0.4] + [0.5] * len(pauses)
    assert all(0.5 * most <= pause <= 1.5 * most for pause, most in zip(pauses, wanted, strict=False)), pauses


def test_keys_of_readers_that_restarted_are_forgotten(monkeypatch):
    monkeypatch.setattr(access, "CONNECTIONS_MAX", 4)
    with exporting(tls=False) as exporter:
        for number in range(9):
            [stream] = opened(exporter.reader(exporter.credentials(key=f"{number:064x}")))
            exporter.wait(lambda met=number: len(exporter.members) > met)
            exporter.members[-1].account.leave()
            stream.close()
            assert len(exporter.access._opened) == min(number + 1, 4), "a few are forgotten, and not all"


def test_closing_ends_what_is_opening_and_keeps_who_is_in():
    with exporting(tls=False) as exporter, exporter.stranger(b"kvftcp02") as sock:
        [stream] = opened(exporter.reader())
        exporter.wait(lambda: len(exporter.members) == 1)
        exporter.access.close()
        exporter.access.close()
        while _received(sock):
            pass
        stream.write(b"still in")
        assert read(exporter.members[0].stream, 8) == b"still in"
        stream.close()


def test_a_reader_that_goes_while_it_is_answered_ends_no_process():
    """An embedding process may have SIGPIPE again, which Python ignores: the thread that makes handshakes blocks it."""
    with exporting(tls=True) as exporter:
        [stream] = opened(exporter.reader())
        stream.close()
        status = Path(f"/proc/self/task/{exporter.access._thread.native_id}/status").read_text()
        blocked = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16)
        assert blocked >> (signal.SIGPIPE - 1) & 1
