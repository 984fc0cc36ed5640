"""What the blocks of the documentation find when they run: files, workers and requests."""

import json
import subprocess
import sys
from pathlib import Path

from kvflow import models

from . import failing

ROOT = Path(__file__).parents[2]


def write_models(folder: Path) -> None:
    """Write configs of models into ``models``: of two known ones, and of one of an unknown family."""
    for name, bundled in {"granite-4.0-h-small": "granite-4-hybrid", "gpt-oss-20b": "gpt-oss-20b"}.items():
        (folder / "models" / name).mkdir(parents=True)
        config = (Path(models.__file__).parent / "configs" / f"{bundled}.json").read_text()
        (folder / "models" / name / "config.json").write_text(config)
    unknown = {
        "model_type": "a_new_model",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "models" / "a-new-model").mkdir()
    (folder / "models" / "a-new-model" / "config.json").write_text(json.dumps(unknown))


RECORD_WARNINGS = """
import warnings

recorded = stack.enter_context(warnings.catch_warnings(record=True))
warnings.simplefilter("always")
"""
WARNED = "assert [each.category for each in recorded] == [models.GuessWarning]"

CONFIG_CHECKED = """
from msgspec.structs import replace

replace(config, cluster_secret="a secret of the tests, long enough").check()
"""

CACHE_MADE = """
spec = kvflow.FullAttention(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
cache = kvflow.allocate({"layers.0": spec}, num_blocks=2)
"""

WORKER_OPENED = """
config = replace(config, http=None, cluster_secret="a secret of the tests, long enough", transport="loopback")
worker = await stack.enter_async_context(kvflow.open_worker(config, cache))
"""

FAILING_SECRET = failing.SECRET


def write_logs_of_failures(folder: Path) -> None:
    """Write the logs of three workers, of which one was killed while it was read."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", failing.__name__], cwd=folder, env=environment, check=True, timeout=200)


OPEN_PRODUCER = """
import contextlib
import logging

log = logging.getLogger("engine")
first, second, third = (
    kvflow.WorkerConfig(engine_id=name, cluster_secret="a long random string, the same on every worker")
    for name in ("prefill-0", "decode-0", "decode-1")
)
worker = producer = await stack.enter_async_context(kvflow.open_worker(first, cache))
"""
OPEN_CONSUMER = """
worker = await stack.enter_async_context(kvflow.open_worker(second, kvflow.allocate(specs, num_blocks=64)))
params = ticket.to_params()
"""
PULLED = """
assert report.nbytes > 0
assert await producer.wait_offer("request-1") == "released"
"""
END_A_LEASE = """
ticket = producer.offer("request-2", block_ids=[[3, 4, 9], [17, 2]], num_tokens=48)
producer.revoke("request-2")
block_ids, request, recomputed = [[7, 8, 1], [2, 30]], "request-2", []
recompute = recomputed.append
"""
OFFER_AGAIN = 'ticket = producer.offer("request-3", block_ids=[[3, 4, 9], [17, 2]], num_tokens=48)'
CANCELED = """
assert pull.done()
with contextlib.suppress(kvflow.errors.KvflowError):
    await worker.release(ticket)
"""
OFFER_TWO = """
step = [
    (producer.offer(f"step-{number}", block_ids=[[number], [10 + number]], num_tokens=16), [[number], [10 + number]])
    for number in (1, 2)
]
"""
DRAINED = """
assert report.complete
await stack.aclose()
"""
RUN_WORKER = """
running = kvflow.run_worker(third, cache)
worker = running.__enter__()
stack.callback(running.__exit__, None, None, None)
before = worker.rank_address
"""
RESUMED = """
assert worker.rank_address != before
"""

EMBEDDED = [
    (OPEN_PRODUCER, 'assert ticket.request_id == "request-1"'),
    (OPEN_CONSUMER, PULLED),
    (END_A_LEASE, 'assert recomputed == ["request-2"]'),
    (OFFER_AGAIN, CANCELED),
    (OFFER_TWO, "assert [pull.exception() for pull in pulls] == [None, None]"),
    ("", DRAINED),
    (RUN_WORKER, RESUMED),
]
"""What the fragments of docs/howto/embed-a-worker.md expect, and what checks them afterwards, in order."""
