"""``kvflow proxy``: a small router that sends each request to one prefill server and one decode server in turn."""

from typing import Literal

from msgspec import Struct


class ProxyConfig(Struct, frozen=True, kw_only=True):
    """The servers, and the limits of clients.

    Attributes:
        prefill: base URLs of prefill servers, at least one; they take turns.
        decode: base URLs of decode servers, at least one; they take turns.
        keepers: control endpoints of decode engines that keep, by their base URLs. A prefill server is told which of
            them has answered the beginning of a text last, of 65,536 texts.
        dispatch: ``concurrent``: ask both at once if the last answer of the prefill server says that decode servers may
            read a prompt while it computes it.
        prefill_timeout_s: seconds before the proxy asks the next prefill server.
        requests_max: most requests at once, from their headers on; further requests get 503. A server accepts as many
            by default.
        headers_timeout_s: timeout from the connection, or from the previous answer, to the end of a request's headers.
            They fit in one or two packets, so this is mostly the timeout of an idle connection.
        body_timeout_s: timeout for a body, plus the time for the bytes that its headers announce at ``body_rate_min``.
        body_rate_min: slowest rate of a body, in bytes per second. The slowest mobile links reach 16 KiB.
        body_bytes_max: most bytes of a request, or of an answer that is not streamed. A million token ids are 8 MiB; a
            picture may be larger.
        write_timeout_s: timeout for a client to read 64 KiB of an answer, beyond what the kernels buffer.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    keepers: dict[str, str] = {}
    dispatch: Literal["serial", "concurrent"] = "serial"
    prefill_timeout_s: float = 300.0
    requests_max: int = 1024
    headers_timeout_s: float = 20.0
    body_timeout_s: float = 20.0
    body_rate_min: int = 16 << 10
    body_bytes_max: int = 64 << 20
    write_timeout_s: float = 30.0
