"""Consumers that stage."""

from kvflow.planning.costs import Calibration, Costs, encode_calibration

STAGING_BYTES = 8 * 64 * 1024
"""Buffers of a few units, so that one pull takes several."""


def calibrate(path, transport):
    """Write a calibration; return settings of a consumer that stages all that saves a descriptor."""
    costs = Costs(descriptor_s=1e-3, read_byte_s=0.0, copy_s=1e-9, piece_s=0.0, copied_byte_s=0.0)
    about = {"machine": "a test", "source": "same machine", "date": "2026-01-01T00:00:00Z"}
    path.write_bytes(encode_calibration(Calibration(schema=1, transport=transport, costs=costs, **about)))
    return {"calibration": str(path), "staging_bytes": STAGING_BYTES}


def no_buffer_is_taken(consumer):
    use = consumer.worker.snapshot().staging
    assert (use.buffers, use.buffer_bytes, use.in_use, use.quarantined) == (8, 64 * 1024, 0, 0)
