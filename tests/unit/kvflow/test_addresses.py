"""Addresses are host and port, or nothing."""

import pytest

from kvflow.addresses import AddressMalformed, host_and_port
from tests.helpers.loops import looped


@looped(
    "address, expected",
    [
        ("prefill-0:7000", ("prefill-0", 7000)),
        ("tcp://10.0.0.5:0", ("10.0.0.5", 0)),
        ("tcp://[fe80::1]:7000", ("[fe80::1]", 7000)),
        ("*:65535", ("*", 65535)),
        ("host:00080", ("host", 80)),
    ],
)
def test_an_address_is_divided(address, expected):
    assert host_and_port(address) == expected


@looped(
    "address",
    [
        "",
        "host",
        ":7000",
        "host:",
        "host:-1",
        "host:٣",
        "host: 1",
        "host:1_0",
        "tcp://:1",
        "host:65536",
        f"host:{'9' * 9999}",
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(AddressMalformed, match="is not HOST:PORT with a port from 0 to 65535"):
        host_and_port(address)


def test_port_zero_is_no_port_to_dial():
    with pytest.raises(AddressMalformed, match="a port from 1 to 65535"):
        host_and_port("tcp://host:0", port_min=1)
