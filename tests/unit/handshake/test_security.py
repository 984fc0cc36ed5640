import hmac
from functools import partial

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from handshake.errors import AddressInvalid
from handshake.intake import Arrivals
from handshake.security import (
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    ClusterSecurity,
    CurveKeys,
    answer_admission,
    answer_request,
    check_bind,
    hkdf,
    host_and_port,
    key_of_request,
    sign,
    verify,
)
from handshake.sockets import running
from tests.helpers.loops import looped
from tests.helpers.waiting import patiently

from .helpers import OTHER_SECURITY, SECURITY

# RFC 5869, appendix A, the cases with SHA-256: secret, salt, info, output.
RFC_5869 = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        (
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
        ),
    ),
    (
        "0b" * 22,
        "",
        "",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.parametrize(("secret", "salt", "info", "output"), RFC_5869)
def test_hkdf_gives_the_vectors_of_rfc_5869(secret, salt, info, output):
    expected = bytes.fromhex(output)
    derived = hkdf(bytes.fromhex(secret), salt=bytes.fromhex(salt), info=bytes.fromhex(info), nbytes=len(expected))
    assert derived == expected


def test_one_secret_gives_four_keys_that_are_always_the_same():
    again = ClusterSecurity.from_secret("a secret of the tests")
    assert again == SECURITY
    derived = (SECURITY.ticket_key, SECURITY.content_key)
    assert len({SECURITY.server.private, SECURITY.client.private, *map(z85.encode, derived)}) == 4
    assert {len(key) for key in derived} == {32}
    for keys in (SECURITY.server, SECURITY.client):
        assert keys.public == zmq.curve_public(keys.private)


def test_the_derivation_never_changes():
    """Workers of two releases share a cluster, so a change here needs a new label."""
    derived = ClusterSecurity.from_secret("0123456789abcdef")
    assert derived.server.public == b"UB3Z%hfUQ2-$*z5bGsAkrxH]4:[3Tl1?$.-wnKIC"
    assert derived.client.public == b"dWiF]o]>nq7k]&+kUtB+0dmZa@<Q&G!lZW(FB8q:"
    assert derived.ticket_key.hex() == "0746f0d77ba406c5825fa0df3cab4fd19c0c3eb2007eb65df7cb1bf1d2e4ea30"
    assert derived.content_key == hkdf(
        b"0123456789abcdef", salt=b"handshake cluster secret v1", info=b"content", nbytes=32
    )
    assert derived.fingerprint == z85.decode(derived.server.public)[:8]


@given(st.text(min_size=16))
def test_every_long_string_is_a_secret(secret):
    assert ClusterSecurity.from_secret(secret) != SECURITY


def test_a_secret_may_come_from_an_environment_that_is_not_utf8():
    assert ClusterSecurity.from_secret("sixteen bytes \udcff\udcfe").ticket_key


@pytest.mark.parametrize("secret", ["", "fifteen letters"])
def test_a_short_secret_is_refused_without_repeating_it(secret):
    with pytest.raises(AddressInvalid) as caught:
        ClusterSecurity.from_secret(secret)
    assert "at least 16" in str(caught.value)
    assert "fifteen" not in str(caught.value)


def test_no_repr_shows_a_secret():
    shown = repr(SECURITY) + str(SECURITY) + f"{SECURITY.server} {SECURITY.client!r}"
    assert SECURITY.server.public.decode() in shown
    for secret in (SECURITY.server.private, SECURITY.client.private):
        assert secret.decode() not in shown
    for key in (SECURITY.ticket_key, SECURITY.content_key):
        assert key.hex() not in shown
        assert repr(key) not in shown


def test_a_signature_holds_for_its_data_and_key_only():
    signature = sign(SECURITY.ticket_key, b"data")
    assert len(signature) == 32
    assert verify(SECURITY.ticket_key, b"data", signature)
    assert not verify(SECURITY.ticket_key, b"date", signature)
    assert not verify(OTHER_SECURITY.ticket_key, b"data", signature)
    assert not verify(SECURITY.ticket_key, b"data", signature[:-1])
    assert not verify(SECURITY.ticket_key, b"data", b"")


@looped("length", [0, 1, 32, 63, 64, 65, 200])
def test_a_signature_is_the_hmac_of_any_key_every_time(length):
    key = bytes(range(length))
    for data in (b"", b"data", bytes(5000), b"data"):
        assert sign(key, data) == hmac.digest(key, data, "sha256")


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://127.1.2.3:5600", "tcp://localhost:*", "tcp://[::1]:5600"])
def test_a_loopback_address_needs_no_security(bind):
    check_bind(bind, None)


@looped("bind", ["tcp://0.0.0.0:0", "tcp://*:5600", "tcp://eth0:5600", "tcp://10.0.0.1:5600", "tcp://[::]:5600"])
def test_any_other_address_needs_security_or_a_word(bind):
    check_bind(bind, SECURITY)
    check_bind(bind, None, insecure_allowed=True)
    with pytest.raises(AddressInvalid, match="without a cluster secret"):
        check_bind(bind, None)


@looped(
    "bind",
    ["", "127.0.0.1:5600", "tcp://127.0.0.1", "tcp://127.0.0.1:65536", "tcp://:1", "ipc:///tmp/x", "tcp://::1:5"],
)
def test_a_malformed_address_is_refused(bind):
    with pytest.raises(AddressInvalid, match="not an address"):
        check_bind(bind, SECURITY)
    with pytest.raises(AddressInvalid, match="not an address"):
        host_and_port(bind)


KEY = SECURITY.client.public_key
REQUEST = [b"1.0", b"7", ZAP_DOMAIN, b"127.0.0.1", b"", b"CURVE", bytes.fromhex(KEY)]


def test_who_is_admitted_is_named_in_every_message_of_its_connection():
    assert key_of_request(REQUEST) == KEY
    assert answer_request(REQUEST, KEY) == [b"1.0", b"7", b"200", b"", KEY.encode(), b""]


@looped(
    "request_",
    [
        [],
        REQUEST[:6],
        [*REQUEST, b""],
        [*REQUEST[:6], b""],
        [*REQUEST[:5], b"NULL", bytes.fromhex(KEY)],
        [*REQUEST[:2], b"another domain", *REQUEST[3:]],
    ],
)
def test_a_request_without_a_key_is_turned_away(request_):
    assert key_of_request(request_) is None
    assert answer_request(request_, None)[2] == b"400"


async def test_each_client_that_asks_is_answered_until_nobody_listens():
    context = zmq.asyncio.Context()
    try:
        replier, asker = context.socket(zmq.REP, zmq.Socket), context.socket(zmq.REQ)
        replier.bind(ZAP_ENDPOINT)
        asker.connect(ZAP_ENDPOINT)
        async with running(Arrivals(replier).run(partial(answer_admission, replier, SECURITY.admits))):
            await asker.send_multipart(REQUEST)
            assert (await patiently(asker.recv_multipart()))[2] == b"200"
            for denied in ([b"1.0", b"8"], [*REQUEST[:6], bytes.fromhex(OTHER_SECURITY.client.public_key)]):
                await asker.send_multipart(denied)
                assert (await patiently(asker.recv_multipart()))[1:3] == [denied[1], b"400"]
    finally:
        context.destroy(linger=0)


def test_a_key_pair_is_completed_from_its_private_half():
    public, private = zmq.curve_keypair()
    assert CurveKeys.from_private(z85.decode(private)) == CurveKeys(public=public, private=private)
