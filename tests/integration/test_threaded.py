"""``run_worker``: an engine's threads offer, revoke and pull at the same time, and its worker's thread ends with it.

``tests/unit/kvflow/worker/test_threaded.py`` has each call by itself.
"""

import concurrent.futures
import threading

import pytest

import kvflow

from .producing import configured
from .shapes import Shape, write, wrong

BLOCKS = [[0, 1], [2, 3]]
OTHER_BLOCKS = [[4, 5], [6, 7]]
PATIENCE_S = 60.0


@pytest.mark.parametrize("transport", ["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_offers_from_many_threads(transport):
    """Some offer and revoke while another pulls."""
    source, target = Shape().build(), Shape(layout="LBNHC", kv="split").build()

    def pull(request):
        write(source, request, OTHER_BLOCKS, 8)
        consumer.pull(producer.offer(request, OTHER_BLOCKS, 8), OTHER_BLOCKS).result(PATIENCE_S)
        assert wrong(target, request, OTHER_BLOCKS, 8) == []

    def engine_thread(number):
        for turn in range(25):
            request = f"t{number}/{turn}"
            producer.offer(request, BLOCKS, 8)
            assert producer.revoke(request)

    with (
        kvflow.run_worker(configured("prefill-0", transport=transport), source) as producer,
        kvflow.run_worker(configured("decode-0", transport=transport), target) as consumer,
    ):
        pull("first")
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            busy = [threads.submit(engine_thread, number) for number in range(4)]
            for number in range(25):
                pull(f"pulled {number}")
            for future in busy:
                future.result(PATIENCE_S)
        assert producer.wait_offer(f"pulled {number}").result(PATIENCE_S) == "released"
        assert producer.snapshot().leases == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvflow")]
