"""Consumers that stage."""

STAGING = {"staging_bytes": 8 * 64 * 1024}
"""Settings: buffers of a few units, so that one pull takes several."""

TOKEN_MAJOR = {"layout": "LBNHC", "kv": "split", "heads": 6, "layers": 16, "block_size": 16, "head_size": 8}
"""A shape with so many small pieces that half of its heads are staged."""


def no_buffer_is_taken(consumer):
    use = consumer.worker.snapshot().staging
    assert (use.buffers, use.buffer_bytes, use.in_use, use.quarantined) == (8, 64 * 1024, 0, 0)
