"""Addresses are host and port, or nothing."""

import pytest

from kvflow.addresses import host_and_port


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("prefill-0:7000", ("prefill-0", 7000)),
        ("tcp://10.0.0.5:0", ("10.0.0.5", 0)),
        ("tcp://[fe80::1]:7000", ("[fe80::1]", 7000)),
        ("*:70000", ("*", 70000)),
    ],
)
def test_an_address_is_divided(address, expected):
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address", ["", "host", ":7000", "host:", "host:-1", "host:٣", "host: 1", "host:1_0", "tcp://:1"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        host_and_port(address)
