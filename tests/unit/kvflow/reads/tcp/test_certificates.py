"""TLS between two workers that know each other's certificate."""

import _ssl
import ctypes
import datetime as dt
import gc
import resource
import socket
import ssl
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509

from kvflow.errors import ConfigInvalid
from kvflow.reads.tcp.certificates import TlsIdentity, draw_identity, is_of
from kvflow.reads.tcp.opening import Rejected, shake

OURS, THEIRS, NOBODYS = draw_identity(), draw_identity(), draw_identity()


def shaken(server: TlsIdentity, client: TlsIdentity, refuses: str = "") -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return both ends after the handshake. ``refuses``: the end that expects another certificate."""
    ends = socket.socketpair()
    contexts = (
        server.context((NOBODYS if refuses == "server" else client).certificate, server=True),
        client.context((NOBODYS if refuses == "client" else server).certificate, server=False),
    )
    wrapped = []
    for end, context, is_server in zip(ends, contexts, (True, False), strict=True):
        end.setblocking(False)
        wrapped.append(context.wrap_socket(end, server_side=is_server, do_handshake_on_connect=False))
    waiting = [*wrapped]
    try:
        while waiting:
            for each in [*waiting]:
                try:
                    each.do_handshake()
                    waiting.remove(each)
                except ssl.SSLWantReadError:
                    pass
    except ssl.SSLError:
        for each in wrapped:
            each.close()
        raise
    return wrapped[0], wrapped[1]


def test_each_side_knows_the_other_by_its_certificate():
    server, client = shaken(OURS, THEIRS)
    with server, client:
        assert is_of(server, THEIRS.certificate)
        assert not is_of(server, NOBODYS.certificate)
        assert is_of(client, OURS.certificate)
        assert server.version() == client.version() == "TLSv1.3"
        client.send(b"request")
        assert server.recv(64) == b"request"


@pytest.mark.parametrize("side", ["server", "client"])
def test_each_side_refuses_another_certificate(side):
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(OURS, THEIRS, refuses=side)


def test_a_handshake_counts_only_with_the_certificate_that_was_stated():
    server, client = shaken(OURS, THEIRS)
    with server, client:
        assert shake(server, THEIRS.certificate) == 0
        with pytest.raises(Rejected, match="another certificate"):
            shake(server, NOBODYS.certificate)


def test_no_session_can_be_resumed():
    server, client = shaken(OURS, THEIRS)
    with server, client:
        server.send(b"after the handshake, when a ticket would come")
        client.recv(64)
        assert client.session is None or not client.session.has_ticket


def test_a_certificate_holds_for_clocks_that_differ_and_for_years():
    certificate = x509.load_der_x509_certificate(OURS.certificate)
    now = dt.datetime.now(dt.UTC)
    assert certificate.not_valid_before_utc < now - dt.timedelta(hours=23)
    assert certificate.not_valid_after_utc > now + dt.timedelta(days=3600)
    assert len(OURS.certificate) < 1024  # as peers accept it
    assert OURS.certificate != THEIRS.certificate


def test_a_key_is_shown_nowhere_and_leaves_no_descriptor():
    def descriptors() -> list[str]:
        return sorted(each.name for each in Path("/proc/self/fd").iterdir())

    before = descriptors()
    OURS.context(THEIRS.certificate, server=True)
    assert descriptors() == before
    assert "PRIVATE KEY" in OURS.key.decode()
    assert "KEY" not in f"{OURS!r} {OURS} {[OURS]}"


def test_encryption_without_its_package_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigInvalid, match="cryptography") as caught:
        draw_identity()
    assert caught.value.remedy == "Install kvflow[tls]."


def _renew_keys(sock: ssl.SSLSocket) -> bool:
    """Ask the other end to renew its keys, too: ``SSL_KEY_UPDATE_REQUESTED``. False: an earlier one waits."""
    library = ctypes.CDLL(_ssl.__file__)
    head = object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)  # PySSLSocket: its head, a weak reference, SSL *
    tls = ctypes.c_void_p.from_address(id(sock._sslobj) + head)
    library.SSL_key_update.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return bool(library.SSL_key_update(tls, 1))


def test_key_updates_without_end_grow_no_memory():
    """The other end's library answers each by itself, into the socket: it keeps nothing when the socket is full."""
    server, client = shaken(OURS, THEIRS)
    page = resource.getpagesize()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    with server, client:
        renewed = stuck = largest = 0
        gc.collect()  # once: it looks at all that the process has, and the loop makes no circles
        began, word = resident(), b"x"
        while stuck < 100:
            stuck += 1
            try:
                if stuck == 1:
                    renewed += _renew_keys(client)
                client.send(word)
                stuck = 0
            except ssl.SSLWantWriteError:
                pass
            try:
                server.recv(64)
                stuck = 0
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            if renewed < 10_000:  # afterwards nobody takes the answers, and both ends get stuck
                with suppress(BlockingIOError):
                    socket.socket.recv(client, 1 << 16)
            if renewed % 64 == 0:
                largest = max(largest, resident() - began)
        assert renewed > 10_000
        assert largest < 4 << 20


def test_a_connection_that_ends_while_it_is_wrapped_leaves_no_socket_open():
    """Python raises then, and has no reference to the socket any more: it would warn of an open one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(OSError, match="reset"):
            THEIRS.context(OURS.certificate, server=False).wrap_socket(ours, do_handshake_on_connect=False)
        assert ours.fileno() == -1
        gc.collect()
