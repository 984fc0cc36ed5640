"""Released routers before the engines of a deployment, started as docs/howto/routers.md says."""

import json
from collections.abc import Callable

from .engines import free_port, look
from .howto import PREFILL_PORT, PROXY_PORT, ROUTERS_PAGE, command
from .servers import Deployment, Server, fetch


def start_vllm_router(deployment: Deployment, second: Server | None = None) -> Server:
    """Start ``vllm-router``, if need be with a second prefill server."""
    further = f" --prefill {second.url}" if second else ""
    return _launch(deployment, "vllm-router", command("vllm-router", page=ROUTERS_PAGE) + further)


def start_smg(deployment: Deployment, second: Server | None = None) -> Server:
    """Start ``smg``, and tell it of the servers, if need be of a second prefill server."""
    front = _launch(deployment, "smg", command("smg launch", page=ROUTERS_PAGE))
    adding = command("curl", "NixlConnector", page=ROUTERS_PAGE)
    deployment.run(adding, {PROXY_PORT: front.port})
    _wait_workers(front, 2)
    if second:
        deployment.run(adding, {PROXY_PORT: front.port, PREFILL_PORT: second.port})  # the decode server is known
        _wait_workers(front, 3)
    return front


def start_unlabeled_smg(deployment: Deployment, prefill: Server) -> Server:
    """Start ``smg`` with the servers on its command line, which says nothing of a connector."""
    servers = f" --prefill {prefill.url} --decode {deployment.decode.url}"
    front = _launch(deployment, "smg-unlabeled", command("smg launch", page=ROUTERS_PAGE) + servers)
    _wait_workers(front, 2)
    return front


STARTS: dict[str, Callable[[Deployment], Server]] = {
    "kvflow proxy": lambda deployment: deployment.proxy,
    "vllm-router": start_vllm_router,
    "smg": start_smg,
}
"""What may stand before the servers -> how it is started."""


def _launch(deployment: Deployment, name: str, shell: str) -> Server:
    port = free_port()
    # All routers have one port for metrics unless they are told otherwise.
    metrics = f" --prometheus-host 127.0.0.1 --prometheus-port {free_port()}"
    front = deployment.serve(name, deployment.fitted(shell, {PROXY_PORT: port}) + metrics, port)
    front.wait_ready()
    return front


def _wait_workers(front: Server, number: int) -> None:
    """Wait until ``smg`` knows that so many servers are well; it answers before that."""
    look(
        lambda: json.loads(fetch(f"{front.url}/workers"))["workers"],
        lambda workers: len(workers) == number and all(each["is_healthy"] for each in workers),
        lambda workers: f"{front.name} knows of {workers}",
    )
