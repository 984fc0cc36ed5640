"""Examine addresses: those that this host would listen on or be reached at, and those that it dials."""

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from kvflow.config import WILDCARD_HOSTS, is_loopback
from kvflow.integrations.vllm.settings import is_here
from kvflow.tools.doctor.codes import Finding, found, note, ok

CONNECT_S = 3.0
"""A host in reach accepts or refuses within milliseconds. One that answers nothing has had two tries by then."""

GREETING_BYTES = 64
"""How long the greeting of ZeroMQ is, by RFC 37: a signature, a version, the name of a mechanism."""

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""The beginning of ours. After it the other side names its mechanism, and it has not seen yet that we name none."""

_LISTENING = "0A"


def examine(bind: str | None, advertise: str | None) -> Iterator[Finding]:
    """Yield findings about our own addresses.

    Args:
        bind: ``HOST:PORT`` to listen on; None is not examined.
        advertise: host, or ``HOST:PORT``, as peers reach us; None is not examined.
    """
    yield _own_name()
    if bind is not None:
        yield check_bind(bind)
        if advertise is None and split(bind)[0] in WILDCARD_HOSTS:
            evidence = f"{bind} is a wildcard, which no peer can dial, and no address is advertised"
            yield found("advertise_unreachable", "advertised address", evidence)
    if advertise is not None:
        yield check_advertised(advertise)


def check_bind(address: str) -> Finding:
    """Listen on an address for a moment."""
    host, port = split(address)
    subject = f"bind {address}"
    try:
        family, *_, place = socket.getaddrinfo(
            "0.0.0.0" if host == "*" else host.strip("[]"),  # noqa: S104 - as the worker does
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            probe.bind(place)
            probe.listen()
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return found("port_taken", subject, f"port {port} is in use{_by_whom(port)}")
        return found("bind_impossible", subject, str(error))
    return ok(subject, "this host can listen there")


def check_advertised(address: str) -> Finding:
    """Look at an address as a peer would."""
    host, port = split(address) if ":" in address.replace("tcp://", "").rpartition("]")[2] else (address, None)
    subject = f"advertise {address}"
    if host in WILDCARD_HOSTS or port == 0:
        reason = "a wildcard" if host in WILDCARD_HOSTS else "port 0, which stands for any port"
        return found("advertise_unreachable", subject, f"this is {reason}")
    try:
        resolved = _resolved(host)
    except (OSError, UnicodeError) as error:
        return found("advertise_unreachable", subject, f"the name does not resolve here: {error}")
    shown = f"resolves to {', '.join(resolved)}"
    if all(is_loopback(each) for each in resolved):
        return found("advertise_loopback", subject, f"{shown}, reachable only from this host")
    if not any(is_here(ip_address(each)) for each in resolved):
        return found("advertise_foreign", subject, f"{shown}, which no interface of this host has")
    return ok(subject, f"{shown}, an address of this host")


def dial(endpoint: str) -> tuple[str, list[Finding]]:
    """Connect to ``tcp://HOST:PORT``, and read how what listens there greets.

    Returns:
        The address that accepted, empty if none did, and what was found on the way.
    """
    host, port = split(endpoint)
    try:
        resolved = _resolved(host)
    except (OSError, UnicodeError) as error:
        return "", [found("name_unresolved", "address", f"{host} does not resolve here: {error}")]
    failures = []
    for address in resolved:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            failures.append(_not_reached(f"{address} port {port}", error))
            continue
        with connection:
            own, greeted = connection.getsockname()[0], _greeting(connection)
        reached = ok("address", f"{address} port {port} accepts connections, from {own}")
        return address, [reached, *_judge(greeted)]
    return "", failures


def accepts(endpoint: str) -> str:
    """Return why ``tcp://HOST:PORT`` accepts no connection; empty if it does."""
    host, port = split(endpoint)
    try:
        socket.create_connection((host.strip("[]"), port), timeout=CONNECT_S).close()
    except (OSError, UnicodeError, OverflowError) as error:  # a port above 65535 overflows
        return str(error) or type(error).__name__
    return ""


def own_address() -> str:
    """Return the address of the interface that leads out, as vLLM finds it; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
        except OSError:
            return "0.0.0.0"  # noqa: S104 - it is refused
        return str(probe.getsockname()[0])


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``tcp://HOST:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _resolved(host: str) -> list[str]:
    found_here = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found_here))


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        resolved = _resolved(name)
    except OSError as error:
        return found("host_unresolved", f"host name {name}", str(error))
    evidence = f"resolves to {', '.join(resolved)}"
    if all(is_loopback(each) for each in resolved):
        return note(f"host name {name}", f"{evidence}, reachable only from this host: advertise an address instead")
    return ok(f"host name {name}", evidence)


def _not_reached(where: str, error: OSError) -> Finding:
    if isinstance(error, TimeoutError):
        return found("connection_timed_out", "address", f"{where} did not answer within {CONNECT_S:g} s")
    if isinstance(error, ConnectionRefusedError):
        return found("connection_refused", "address", f"{where} refuses connections")
    return found("host_unreachable", "address", f"{where}: {error.strerror or error}")


def _greeting(connection: socket.socket) -> bytes:
    """Greet as ZeroMQ does, and return the answer, or as much of it as came."""
    answer = b""
    with suppress(OSError):
        connection.settimeout(CONNECT_S)
        connection.sendall(GREETING)
        while len(answer) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES - len(answer))):
            answer += more
    return answer


def _judge(greeted: bytes) -> Iterator[Finding]:
    """Yield what is wrong with a greeting, if something is."""
    if len(greeted) == GREETING_BYTES and greeted[0] == GREETING[0] and greeted[9] == GREETING[9]:
        mechanism = greeted[12:32].rstrip(b"\0").decode("ascii", "replace")
        if mechanism != "CURVE":
            yield found("no_encryption", "address", f"ZeroMQ answers with the mechanism {mechanism!r} instead of CURVE")
        return
    evidence = f"it answers {greeted[:40]!r}, which is not ZeroMQ" if greeted else "it sends nothing, or hangs up"
    yield found("no_handshake", "address", evidence)


def _by_whom(port: int) -> str:
    """Return who listens on a port, as far as /proc shows it to this user."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(each.readlink()) in inodes for each in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by process {process.name}: {command[:120]}"
    return ""
