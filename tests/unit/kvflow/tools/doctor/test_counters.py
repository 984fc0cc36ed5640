"""What a server serves as metrics is text from outside: whatever it holds, counters are read or skipped."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.tools.doctor.hops import KEYS_MAX, NUMBER_MAX, SERIES_MAX, read_counters

LINES = [
    "# TYPE vllm:kvflow_failed_transfers_total counter",
    'vllm:kvflow_failed_transfers_total{engine="0",code="stale_lease"} 2.0',
    'vllm:kvflow_failed_transfers_total{engine="1",code="stale_lease"} 1.0',
    'vllm:kvflow_failed_transfers_total{engine="0",code="peer_lost"} 4.0',
    'vllm:request_success_total{engine="0",finished_reason="stop"} 3.0',
    'vllm:request_success_total{engine="0",finished_reason="length"} 4.0',
    'vllm:kvflow_transfer_bytes_bucket{le="1.0"} 9.0',
]


def test_engines_of_a_server_are_added_up_and_labels_kept_apart():
    counted = read_counters("\n".join(LINES))
    assert (counted.of("failed", "stale_lease"), counted.of("failed", "peer_lost")) == (3.0, 4.0)
    assert (counted.all("failed"), counted.of("requests")) == (7.0, 7.0)
    assert counted.keys("failed") == ["peer_lost", "stale_lease"]
    assert (counted.vllm, counted.kvflow) == (True, True)


def test_a_connector_that_has_counted_nothing_is_seen():
    counted = read_counters("\n".join(LINES[:1]))
    assert counted.kvflow
    assert not counted.numbers
    assert not read_counters("\n".join(LINES[4:6])).kvflow


def test_growth_is_told_from_a_restart():
    before, after = read_counters("\n".join(LINES[:4])), read_counters("\n".join(LINES))
    assert after.since(before).numbers[("requests", "")] == 7.0
    assert not after.since(before).restarted
    assert before.since(after).restarted


def test_a_gauge_may_fall():
    running = [read_counters(f"vllm:num_requests_running{{}} {number}") for number in (3, 1)]
    assert not running[1].since(running[0]).restarted


def test_a_counter_needs_its_name_and_a_number():
    for wrong in ("nan", "inf", "-1", "1e999", "0x10", "x", "", "9" * 400):
        assert not read_counters(f"vllm:request_success_total{{}} {wrong}").numbers
    assert not read_counters("evil vllm:request_success_total 1").numbers


def test_values_of_labels_and_lines_are_bounded():
    many = "\n".join(f'vllm:kvflow_failed_transfers_total{{code="c{number}"}} 1' for number in range(2 * KEYS_MAX))
    assert len(read_counters(many).numbers) == KEYS_MAX
    long = 'vllm:kvflow_failed_transfers_total{code="' + "x" * 10_000 + '"} 1'
    [(_, key)] = read_counters(long).numbers
    assert len(key) == 200
    flood = "vllm:other 1\n" * SERIES_MAX + "vllm:request_success_total 1\n"
    assert not read_counters(flood).numbers


@given(st.text(max_size=300) | st.lists(st.sampled_from([*LINES, *'{}"\\, ']), max_size=30).map("".join))
def test_any_text_is_read(text):
    counted = read_counters(text)
    assert all(math.isfinite(number) and 0 <= number <= 40 * NUMBER_MAX for number in counted.numbers.values())


@pytest.mark.parametrize("text", ['a="' * 100_000, '\\"' * 100_000, "{" * 300_000], ids=["quotes", "escapes", "braces"])
def test_hostile_labels_take_no_long_time(text):
    assert read_counters(f"vllm:kvflow_defects_total{{{text}}} 1").kvflow
