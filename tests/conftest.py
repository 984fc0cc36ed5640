"""What every test relies on."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before anybody loads torch: the copies of tests are small, and torch's threads, which spin, would take the cores of
# the processes that run other tests. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine may stall at any moment: that an example took long says nothing of it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Who asks only whether a test fails needs no small example.
settings.register_profile("unshrunk", settings.get_profile("patient"), phases=(Phase.explicit, Phase.generate))
# ``make test`` draws a quarter of the examples, others each time. ``make test-full`` draws all, and so does CI.
settings.register_profile("quick", settings.get_profile("patient"), max_examples=25)
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

SLOW: dict[str, list[str]] = {
    "architecture/test_wheel.py::test_every_installed_module_can_be_imported_without_a_checkout": [],
    "architecture/test_wheel.py::test_the_demo_runs_without_a_checkout": [],
    "architecture/test_wheel.py::test_vllm_finds_the_plugin_of_the_wheel": [],
    "benchmarks/test_hot_path.py::test_a_steady_pull_executes_hardly_more_than_before": [],
    "contract/test_names.py::test_of_two_hundred_requests_of_a_rollout_none_fails": [
        "cut before each-old first-one id",
        "connected-new first-one id",
    ],
    "contract/test_processes.py::test_a_peer_killed_between_two_reads_fails_the_rest_of_them": ["tcp"],
    "contract/test_processes.py::test_a_peer_that_is_gone_fails_its_reads_and_nobody_elses": [],
    "contract/test_processes.py::test_a_peer_that_lives_can_be_removed_and_added_again": [],
    "contract/test_processes.py::test_a_removed_peer_that_died_fails_when_it_is_added_again": [],
    "contract/test_processes.py::test_a_restarted_peer_is_another_peer": [],
    "contract/test_processes.py::test_an_idle_transport_does_not_spin": [],
    "contract/test_processes.py::test_peers_that_read_from_us_are_not_disturbed_when_our_reader_fails": [],
    "contract/test_staged_processes.py::test_a_peer_that_is_killed_fails_staged_reads_and_frees_their_buffers": [],
    "contract/test_staged_processes.py::test_staged_bytes_cross_processes": ["nixl inline progress"],
    "demo/test_demo.py::test_every_token_is_equal_and_packed_needs_few_descriptors": [],
    "demo/test_elsewhere.py::test_engines_that_run_already_serve_the_demo_and_go_on": [],
    "demo/test_engines.py::test_two_engines_generate_what_one_does": ["BLHNC-content"],
    "demo/test_model.py::test_a_corrupted_block_shows_in_the_tokens": [],
    "demo/test_processes.py::test_an_engine_stops_when_it_is_told_to": [],
    "demo/test_processes.py::test_an_engine_survives_whatever_it_is_asked": [],
    "demo/test_processes.py::test_an_engine_that_does_not_start_says_why": [],
    "docs/test_blocks.py::test_blocks_run_in_the_order_of_the_page": [],
    "docs/test_monitor_page.py::test_alerts_fire_for_what_they_are_for_and_not_without_it": [],
    "fuzz/test_fuzz.py::test_a_reader_over_tcp_lives_through_exporters_that_lie": [],
    "fuzz/test_fuzz.py::test_a_seed_draws_the_same_again": [],
    "fuzz/test_fuzz.py::test_a_tcp_exporter_survives_lying_readers_and_serves_honest_ones": [],
    "fuzz/test_fuzz.py::test_what_takes_input_takes_bytes_from_nothing": [],
    "fuzz/test_fuzz.py::test_what_takes_input_takes_mutated_input": [],
    "fuzz/test_fuzz.py::test_what_was_found_once_is_refused": [],
    "gpu/test_pulls.py::test_a_write_that_is_queued_is_read_only_behind_its_event": [],
    "gpu/test_pulls.py::test_every_byte_arrives": ["cpu-to-cpu-packed"],
    "gpu/test_pulls.py::test_no_read_delivers_what_a_kernel_writes_after_the_lease": [],
    "gpu/test_pulls.py::test_nothing_is_written_after_a_worker_was_closed": [],
    "gpu/test_pulls.py::test_the_rate_between_the_memories_is_told": [],
    "integration/test_bench_fence.py::test_it_measures_the_same_number_of_pulls_of_each": [],
    "integration/test_bench_measuring.py::test_a_mooncake_that_crashes_ends_its_rows_alone": [],
    "integration/test_bench_measuring.py::test_every_size_of_a_pull_is_measured_beside_what_else_could_move_it": [],
    "integration/test_bench_measuring.py::test_kvflow_is_compared_with_what_is_there": [],
    "integration/test_bench_measuring.py::test_what_copies_host_memory_is_not_compared_with_devices": [],
    "integration/test_combinations.py::test_every_byte_that_is_asked_for_and_no_other": ["TP 8 to 4"],
    "integration/test_doctor.py::test_a_nixl_that_is_whole_starts_and_reads": [],
    "integration/test_doctor.py::test_two_hosts_are_told_from_one": [],
    "integration/test_doctor.py::test_two_processes_of_a_host_read_over_shared_memory": [],
    "integration/test_doctor.py::test_two_processes_read_over_tcp": [],
    "integration/test_doctor.py::test_ucx_that_is_restricted_on_one_side_is_named": [],
    "integration/test_doctor.py::test_ucx_that_is_set_otherwise_on_one_side_is_named_in_nixls_words": [],
    "integration/test_doctor.py::test_what_a_variable_of_ucx_leaves_out_is_found": [],
    "integration/test_doctor.py::test_what_keeps_two_processes_from_shared_memory_is_named": [],
    "integration/test_doctor_between.py::test_a_worker_that_offers_probes_is_read_and_each_byte_compared": [],
    "integration/test_doctor_between.py::test_an_advertised_address_that_is_not_reached_is_named": [],
    "integration/test_families.py::test_a_data_port_that_is_closed_is_named": [],
    "integration/test_families.py::test_a_name_with_addresses_of_both_families_is_reached": [],
    "integration/test_families.py::test_the_manifests_serve_pods_of_each_family": [],
    "integration/test_fenced_reads.py::test_no_wrong_byte_is_delivered": ["nullcontext-0"],
    "integration/test_fenced_reads.py::test_without_the_fence_wrong_bytes_are_delivered": [],
    "integration/test_floods.py::test_a_flooded_data_port_serves_readers_and_lets_newcomers_in": ["hellos of TLS-tls"],
    "integration/test_floods.py::test_a_herd_at_a_door_with_a_tenth_of_a_core_is_late_or_hears_why": [],
    "integration/test_floods.py::test_a_member_that_means_harm_makes_a_producer_hold_little": [],
    "integration/test_floods.py::test_a_member_that_opens_connections_over_and_over_costs_milliseconds": ["tls"],
    "integration/test_floods.py::test_a_reader_that_is_in_is_delayed_and_not_stopped_by_a_flood": ["hellos of TLS-tls"],
    "integration/test_floods.py::test_honest_peers_are_served_throughout_and_memory_is_flat": [
        "members that send rubbish"
    ],
    "integration/test_floods.py::test_readers_that_arrive_together_all_read": [],
    "integration/test_handshake_many.py::test_as_many_sockets_as_files_may_be_open": [],
    "integration/test_handshake_many.py::test_one_process_has_a_thousand_links": [],
    "integration/test_handshake_many.py::test_too_few_open_files_are_named": [],
    "integration/test_handshake_many.py::test_too_many_sockets_are_named": [],
    "integration/test_handshake_memory.py::test_a_client_that_reads_no_answers_is_refused_and_others_are_answered": [],
    "integration/test_handshake_memory.py::test_a_message_of_many_frames_is_refused_and_its_connection_cut": [],
    "integration/test_handshake_memory.py::test_a_message_without_an_end_is_cut_before_it_is_one": [],
    "integration/test_handshake_memory.py::test_a_reader_cuts_a_message_without_an_end": [],
    "integration/test_handshake_memory.py::test_a_reader_refuses_a_message_of_many_frames": [],
    "integration/test_handshake_memory.py::test_what_a_peer_never_takes_is_dropped_with_its_connection": [],
    "integration/test_hung.py::test_blocks_of_a_hung_read_are_refused_until_it_is_over": [],
    "integration/test_kept.py::test_what_is_fetched_is_right_or_stale": ["tcp"],
    "integration/test_kept.py::test_without_the_fence_wrong_bytes_are_fetched": [],
    "integration/test_kills.py::test_a_restarted_producer_knows_its_old_tickets_no_more": [],
    "integration/test_kills.py::test_after_the_last_byte_but_before_it_heard_of_it": [],
    "integration/test_kills.py::test_while_it_is_read_from": ["shared memory"],
    "integration/test_late_write.py::test_blocks_of_a_read_that_never_ends_are_freed_by_renewing_the_reader": [],
    "integration/test_late_write.py::test_without_quarantine_the_same_read_overwrites_them": [],
    "integration/test_layouts.py::test_every_family_fills_every_other": ["nixl-LBNHC split"],
    "integration/test_lifecycle.py::test_open_and_close_twenty_times": ["uvloop"],
    "integration/test_lifecycle.py::test_open_and_close_twenty_times_over_nixl": [],
    "integration/test_misconfigurations.py::test_it_is_named_with_a_code_and_a_remedy": ["advertise is 0.0.0.0"],
    "integration/test_open.py::test_what_is_followed_is_right_or_stale": ["tcp"],
    "integration/test_open.py::test_what_settles_before_it_is_written_is_read_wrong": [],
    "integration/test_planes.py::test_a_pair_without_a_plane_is_refused_by_name_before_its_first_read": [],
    "integration/test_planes.py::test_a_port_that_is_down_leaves_hosts_with_rdma_to_tcp": [],
    "integration/test_planes.py::test_a_producer_in_other_namespaces_is_not_read_over_shared_memory": [],
    "integration/test_planes.py::test_a_reader_without_nixl_says_so_once_and_reads_over_tcp": [],
    "integration/test_planes.py::test_bytes_go_over_the_best_plane_that_both_have": [],
    "integration/test_programs.py::test_a_program_that_closes_its_worker_too_late_ends": ["at exit"],
    "integration/test_releases.py::test_the_last_release_refuses_the_tickets_of_this_one": [],
    "integration/test_releases.py::test_this_release_refuses_the_tickets_of_the_last_one": [],
    "integration/test_rollout.py::test_none_of_two_hundred_requests_fails": ["one id-old-new-tcp"],
    "integration/test_stale.py::test_no_report_about_recycled_bytes": [],
    "integration/test_suspend.py::test_a_producer_sleeps_and_serves_the_same_consumers_from_other_memory": [],
    "integration/test_tcp_device.py::test_a_reader_that_takes_nothing_keeps_no_other_waiting": ["tls"],
    "integration/test_wrong_place.py::test_a_forked_child_is_refused_and_its_parent_goes_on": ["asyncio-exit"],
    "integration/test_wrong_place.py::test_a_worker_refuses_calls_on_another_loop": [],
    "planted/test_planted.py::test_a_suite_that_fails_without_a_bug_is_told": [],
    "planted/test_planted.py::test_bugs_that_survive_and_tests_that_fail_anyway_are_told": [],
    "planted/test_planted.py::test_suites_say_which_bugs_each_finds_alone_and_go_on": [],
    "planted/test_planted.py::test_the_shortest_part_that_executes_a_line_is_first": [],
    "simulation/test_planted.py::test_a_planted_bug_is_found": ["first_check_left_out", "quarantine_skipped"],
    "simulation/test_planted.py::test_what_an_exporter_has_not_served_is_read_again": [],
    "simulation/test_simulator.py::test_a_seed_is_the_same_run_in_every_process_and_under_every_hash_seed": ["3"],
    "simulation/test_simulator.py::test_a_series_that_is_interrupted_ends_with_what_is_under_way": [],
    "simulation/test_simulator.py::test_scenarios_use_all_that_a_worker_does": [],
    "unit/kvflow/reads/tcp/test_access.py::test_readers_that_arrive_together_all_get_in": ["64-plain", "64-tls"],
    "unit/kvflow/tools/cli/test_explain.py::test_the_change_that_is_named_has_the_count_that_is_named": [],
    "world/test_chaos.py::test_a_producer_survives_whatever_its_readers_do": [],
    "world/test_chaos.py::test_a_producer_that_is_aborted_or_keeps_a_reader_is_seen": [],
    "world/test_chaos.py::test_a_proxy_does_the_harm_that_it_is_told_to": [],
    "world/test_chaos.py::test_a_proxy_that_refuses_listens_again_at_the_same_address": [],
    "world/test_chaos.py::test_whoever_is_harmed_gets_well_and_nobody_else_notices": [],
    "world/test_soak.py::test_memory_that_does_not_level_off_is_missed": [],
    "world/test_soak.py::test_offers_end_released_and_memory_is_looked_at": [],
    "world/test_soak.py::test_pulls_that_are_disturbed_in_every_way_leave_nothing_behind": [],
}
"""Tests that take seconds, mostly because they start processes, and the cases of them that ``make test`` runs all the
same: one of each topic. ``make test-full`` runs every test, and ``make test`` every test that is not named here."""


def parts_of(item: pytest.Item) -> tuple[str, str]:
    """Return the name of a test without its case, and the case; empty if it has none."""
    name, _, case = item.name.partition("[")
    return name, case.removesuffix("]")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: it takes half of the time, and what is imported is never garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and what does not count for the coverage; fixtures count everywhere."""
    root = Path(__file__).parent
    for item in items:
        path = str(item.path.relative_to(root))
        if not path.startswith(MEASURED):
            item.add_marker("no_cover")
        name, case = parts_of(item)
        if case not in SLOW.get(f"{path}::{name}", [case]):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many cases of each suite have run, and how many seconds they took in all processes together."""
    cases, seconds = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                _, _, path = report.nodeid.partition("tests/")
                suite = path.partition("/")[0]
                cases[suite] += report.when == "call"
                seconds[suite] += report.duration
    told = [f"{suite} {count:,} in {seconds[suite]:.0f} s" for suite, count in cases.most_common()]
    if len(told) > 1:
        terminalreporter.write_line(f"cases: {', '.join(told)}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def loggers_put_back() -> Iterator[None]:
    """Put kvflow's loggers back as they were, after whatever a test or a command that it ran has configured."""
    loggers = [logging.getLogger(name) for name in ("kvflow", "handshake")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def few_words(loggers_put_back: None) -> None:
    """Keep kvflow's log quiet, for tests in which thousands of things go wrong as they should."""
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)
