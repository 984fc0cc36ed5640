"""A report's rate counts the time in which bytes moved."""

import pytest

from kvflow.transfer.report import TransferReport


@pytest.mark.parametrize(
    ("timings_s", "gb_per_s"),
    [
        ({"post": 1.0, "wire": 1.0, "queue": 100.0}, 1.0),
        ({"post": 0.5}, 4.0),
        ({"post": 0.0, "wire": 0.0}, 0.0),
        ({}, 0.0),
    ],
)
def test_rate(timings_s, gb_per_s):
    report = TransferReport(request_id="r", nbytes=2 * 10**9, descriptors=1, reads=1, timings_s=timings_s)
    assert report.gb_per_s == gb_per_s
