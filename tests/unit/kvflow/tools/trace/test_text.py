"""Sentences about requests: their numbers add up, and no name of a client can change a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.tools.trace.records import Phase, PullTrace, RequestTrace, Routed
from kvflow.tools.trace.text import printable, shown_bytes, shown_ms, title_of
from tests.helpers.loops import looped

SECONDS = {
    "prefill": 0.640,
    "queue": 0.031,
    "handshake": 0.009,
    "bind": 0.0,
    "post": 0.004,
    "wire": 0.020,
    "decode step": 0.108,
}


def request(**fields):
    phases, at = [], 0.0
    for name, seconds in SECONDS.items():
        phases.append(Phase(name, at, seconds))
        at += seconds
    pull = PullTrace(
        worker="decode/0/1",
        local_request_id="",
        start_s=0.64,
        total_s=0.064,
        phases=phases[1:-1],
        nbytes=5_100_000_000,
        nbytes_wanted=0,
        descriptors=312,
        merged=0.0,
        reads=312,
        early=0,
        transport="rc_mlx5",
        plane="nixl",
    )
    router = Routed(prefill_s=0.64, first_bytes_s=0.812, elapsed_s=2.0)
    known = {"request_id": "r", "outcome": "completed", "start_at": 0.0, "total_s": at, "phases": phases}
    known |= {"router": router, "first_token_s": 0.812, "offers": [], "pulls": [pull]}
    return RequestTrace(**known | {"nbytes": pull.nbytes, "reads": 312, "gb_per_s": 212.5} | fields)


def test_the_title_says_where_the_time_went():
    assert title_of(request()) == (
        "first token 812 ms after the request: 640 prefill, 31 queue, 9 handshake, "
        "24 wire (5.1 GB in 312 reads, 212 GB/s), 108 decode step"
    )


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=9))
def test_the_parts_of_a_time_add_up_as_they_are_shown(seconds):
    parts = {str(number): each for number, each in enumerate(seconds)}
    whole, shown = shown_ms(parts, sum(seconds))
    total = sum(float(each or "0") for each in shown.values())
    assert total == pytest.approx(float(whole), abs=1e-6)
    for name, each in parts.items():
        assert float(shown[name] or "0") == pytest.approx(each * 1e3, abs=max(0.0011, sum(seconds) * 10.01))


@looped("hostile", ["\x1b[2J", "a\nb", "\u202egpj", "\x00", "\x9b31m"])
def test_a_name_moves_no_cursor(hostile):
    assert printable(hostile).isprintable()


def test_long_names_are_cut():
    assert printable("x" * 1000, 20) == "x" * 17 + "..."


@looped("nbytes, shown", [(1, "1 B"), (4096, "4.1 kB"), (150_000, "150 kB"), (2e6, "2.0 MB"), (3.21e11, "321 GB")])
def test_sizes(nbytes, shown):
    assert shown_bytes(nbytes) == shown
