"""What facts of both sides promise, and why a peer that they promise more for is read over TCP."""

from msgspec.structs import replace

from kvflow.reads.reach import RDMA, HostFacts, allows, host_facts, reach, unreached
from tests.helpers.loops import looped

FACTS = HostFacts(
    host="a", boot_id="boot", pid_namespace="pid:[1]", pid=1, ptrace_scope="1", network_cards=(), variables={}
)
FAR = {"host": "b", "boot_id": "another", "pid_namespace": "pid:[9]"}
CARDS = {"network_cards": ("mlx5_0",)}
GPU = {"on_device": True}
WITHOUT_CUDA = {"variables": {"UCX_TLS": "rc,sm"}}


def facts(**changes):
    return replace(FACTS, **changes)


@looped(
    "ours, theirs, carrier, words",
    [
        ({}, {}, "cma", []),
        ({"on_device": True}, {"on_device": True}, "cuda_ipc", []),
        ({"on_device": True}, {}, "tcp", ["one cache is in memory of a device"]),
        ({**CARDS, "on_device": True}, CARDS, "rdma", ["one cache is in memory of a device"]),
        ({}, {"pid_namespace": "pid:[2]"}, "tcp", ["the PID namespaces differ: pid:[2] there, pid:[1] here"]),
        ({}, {"ptrace_scope": "3"}, "tcp", ["ptrace_scope is 3"]),
        ({"variables": {"UCX_TLS": "tcp"}}, {}, "tcp", ["UCX_TLS is 'tcp' here, which leaves out cma"]),
        (GPU, {**GPU, **WITHOUT_CUDA}, "tcp", ["UCX_TLS is 'rc,sm' there, which leaves out cuda_ipc"]),
        (CARDS, {**CARDS, **FAR}, "rdma", []),
        (CARDS, FAR, "tcp", ["no RDMA device there"]),
        ({}, FAR, "tcp", ["no RDMA device here", "no RDMA device there"]),
        ({**CARDS, "variables": {"UCX_TLS": "cma"}}, {**CARDS, **FAR}, "tcp", ["here, which leaves out rc"]),
        ({"boot_id": ""}, {"boot_id": ""}, "tcp", ["no RDMA device here", "no RDMA device there"]),
    ],
)
def test_facts_promise_the_nearest_carrier_and_say_why_none_is_nearer(ours, theirs, carrier, words):
    found = reach(facts(**ours), facts(**theirs))
    assert found.carrier == carrier
    assert len(found.why) == len(words)
    assert all(word in each.text and each.remedy for word, each in zip(words, found.why, strict=True))


def test_what_the_addresses_refuse_is_explained_by_the_facts():
    assert unreached(FACTS, None) == ("neither shared memory nor RDMA reaches the peer's memory", "")
    text, remedy = unreached(FACTS, facts(**FAR))
    assert text.endswith("no RDMA device here; no RDMA device there")
    assert not remedy, "TCP is as good as it gets"
    text, remedy = unreached(facts(**CARDS), facts(**CARDS, **FAR))
    assert text.endswith("rdma is expected, but the addresses of UCX do not allow it; is a port down?")
    assert "both have RDMA devices" in remedy


@looped(
    "ours, theirs, words",
    [
        ({**GPU, **WITHOUT_CUDA}, GPU, "Unset UCX_TLS"),
        (GPU, {**GPU, "pid_namespace": "pid:[2]"}, "one PID namespace"),
        (GPU, {**GPU, **FAR}, "Both hosts need RDMA devices"),
        ({**CARDS, **GPU}, {**CARDS, **FAR}, "both have RDMA devices"),
        (GPU, FAR, ""),
        ({}, {"pid_namespace": "pid:[2]"}, ""),
    ],
)
def test_tcp_between_gpus_or_hosts_with_rdma_has_a_remedy(ours, theirs, words):
    remedy = unreached(facts(**ours), facts(**theirs)).remedy
    assert words in remedy
    assert bool(words) == bool(remedy)


@looped(
    "value, cma, rdma, cuda_ipc",
    [
        ("all", True, True, True),
        ("tcp,cma", True, False, False),
        ("sm,self", True, False, False),
        ("^tcp", True, True, True),
        ("^sm,tcp", False, True, True),
        ("posix", False, False, False),
        ("rc,cuda", False, True, True),
        ("\\rc_x:aux,cuda_copy", False, True, False),
        ("^ib,cuda", True, False, False),
        ("^rc", True, True, True),  # and dc remains
        ("ud,rc_gda", False, False, False),
    ],
)
def test_what_ucx_is_told_is_understood(value, cma, rdma, cuda_ipc):
    wanted = ({"cma"}, RDMA, {"cuda_ipc"})
    assert [allows(value, frozenset(each)) for each in wanted] == [cma, rdma, cuda_ipc]


def test_facts_are_read_from_the_kernel_and_cut_to_their_bounds(tmp_path, monkeypatch):
    for path, text in {
        "proc/sys/kernel/random/boot_id": "an id\n",
        "proc/sys/kernel/yama/ptrace_scope": "3\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    for number in range(70):
        (tmp_path / f"sys/class/infiniband/card_{number:02}").mkdir(parents=True)
    monkeypatch.setenv("UCX_TLS", "x" * 300)
    monkeypatch.setenv("NOT_OURS", "secret")
    found = host_facts(on_device=True, root=tmp_path)
    assert (found.boot_id, found.ptrace_scope, found.on_device) == ("an id", "3", True)
    assert (found.pid_namespace, len(found.network_cards)) == ("", 64)
    assert found.variables["UCX_TLS"] == "x" * 256
    assert "NOT_OURS" not in found.variables
    monkeypatch.setenv("UCX_LOG_FILE", "a path")
    assert set(host_facts(prefixes=("UCX_TLS",), root=tmp_path).variables) == {"UCX_TLS"}
