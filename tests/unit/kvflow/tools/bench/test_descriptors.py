"""What ``kvflow bench descriptors --calibrate`` writes is what a worker reads, or nothing."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.planning.costs import MACHINE_LENGTH_MAX, Costs, decode_calibration
from kvflow.tools.bench import descriptors


@pytest.fixture
def measuring(monkeypatch):
    """Have measured what the test says, without a source."""

    @asynccontextmanager
    async def no_source(address, _devices):
        yield None

    def measured(**costs):
        fields = {"read_byte_s": 0.0, "copy_s": 0.0, "piece_s": 0.0, "copied_byte_s": 0.0} | costs

        async def measure(*_):
            return SimpleNamespace(costs=Costs(**fields), tables=())

        monkeypatch.setattr(descriptors, "open_source", no_source)
        monkeypatch.setattr(descriptors, "measure", measure)

    return measured


async def calibrate(path):
    await descriptors.run(1, 0, lambda _: None, None, str(path))


async def test_what_a_worker_would_refuse_is_not_written_over_what_it_takes(measuring, tmp_path):
    path = tmp_path / "calibration.json"
    measuring(descriptor_s=1e-6)
    await calibrate(path)
    written = path.read_bytes()
    assert decode_calibration(written, name="", planes=("nixl",)).costs.descriptor_s == 1e-6
    measuring(descriptor_s=2.0)
    with pytest.raises(ConfigInvalid, match=r"as measured: .*descriptor_s"):
        await calibrate(path)
    assert path.read_bytes() == written


async def test_a_processor_with_a_long_name_is_cut(measuring, tmp_path, monkeypatch):
    monkeypatch.setattr(descriptors, "header", lambda: SimpleNamespace(machine="m" * 1000, cores=2))
    measuring(descriptor_s=1e-6)
    path = tmp_path / "calibration.json"
    await calibrate(path)
    assert decode_calibration(path.read_bytes(), name="").machine == "m" * MACHINE_LENGTH_MAX


@pytest.mark.parametrize(("direct_s", "staged_s"), [(0.0, 0.0), (1e-3, 1e-3), (1e-3, 0.0)])
def test_two_ways_of_reading_are_compared_or_nothing(direct_s, staged_s):
    reports = tuple(SimpleNamespace(timings_s={"scatter": scatter_s}) for scatter_s in (direct_s, staged_s))
    with pytest.raises(AssertionError, match="read directly and staged"):
        descriptors._require_both(SimpleNamespace(reports=reports))
