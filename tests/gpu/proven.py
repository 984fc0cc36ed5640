"""What tests on a GPU prove, and which stand-ins prove it on a CPU."""

from typing import NamedTuple


class Part(NamedTuple):
    """One part: tests on a GPU, and tests with stand-ins, each a file of ``tests`` and a function in it."""

    name: str
    on_gpu: tuple[str, ...]
    stand_ins: tuple[str, ...]


DEVICE_ORDER = "integration/test_nixl_device_order.py"
TCP = "integration/test_tcp_device.py"
METADATA = "unit/kvflow/reads/nixl/test_metadata.py"

PARTS = (
    Part(
        "device of the read thread, visibility before a fence",
        ("gpu/facts.py::contexts",),
        (
            f"{DEVICE_ORDER}::test_entering_a_device_gives_the_thread_a_context",
            f"{DEVICE_ORDER}::test_a_thread_that_gets_no_context_is_refused_at_the_start",
            f"{DEVICE_ORDER}::test_remote_writes_are_flushed_where_the_platform_does_not_order_them",
            f"{DEVICE_ORDER}::test_fences_that_are_due_together_need_one_call_to_the_device",
        ),
    ),
    Part(
        "registration, metadata, choice of a carrier",
        ("gpu/facts.py::agents",),
        (
            f"{DEVICE_ORDER}::test_refused_device_memory_names_what_to_check",
            f"{DEVICE_ORDER}::test_a_thread_without_the_device_makes_progress_for_network_cards_only",
            f"{METADATA}::test_the_addresses_of_a_gpu_are_read_with_their_flags",
            f"{METADATA}::test_nvlink_between_hosts_and_pods_follows_from_flags",
        ),
    ),
    Part(
        "bytes between memories of two processes",
        ("gpu/test_pulls.py::test_every_byte_arrives",),
        (
            "gpu/test_pulls.py::test_every_byte_arrives",  # on the host
            f"{TCP}::test_every_byte_that_is_asked_for_and_no_other",
            f"{TCP}::test_workers_whose_caches_lie_on_a_device_pull_over_tcp",
        ),
    ),
    Part(
        "fence beside a kernel that writes",
        ("gpu/test_pulls.py::test_no_read_delivers_what_a_kernel_writes_after_the_lease",),
        (
            "gpu/test_pulls.py::test_no_read_delivers_what_a_kernel_writes_after_the_lease",
            f"{TCP}::test_no_byte_of_a_lease_that_ends_in_the_middle_is_read_after_its_end",
        ),
    ),
    Part(
        "lease behind a queued write",
        ("gpu/test_pulls.py::test_a_write_that_is_queued_is_read_only_behind_its_event",),
        (
            "gpu/test_pulls.py::test_a_write_that_is_queued_is_read_only_behind_its_event",
            "gpu/test_helpers.py::test_a_late_write_asks_for_nothing_that_waits_behind_its_kernel",
            "unit/kvflow/memory/test_device.py::test_a_mark_has_passed_when_every_device_has_come_so_far",
        ),
    ),
    Part(
        "no write after the end of a reader",
        ("gpu/test_pulls.py::test_nothing_is_written_after_a_worker_was_closed",),
        (
            "gpu/test_pulls.py::test_nothing_is_written_after_a_worker_was_closed",
            f"{DEVICE_ORDER}::test_the_device_is_entered_before_nixl_and_settled_after_the_reader",
        ),
    ),
    Part(
        "rates, windows of asynchronous peers",
        ("gpu/test_pulls.py::test_the_rate_between_the_memories_is_told",),
        (
            "gpu/test_pulls.py::test_the_rate_between_the_memories_is_told",
            "unit/kvflow/reads/test_pacing.py::test_a_waiting_process_uses_nine_tenths_of_the_link",
        ),
    ),
)
