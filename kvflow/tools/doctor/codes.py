"""Every code of the doctor with its meaning and remedy, and the findings that carry them."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from kvflow.errors import FailureCode, KvflowError

Status = Literal["ok", "note", "warning", "failed"]


class Code(Struct, frozen=True):
    """One code.

    Attributes:
        name: the code. It does not change between releases.
        status: of a finding with this code, unless the case decides it.
        meaning: what it says.
        remedy: what to do.
    """

    name: str
    status: Status
    meaning: str
    remedy: str


_CODES = (
    # Software.
    Code(
        "package_missing",
        "failed",
        "a package that kvflow needs is not installed",
        "Install kvflow again with pip, in the environment of the engine: pip install kvflow.",
    ),
    Code(
        "release_untested",
        "note",
        "no test of kvflow has run with this release",
        "Look at docs/reference/compatibility.md. If something fails, install the release that is tested.",
    ),
    Code("release_unsupported", "failed", "kvflow refuses this release", "Install a release of the range."),
    Code(
        "curve_missing",
        "failed",
        "ZeroMQ was built without CURVE, so that no control channel can be encrypted",
        "Install pyzmq from its wheel: pip install --force-reinstall --only-binary :all: pyzmq.",
    ),
    # NIXL and UCX.
    Code(
        "nixl_missing",
        "warning",
        "NIXL cannot be imported: workers read over TCP only",
        "Install the variant for your GPU: pip install nixl, nixl-cu12 or nixl-cu13. See docs/howto/deploy.md.",
    ),
    Code(
        "nixl_variant_mismatch",
        "failed",
        "NIXL was built for another CUDA than torch",
        "Install the variant of NIXL with the major version of torch.version.cuda.",
    ),
    Code(
        "nixl_agent_failed",
        "failed",
        "a NIXL agent does not start: its process was refused, crashed, or did not end",
        "Read the output in the evidence. UCX_LOG_LEVEL=info shows what UCX finds; transport=tcp runs without NIXL.",
    ),
    Code(
        "ucx_restricted",
        "warning",
        "a variable of UCX leaves out transports or devices that kvflow uses",
        "Unset the variable, or name all transports that the engines need. See docs/howto/gpus.md#environment.",
    ),
    Code(
        "self_read_failed",
        "failed",
        "two processes of this host cannot read from each other over this data plane",
        "Follow the code and the text in the evidence.",
    ),
    Code(
        "shared_memory_unused",
        "warning",
        "two processes of this host read over TCP, because NIXL does not reach the memory of the other process",
        "Allow one process to read the other one's memory: see docs/howto/deploy.md.",
    ),
    Code(
        "process_memory_denied",
        "warning",
        "the kernel does not let a process copy the memory of another one, which UCX's cma needs",
        "Set /proc/sys/kernel/yama/ptrace_scope to 0, or give both containers SYS_PTRACE (docs/howto/deploy.md).",
    ),
    Code(
        "reader_ended",
        "failed",
        "the process that read crashed, or did not answer",
        "Report the output in the evidence, and read with --transport tcp meanwhile.",
    ),
    Code("bytes_differ", "failed", "a probe read other bytes than were offered", "Report it: this is a defect."),
    # Limits of the process and the host.
    Code(
        "memlock_low",
        "warning",
        "RDMA cannot register a cache, because little memory may be locked",
        "Set memlock to unlimited for the service (LimitMEMLOCK=infinity) or the container (--ulimit memlock=-1).",
    ),
    Code(
        "open_files_low",
        "warning",
        "few files may be open: each peer takes some",
        "Raise the limit: ulimit -n 65536, LimitNOFILE=65536, or --ulimit nofile=65536.",
    ),
    Code(
        "shared_memory_small",
        "warning",
        "/dev/shm is small: engines and UCX put queues there",  # noqa: S108 - a place, and no file
        "Give the container more: --shm-size 1g, --ipc=host, or a memory volume at /dev/shm.",
    ),
    Code(
        "clock_unsynchronized",
        "warning",
        "nothing synchronizes the clock of this host; tickets expire by wall clocks",
        "Run chrony or systemd-timesyncd on each host.",
    ),
    # Addresses.
    Code("port_taken", "failed", "another process listens on the port", "End that process, or choose another port."),
    Code(
        "bind_impossible",
        "failed",
        "this host cannot listen on the address",
        "Bind to an address of this host, or to 0.0.0.0 with an advertised address.",
    ),
    Code(
        "advertise_unreachable",
        "failed",
        "no peer can dial the advertised address",
        "Advertise the name or address at which other hosts reach this one, and a port from 1 to 65535.",
    ),
    Code(
        "advertise_loopback",
        "warning",
        "the advertised address is a loopback address: no other host reaches it",
        "Advertise an address of a network interface. Ignore this if all engines run on this host.",
    ),
    Code(
        "advertise_foreign",
        "warning",
        "the advertised name or address is not one of this host",
        "Check that it leads here, as behind a NAT or a load balancer, and that the port is forwarded.",
    ),
    Code(
        "host_unresolved",
        "warning",
        "the name of this host does not resolve",
        "Add it to DNS or /etc/hosts, or advertise an address instead of a name.",
    ),
    # GPUs and network cards.
    Code(
        "gpu_unusable",
        "failed",
        "there is a GPU or its driver, and torch cannot use it",
        "Install a build of torch for this GPU, and check CUDA_VISIBLE_DEVICES and nvidia-smi.",
    ),
    Code(
        "network_cards_hidden",
        "warning",
        "the host has RDMA devices, and this process cannot open them",
        "Start the container with --device /dev/infiniband, --ulimit memlock=-1 and --cap-add IPC_LOCK.",
    ),
    Code(
        "peer_memory_missing",
        "warning",
        "nothing shows that network cards reach the memory of GPUs",
        "Load nvidia-peermem (modprobe nvidia-peermem), or use NVIDIA's open modules with Linux 5.12 or newer.",
    ),
    Code(
        "expandable_segments",
        "failed",
        "torch allocates GPU memory in segments that other processes cannot map as a whole",
        "Remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF.",
    ),
    # Settings.
    Code(
        "secret_missing",
        "failed",
        "there is no cluster secret",
        "Set KVFLOW_CLUSTER_SECRET to the same text on every worker. Draw one with kvflow keys secret.",
    ),
    Code(
        "secret_malformed",
        "failed",
        "the cluster secret is too short",
        "Set KVFLOW_CLUSTER_SECRET to the same text on every worker. Draw one with kvflow keys secret.",
    ),
    Code(
        "secret_suspicious",
        "warning",
        "the secret begins or ends with a blank or a quotation mark, as a file or a shell adds it",
        "Compare the cluster that kvflow config prints on each host; remove the character if it was not meant.",
    ),
    Code("setting_doubtful", "warning", "a setting is valid, and probably not meant", "Correct the setting."),
    Code(
        "vllm_plugin_missing",
        "failed",
        "vLLM is installed, and kvflow's plugin is not registered",
        "Install kvflow with pip in the environment of vLLM; a folder in PYTHONPATH alone registers nothing.",
    ),
    # Between two hosts.
    Code(
        "name_unresolved",
        "failed",
        "the name of the worker does not resolve here",
        "Correct the name, or use an address; compare with getent hosts NAME.",
    ),
    Code(
        "connection_refused",
        "failed",
        "the host answers, and nothing listens on the port",
        "Start the worker, or correct the port. A worker on 127.0.0.1 is not reached from other hosts: set bind.",
    ),
    Code(
        "connection_timed_out",
        "failed",
        "nothing answers at the address: packets are dropped",
        "Open the port in firewalls, security groups and network policies, and check the address.",
    ),
    Code(
        "host_unreachable",
        "failed",
        "no route leads to the address",
        "Check the address, the routes and the network interface.",
    ),
    Code(
        "no_handshake",
        "failed",
        "the port accepts connections, and no worker answers there",
        "Use the control endpoint of a worker (bind), not its TCP plane, its HTTP page or the engine's API.",
    ),
    Code(
        "no_encryption",
        "failed",
        "what listens at the port speaks ZeroMQ without CURVE, as no worker of kvflow does",
        "Use the control endpoint of a worker (bind).",
    ),
    Code(
        "advertise_differs",
        "warning",
        "the worker is reached at the address that was dialed, and advertises another one that is not",
        "Correct advertise of the worker: its readers dial the advertised address.",
    ),
    Code(
        "data_port_unreachable",
        "failed",
        "the TCP plane of the worker cannot be reached",
        "Open its port too. Set tcp_bind to a fixed port and tcp_advertise to an address that readers reach.",
    ),
    Code(
        "clock_skewed",
        "warning",
        "the clocks of both hosts differ: the age and the end of a ticket look wrong on the other host",
        "Synchronize both clocks with chrony or systemd-timesyncd.",
    ),
    Code(
        "data_plane_slow",
        "warning",
        "a faster data plane is there, and is not used",
        "See the evidence for what prevents it.",
    ),
    Code(
        "no_probe",
        "failed",
        "the worker has stopped to offer probe blocks",
        "Start kvflow doctor --listen on that host.",
    ),
    # Running engines and their router.
    Code(
        "server_unreachable",
        "failed",
        "a server or the router does not answer",
        "Start it, or correct the URL. Its log says why it does not serve.",
    ),
    Code(
        "server_unhealthy",
        "failed",
        "a server answers that it is not healthy",
        "Wait until it has loaded its model, or read its log.",
    ),
    Code(
        "models_unknown",
        "failed",
        "a server does not say which models it serves",
        "Name a server of vLLM, and give --api-key if the server needs one.",
    ),
    Code(
        "model_differs",
        "failed",
        "the servers do not serve a model of the same name",
        "Start both servers with the same model and the same --served-model-name.",
    ),
    Code(
        "metrics_missing",
        "failed",
        "a server has no metrics of vLLM, so that nothing can be concluded",
        "Name the servers of vLLM themselves, not a router, and start them without --disable-log-stats.",
    ),
    Code(
        "connector_missing",
        "failed",
        "the server has no metrics of kvflow's connector",
        "Start it with --kv-transfer-config, and KVFlowConnector as its kv_connector: see docs/howto/vllm.md.",
    ),
    Code(
        "ticket_unanswered",
        "failed",
        "the prefill server was asked for a ticket and answered none",
        "Start it with kv_role kv_producer or kv_both, and read its log.",
    ),
    Code(
        "request_failed",
        "failed",
        "a server or the router answered a request with an error, or not at all",
        "Read the error in the evidence, and the log of who answered it.",
    ),
    Code(
        "answer_broken",
        "failed",
        "the answer through the router ended before it was complete",
        "Read the logs of the router and of the decode server: one of them closed the connection.",
    ),
    Code(
        "router_does_not_ask",
        "failed",
        "the router does not ask the prefill server for a ticket: nothing is transferred",
        "Tell the router which servers prefill. vllm-router: --vllm-pd-disaggregation. smg: the label "
        "kv_connector=NixlConnector on prefill servers. Ray: build_pd_openai_app. See docs/howto/routers.md.",
    ),
    Code(
        "router_skips_prefill",
        "failed",
        "the router sends the request to no prefill server, or to another one than was named",
        "Name this prefill server in the settings of the router, and check that the router finds it healthy.",
    ),
    Code(
        "router_skips_decode",
        "failed",
        "the router answers, and the decode server had no request: another server answered",
        "Name this decode server in the settings of the router, or give the doctor the servers of this router.",
    ),
    Code(
        "router_drops_ticket",
        "failed",
        "the router asks for a ticket, and does not carry it to the decode server",
        "Let the router add kv_transfer_params of the prefill server's answer to the decode server's request.",
    ),
    Code(
        "router_changes_ticket",
        "failed",
        "the router changes the ticket, so that its signature does not fit",
        "Let the router pass kv_transfer_params through unchanged; kvflow ticket shows what a ticket says.",
    ),
    Code(
        "ticket_unused",
        "failed",
        "the decode server had a request with a ticket, and moved nothing",
        "Start the decode server with kv_role kv_consumer or kv_both, and read its log.",
    ),
    Code(
        "lease_lost",
        "warning",
        "the lease ended before the decode server had released it",
        "Find out why no consumer read in time, or raise lease_s.",
    ),
    Code(
        "lease_held",
        "warning",
        "the lease was not released: its blocks stay in use until it runs out",
        "Check that the decode server reaches the prefill server's endpoint: kvflow doctor ENDPOINT.",
    ),
    Code(
        "prompt_recomputed",
        "warning",
        "the decode server computed the prompt again",
        "Follow the finding of the transfer. If there is none, report it.",
    ),
    Code(
        FailureCode.TRANSFER_FAILED.value,
        "failed",
        "a transfer failed with a code that this release does not know",
        "Run the same release of kvflow everywhere, and look for the code in the log of the decode server.",
    ),
    Code(
        "connector_defect",
        "failed",
        "the connector raised an exception that vLLM did not see",
        "This is a defect of kvflow: report it with the traceback from the log.",
    ),
    Code(
        "server_restarted",
        "failed",
        "counters of a server became smaller: it was started again, or several servers share the URL",
        "Name one server, not a load balancer, and run the doctor again.",
    ),
    Code(
        "others_interfered",
        "warning",
        "other requests moved the same counters: only what holds for all of them is concluded",
        "Run the doctor again when the servers are idle, or join the logs by the id in the evidence: kvflow trace.",
    ),
)

CODES = {code.name: code for code in _CODES}
"""Name -> code, in the order of the examination."""

assert len(CODES) == len(_CODES), "a code is listed twice"


REFUSED = 1
"""Exit status if something failed; 2 says that the command line is wrong."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was examined.

    Attributes:
        code: stable name of what someone may have to act on: one of ``CODES``, or of ``kvflow.errors.FailureCode``;
            empty for what is as it must be, and for a plain fact.
        status: ``ok``: as it must be. ``note``: a fact that may matter. ``warning``: kvflow runs, and is slower or less
            safe than it could be. ``failed``: kvflow does not run, or does not move bytes.
        subject: what was examined: a package, a limit, an address, a worker.
        evidence: what was seen there.
        remedy: what to do; empty for what is as it must be.
    """

    code: str = ""
    status: Status
    subject: str
    evidence: str
    remedy: str = ""


class Findings(Struct, frozen=True, kw_only=True):
    """What ``kvflow doctor --json`` prints.

    Attributes:
        findings: in the order in which they were examined.
        failed: how many of them failed.
        warnings: how many of them warn.
    """

    findings: tuple[Finding, ...]
    failed: int
    warnings: int


def found(code: str, subject: str, evidence: str, *, remedy: str = "", status: Status | None = None) -> Finding:
    """Return a finding with the status and the remedy that its code has.

    Args:
        code: one of ``CODES``.
        subject: what was examined.
        evidence: what was seen.
        remedy: replaces that of the code, where more is known.
        status: replaces that of the code, where the case decides it.
    """
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


def failure(error: KvflowError, subject: str) -> Finding:
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
