"""Limits of the process and facts of the host: with real causes where a test can cause them, else with its files."""

import resource

import pytest

from kvflow.tools.doctor import facts


def examined(root):
    """Return what is found on a host with these files, by subject."""
    return {finding.subject: finding for finding in facts.examine_machine(root)}


def write(root, files):
    """Write files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_host_is_examined():
    findings = examined(facts.ROOT)
    assert {"memlock", "open files", "shared memory", "clock", "PID namespace", "RDMA", "huge pages"} <= set(findings)
    assert all(finding.evidence for finding in findings.values())


def test_little_memory_that_may_be_locked_matters_with_rdma(tmp_path, monkeypatch):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    found = examined(tmp_path)["memlock"]
    assert (found.code, found.status) == ("memlock_low", "warning")
    assert "memlock" in found.remedy


def test_a_host_without_files_of_the_kernel_is_examined(tmp_path):
    findings = examined(tmp_path)
    assert findings["shared memory"].code == "shared_memory_small"
    assert findings["RDMA"].status == "note"
    assert findings["container"].evidence == "no sign of one" or findings["container"].status == "note"


def test_network_cards_are_listed_with_the_state_of_their_ports(tmp_path):
    write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "dev/infiniband/uverbs0": ""})
    found = examined(tmp_path)["RDMA"]
    assert (found.status, found.evidence) == ("ok", "mlx5_0 (port 1 ACTIVE)")


def test_network_cards_that_a_container_hides_are_noticed(tmp_path):
    write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"})
    found = examined(tmp_path)["RDMA"]
    assert (found.code, found.status) == ("network_cards_hidden", "warning")
    assert "--device /dev/infiniband" in found.remedy


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "peer_memory_missing"),
        ({"proc/modules": "gdrdrv 1 0 - Live 0x0\n"}, "peer_memory_missing"),
        ({"proc/modules": "nvidia_peermem 16384 0 - Live 0x0\n"}, ""),
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64\n"}, ""),
    ],
    ids=["nothing", "gdrcopy alone", "peermem", "dmabuf"],
)
def test_cards_that_do_not_reach_the_memory_of_gpus_are_noticed(tmp_path, files, code):
    write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "dev/nvidia0": "", **files})
    assert facts.has_gpu(tmp_path)
    assert examined(tmp_path)["peer memory"].code == code


def test_a_container_is_told_by_its_file(tmp_path):
    write(tmp_path, {".dockerenv": ""})
    assert "/.dockerenv" in examined(tmp_path)["container"].evidence


@pytest.mark.parametrize(("setting", "words"), [("never", "no huge pages"), ("madvise", "gets huge pages")])
def test_huge_pages_are_told_by_the_setting_of_the_kernel(tmp_path, setting, words):
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    write(tmp_path, {name: "always madvise never\n".replace(setting, f"[{setting}]")})
    assert words in examined(tmp_path)["huge pages"].evidence


def test_sizes_are_readable():
    assert [facts.shown_size(each) for each in (100, 64 << 10, 8 << 20, 3 << 29)] == [
        "100 bytes",
        "64 KiB",
        "8 MiB",
        "1.5 GiB",
    ]
