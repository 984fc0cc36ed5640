"""What every test relies on."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anybody loads torch: the copies of tests are small, and torch's threads, which spin, would take the cores of
# the processes that run other tests. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine may stall at any moment: that an example took long says nothing of it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

MEASURED = (
    "contract/",
    "demo/",
    "integration/test_bench_",
    "integration/test_doctor_",
    "integration/test_handshake_",
    "integration/test_nixl_",
    "proxy/",
    "unit/",
)
"""Beginnings of the paths of tests that count for the coverage. Tests of whole workers and generated ones run the same
lines many times over: to measure them takes minutes, and adds half a percent."""

SLOW = {
    "architecture/test_simulator.py": [],
    "architecture/test_wheel.py": ["test_the_wheel_has_every_file_of_both_packages_and_nothing_else"],
    "chaos/test_chaos.py": [],
    "chaos/test_readers.py": ["test_a_reader_that_stays_is_seen"],
    "contract/test_processes.py": [
        "test_bytes_and_epochs_cross_processes[nixl]",
        "test_a_peer_killed_between_two_reads_fails_the_rest_of_them[tcp]",
    ],
    "contract/test_staged_processes.py": ["test_staged_bytes_cross_processes[nixl]"],
    "demo/test_demo.py": [],
    "demo/test_elsewhere.py": [],
    "demo/test_engines.py": ["test_two_engines_generate_what_one_does[BLHNC-content]"],
    "demo/test_model.py": [],
    "demo/test_processes.py": ["test_an_engine_stops_when_it_is_told_to[15]"],
    "docs/test_blocks.py": [],
    "docs/test_doctor_page.py": [],
    "fuzz/test_fuzz.py": ["test_a_worker_survives_mutated_messages_and_every_kind_of_lie"],
    "gpu/test_pulls.py": ["test_every_byte_arrives[cpu-to-cpu-packed]"],
    "integration/test_bad_input.py": ["test_tokens_that_the_ticket_does_not_cover[nixl]"],
    "integration/test_bench_fence.py": [],
    "integration/test_bench_measuring.py": [],
    "integration/test_combinations.py": ["test_every_byte_that_is_asked_for_and_no_other[TP 8 to 4]"],
    "integration/test_doctor.py": ["test_a_reader_that_is_refused_names_the_error"],
    "integration/test_doctor_between.py": ["test_each_ticket_is_replaced_when_it_was_used"],
    "integration/test_families.py": [
        "test_the_manifests_serve_pods_of_each_family[IPv6]",
        "test_a_data_port_that_is_closed_is_named[6]",
    ],
    "integration/test_fenced_reads.py": [
        "test_no_wrong_byte_is_delivered[nullcontext-0]",
        "test_no_wrong_byte_is_delivered[copied_in_small_pieces-0]",
    ],
    "integration/test_floods.py": [
        "test_honest_peers_are_served_throughout_and_memory_is_flat[members that send rubbish]",
        "test_a_flooded_data_port_serves_readers_and_lets_newcomers_in[hellos of TLS-tls]",
        "test_readers_that_arrive_together_all_read[64-tls]",
    ],
    "integration/test_handshake_many.py": ["test_a_server_whose_cpu_is_taken_serves_its_whole_herd"],
    "integration/test_handshake_memory.py": ["test_strangers_make_a_server_hold_little"],
    "integration/test_hung.py": ["test_leaving_with_a_hung_read"],
    "integration/test_kept.py": ["test_what_is_fetched_is_right_or_stale[tcp]"],
    "integration/test_kills.py": ["test_while_it_is_read_from[shared memory]"],
    "integration/test_late_write.py": ["test_with_quarantine_nothing_is_written_into_blocks_that_were_reused"],
    "integration/test_layouts.py": ["test_every_family_fills_every_other[nixl-LBNHC split]"],
    "integration/test_lifecycle.py": ["test_open_and_close_twenty_times[asyncio]"],
    "integration/test_misconfigurations.py": ["test_it_is_named_with_a_code_and_a_remedy[advertise is 0.0.0.0]"],
    "integration/test_open.py": ["test_what_is_followed_is_right_or_stale[tcp]"],
    "integration/test_planes.py": ["test_a_machine_without_nixl_is_read_over_tcp"],
    "integration/test_records.py": ["test_a_producer_that_is_killed_while_it_is_read"],
    "integration/test_releases.py": ["test_a_producer_of_another_release_is_told_why_it_is_left"],
    "integration/test_restarts.py": ["test_a_consumer_is_killed_and_started_again[shared memory]"],
    "integration/test_staged_hung.py": [],
    "integration/test_stale.py": ["test_recycled_when_its_reads_are_handed_over[nixl]"],
    "integration/test_suspend.py": ["test_a_producer_falls_asleep_while_it_is_read[unmapped-shared memory]"],
    "integration/test_tcp_device.py": ["test_every_byte_that_is_asked_for_and_no_other[VRAM to VRAM-24576-230-off]"],
    "integration/test_wrong_place.py": ["test_a_forked_child_is_refused_and_its_parent_goes_on[asyncio-exit]"],
    "proxy/test_floods.py": [],
    "simulation/test_planted.py": [
        "test_a_planted_bug_is_found[first_check_left_out]",
        "test_a_planted_bug_is_found[quarantine_skipped]",
    ],
    "soak/test_soak.py": [],
    "unit/kvflow/reads/tcp/test_backend.py": ["test_blocks_arrive_where_they_belong[off]"],
    "unit/kvflow/reads/tcp/test_exporter.py": ["test_large_answers_come_in_pieces"],
    "unit/kvflow/tools/cli/test_explain.py": ["test_pipeline_stages_are_read_from_each"],
}
"""Files that take seconds, mostly because they start processes or use sockets. ``make test-full`` runs them all, and
``make test`` the tests that are named here: one of each topic."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and what does not count for the coverage; fixtures count everywhere."""
    root = Path(__file__).parent
    for item in items:
        path = str(item.path.relative_to(root))
        if not path.startswith(MEASURED):
            item.add_marker("no_cover")
        if item.name not in SLOW.get(path, [item.name]):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture
def few_words() -> Iterator[None]:
    """Keep kvflow's log quiet, for tests in which thousands of things go wrong as they should."""
    log = logging.getLogger("kvflow")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
