"""Every code of the doctor with its meaning and remedy, and the findings that carry them."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec import Struct

from kvflow.errors import FailureCode, KvflowError

Status = Literal["ok", "note", "warning", "failed"]


class Code(NamedTuple):
    """A code, the usual status of its findings, what it says, and what to do. Its name stays between releases."""

    name: str
    status: Status
    meaning: str
    remedy: str


_FAILED = {
    # Software.
    "package_missing": (
        "a package that kvflow needs is not installed",
        "Install kvflow again with pip, in the environment of the engine: pip install kvflow.",
    ),
    "release_unsupported": (
        "kvflow refuses this release",
        "Install a release of the range.",
    ),
    "curve_missing": (
        "ZeroMQ was built without CURVE, so that no control channel can be encrypted",
        "Install pyzmq from its wheel: pip install --force-reinstall --only-binary :all: pyzmq.",
    ),
    # NIXL and UCX.
    "nixl_variant_mismatch": (
        "NIXL was built for another CUDA than torch",
        "Install the variant of NIXL with the major version of torch.version.cuda.",
    ),
    "nixl_agent_failed": (
        "a NIXL agent does not start: its process was refused, crashed, or did not end",
        "Read the output in the evidence. UCX_LOG_LEVEL=info shows what UCX finds; transport=tcp runs without NIXL.",
    ),
    "self_read_failed": (
        "two processes of this host cannot read from each other over this data plane",
        "Follow the code and the text in the evidence.",
    ),
    "reader_ended": (
        "the process that read crashed, or did not answer",
        "Report the output in the evidence, and read with --transport tcp meanwhile.",
    ),
    "bytes_differ": (
        "a probe read other bytes than were offered",
        "Report it: this is a defect.",
    ),
    # Addresses.
    "port_taken": (
        "another process listens on the port",
        "End that process, or choose another port.",
    ),
    "bind_impossible": (
        "this host cannot listen on the address",
        "Bind to an address of this host, or to 0.0.0.0 with an advertised address.",
    ),
    "advertise_unreachable": (
        "no peer can dial the advertised address",
        "Advertise the name or address at which other hosts reach this one, and a port from 1 to 65535.",
    ),
    # GPUs and network cards.
    "gpu_unusable": (
        "there is a GPU or its driver, and torch cannot use it",
        "Install a build of torch for this GPU, and check CUDA_VISIBLE_DEVICES and nvidia-smi.",
    ),
    "expandable_segments": (
        "torch allocates GPU memory in segments that other processes cannot map as a whole",
        "Remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF.",
    ),
    # Settings.
    "secret_missing": (
        "there is no cluster secret",
        "Set KVFLOW_CLUSTER_SECRET to the same text on every worker. Draw one with kvflow keys secret.",
    ),
    "secret_malformed": (
        "the cluster secret is too short",
        "Set KVFLOW_CLUSTER_SECRET to the same text on every worker. Draw one with kvflow keys secret.",
    ),
    "vllm_plugin_missing": (
        "vLLM is installed, and kvflow's plugin is not registered",
        "Install kvflow with pip in the environment of vLLM; a folder in PYTHONPATH alone registers nothing.",
    ),
    # Between two hosts.
    "name_unresolved": (
        "the name of the worker does not resolve here",
        "Correct the name, or use an address; compare with getent hosts NAME.",
    ),
    "connection_refused": (
        "the host answers, and nothing listens on the port",
        "Start the worker, or correct the port. A worker on 127.0.0.1 is not reached from other hosts: set bind.",
    ),
    "connection_timed_out": (
        "nothing answers at the address: packets are dropped",
        "Open the port in firewalls, security groups and network policies, and check the address.",
    ),
    "host_unreachable": (
        "no route leads to the address",
        "Check the address, the routes and the network interface.",
    ),
    "no_handshake": (
        "the port accepts connections, and no worker answers there",
        "Use the control endpoint of a worker (bind), not its TCP plane, its HTTP page or the engine's API.",
    ),
    "no_encryption": (
        "what listens at the port speaks ZeroMQ without CURVE, as no worker of kvflow does",
        "Use the control endpoint of a worker (bind).",
    ),
    "data_port_unreachable": (
        "the TCP plane of the worker cannot be reached",
        "Open its port in firewalls. Set tcp_bind to a fixed port and tcp_advertise to an address that readers reach.",
    ),
    "no_probe": (
        "the worker has stopped to offer probe blocks",
        "Start kvflow doctor --listen on that host.",
    ),
    # Running engines and their router.
    "server_unreachable": (
        "a server or the router does not answer",
        "Start it, or correct the URL. Its log says why it does not serve.",
    ),
    "server_unhealthy": (
        "a server answers that it is not healthy",
        "Wait until it has loaded its model, or read its log.",
    ),
    "models_unknown": (
        "a server does not say which models it serves",
        "Name a server of vLLM, and give --api-key if the server needs one.",
    ),
    "model_differs": (
        "the servers do not serve a model of the same name",
        "Start both servers with the same model and the same --served-model-name.",
    ),
    "metrics_missing": (
        "a server has no metrics of vLLM, so that nothing can be concluded",
        "Name the servers of vLLM themselves, not a router, and start them without --disable-log-stats.",
    ),
    "connector_missing": (
        "the server has no metrics of kvflow's connector",
        "Start it with --kv-transfer-config, and KVFlowConnector as its kv_connector: see docs/howto/vllm.md.",
    ),
    "ticket_unanswered": (
        "the prefill server was asked for a ticket and answered none",
        "Start it with kv_role kv_producer or kv_both, and read its log.",
    ),
    "request_failed": (
        "a server or the router answered a request with an error, or not at all",
        "Read the error in the evidence, and the log of who answered it.",
    ),
    "answer_broken": (
        "the answer through the router ended before it was complete",
        "Read the logs of the router and of the decode server: one of them closed the connection.",
    ),
    "router_does_not_ask": (
        "the router does not ask the prefill server for a ticket: nothing is transferred",
        (
            "Tell the router which servers prefill. vllm-router: --vllm-pd-disaggregation. smg: the label "
            "kv_connector=NixlConnector on prefill servers. Ray: build_pd_openai_app. See docs/howto/routers.md."
        ),
    ),
    "router_skips_prefill": (
        "the router sends the request to no prefill server, or to another one than was named",
        "Name this prefill server in the settings of the router, and check that the router finds it healthy.",
    ),
    "router_skips_decode": (
        "the router answers, and the decode server had no request: another server answered",
        "Name this decode server in the settings of the router, or give the doctor the servers of this router.",
    ),
    "router_drops_ticket": (
        "the router asks for a ticket, and does not carry it to the decode server",
        "Let the router add kv_transfer_params of the prefill server's answer to the decode server's request.",
    ),
    "router_changes_ticket": (
        "the router changes the ticket, so that its signature does not fit",
        "Let the router pass kv_transfer_params through unchanged; kvflow ticket shows what a ticket says.",
    ),
    "ticket_unused": (
        "the decode server had a request with a ticket, and moved nothing",
        "Start the decode server with kv_role kv_consumer or kv_both, and read its log.",
    ),
    FailureCode.TRANSFER_FAILED.value: (
        "a transfer failed with a code that this release does not know",
        "Run the same release of kvflow everywhere, and look for the code in the log of the decode server.",
    ),
    "connector_defect": (
        "the connector raised an exception that vLLM did not see",
        "This is a defect of kvflow: report it with the traceback from the log.",
    ),
    "server_restarted": (
        "counters of a server became smaller: it was started again, or several servers share the URL",
        "Name one server, not a load balancer, and run the doctor again.",
    ),
}
"""Code -> meaning and remedy: kvflow does not run, or does not move bytes."""

_WARNING = {
    # NIXL and UCX.
    "nixl_missing": (
        "NIXL cannot be imported: workers read over TCP only",
        "Install the variant for your GPU: pip install nixl, nixl-cu12 or nixl-cu13. See docs/howto/deploy.md.",
    ),
    "ucx_restricted": (
        "a variable of UCX leaves out transports or devices that kvflow uses",
        "Unset the variable, or name all transports that the engines need. See docs/howto/gpus.md#environment.",
    ),
    "shared_memory_unused": (
        "two processes of this host read over TCP, because NIXL does not reach the memory of the other process",
        "Allow one process to read the other one's memory: see docs/howto/deploy.md.",
    ),
    "process_memory_denied": (
        "the kernel does not let a process copy the memory of another one, which UCX's cma needs",
        "Set /proc/sys/kernel/yama/ptrace_scope to 0, or give both containers SYS_PTRACE (docs/howto/deploy.md).",
    ),
    # Limits of the process and the host.
    "memlock_low": (
        "RDMA cannot register a cache, because little memory may be locked",
        "Set memlock to unlimited for the service (LimitMEMLOCK=infinity) or the container (--ulimit memlock=-1).",
    ),
    "open_files_low": (
        "few files may be open: each peer takes some",
        "Raise the limit: ulimit -n 65536, LimitNOFILE=65536, or --ulimit nofile=65536.",
    ),
    "shared_memory_small": (
        "/dev/shm is small: engines and UCX put queues there",  # noqa: S108 - a place, and no file
        "Give the container more: --shm-size 1g, --ipc=host, or a memory volume at /dev/shm.",
    ),
    "clock_unsynchronized": (
        "nothing synchronizes the clock of this host; tickets expire by wall clocks",
        "Run chrony or systemd-timesyncd on each host.",
    ),
    # Addresses.
    "advertise_loopback": (
        "the advertised address is a loopback address: no other host reaches it",
        "Advertise an address of a network interface. Ignore this if all engines run on this host.",
    ),
    "advertise_foreign": (
        "the advertised name or address is not one of this host",
        "Check that it leads here, as behind a NAT or a load balancer, and that the port is forwarded.",
    ),
    "host_unresolved": (
        "the name of this host does not resolve",
        "Add it to DNS or /etc/hosts, or advertise an address instead of a name.",
    ),
    # GPUs and network cards.
    "network_cards_hidden": (
        "the host has RDMA devices, and this process cannot open them",
        "Start the container with --device /dev/infiniband, --ulimit memlock=-1 and --cap-add IPC_LOCK.",
    ),
    "peer_memory_missing": (
        "nothing shows that network cards reach the memory of GPUs",
        "Load nvidia-peermem (modprobe nvidia-peermem), or use NVIDIA's open modules with Linux 5.12 or newer.",
    ),
    # Settings.
    "secret_suspicious": (
        "the secret begins or ends with a blank or a quotation mark, as a file or a shell adds it",
        "Compare the cluster that kvflow config prints on each host; remove the character if it was not meant.",
    ),
    "setting_doubtful": (
        "a setting is valid, and probably not meant",
        "Correct the setting.",
    ),
    # Between two hosts.
    "advertise_differs": (
        "the worker is reached at the address that was dialed, and advertises another one that is not",
        "Correct advertise of the worker: its readers dial the advertised address.",
    ),
    "clock_skewed": (
        "the clocks of both hosts differ: the age and the end of a ticket look wrong on the other host",
        "Synchronize both clocks with chrony or systemd-timesyncd.",
    ),
    "data_plane_slow": (
        "a faster data plane is there, and is not used",
        "See the evidence for what prevents it.",
    ),
    # Running engines and their router.
    "lease_lost": (
        "the lease ended before the decode server had released it",
        "Find out why no consumer read in time, or raise lease_s.",
    ),
    "lease_held": (
        "the lease was not released: its blocks stay in use until it runs out",
        "Follow the finding of the transfer. If there is none, examine the prefill server: kvflow doctor ENDPOINT.",
    ),
    "prompt_recomputed": (
        "the decode server computed the prompt again",
        "Follow the finding of the transfer. If there is none, report it.",
    ),
    "others_interfered": (
        "other requests moved the same counters: only what holds for all of them is concluded",
        "Run the doctor again when the servers are idle, or join the logs by the id in the evidence: kvflow trace.",
    ),
}
"""Code -> meaning and remedy: kvflow runs, and is slower or less safe than it could be."""

_BY_STATUS: tuple[tuple[Status, dict[str, tuple[str, str]]], ...] = (("failed", _FAILED), ("warning", _WARNING))

CODES = {name: Code(name, status, *texts) for status, listed in _BY_STATUS for name, texts in listed.items()}

assert len(CODES) == len(_FAILED) + len(_WARNING), "a code is listed twice"

REFUSED = 1
"""Exit status if something failed; 2 says that the command line is wrong."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was examined.

    Attributes:
        code: stable name of what someone may have to act on: one of ``CODES``, or of ``kvflow.errors.FailureCode``;
            empty for what is as it must be, and for a plain fact.
        status: ``note`` is a fact that may matter. After a ``warning`` kvflow runs, and is slower or less safe than it
            could be; after ``failed`` it does not run, or does not move bytes.
    """

    code: str = ""
    status: Status
    subject: str
    evidence: str
    remedy: str = ""


class FailureFigures(Struct, frozen=True, kw_only=True):
    """What failed: an error of kvflow, as ``--json`` prints it."""

    code: str
    message: str
    remedy: str


class Findings(Struct, frozen=True, kw_only=True):
    """What ``kvflow doctor --json`` prints: findings in the order of the examination, and how many are wrong."""

    findings: tuple[Finding, ...]
    failed: int
    warnings: int


def found(code: str, subject: str, evidence: str, *, remedy: str = "", status: Status | None = None) -> Finding:
    """Return a finding of a code of ``CODES``, with its status and remedy where the case does not decide them."""
    known = CODES[code]
    return Finding(
        code=code, status=status or known.status, subject=subject, evidence=evidence, remedy=remedy or known.remedy
    )


def ok(subject: str, evidence: str) -> Finding:
    """Return what is as it must be."""
    return Finding(status="ok", subject=subject, evidence=evidence)


def note(subject: str, evidence: str, *, remedy: str = "") -> Finding:
    """Return a fact that may matter."""
    return Finding(status="note", subject=subject, evidence=evidence, remedy=remedy)


def failure_of(error: KvflowError) -> FailureFigures:
    """Return an error as it is printed."""
    return FailureFigures(code=str(error.code), message=error.message, remedy=error.remedy)


def failure(error: KvflowError | FailureFigures, subject: str) -> Finding:
    """Return an error of kvflow as a finding, with the code and the remedy of the error."""
    return Finding(code=str(error.code), status="failed", subject=subject, evidence=error.message, remedy=error.remedy)


def summarized(findings: Iterable[Finding]) -> Findings:
    """Count what was found."""
    listed = tuple(findings)
    counts = {status: sum(each.status == status for each in listed) for status in ("failed", "warning")}
    return Findings(findings=listed, failed=counts["failed"], warnings=counts["warning"])


def exit_status(findings: Findings, *, strict: bool = False) -> int:
    """Return 1 if something failed, or with ``strict`` if something warns; otherwise 0."""
    return REFUSED if findings.failed or (strict and findings.warnings) else 0
