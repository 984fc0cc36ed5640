"""TLS 1.3 between two workers that know each other's certificate, by the standard library.

Each incarnation draws a key, and states the certificate of its public half over the control channel. There is no
authority: each side accepts exactly the certificate that the other has stated. Sessions are never resumed.
"""

import datetime as dt
import os
import ssl
from typing import NamedTuple

from kvflow.errors import ConfigInvalid

_SINCE = dt.timedelta(days=1)  # clocks may differ
_UNTIL = dt.timedelta(days=3650)  # longer than a worker runs: it ends with its incarnation


class _TlsSocket(ssl.SSLSocket):
    """Python drops one without closing it if the connection ends while it is being made."""

    def __del__(self) -> None:
        self.close()


class TlsIdentity(NamedTuple):
    """The certificate of one incarnation, DER, and its private key with it, PEM. Its ``repr`` shows neither."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "TlsIdentity()"

    def context(self, theirs: bytes, *, server: bool) -> ssl.SSLContext:
        """Return a context that accepts one certificate of the other side only, DER; see also ``is_of``.

        Raises:
            ssl.SSLError: it is no certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = _TlsSocket
        context.check_hostname = False  # the certificate is compared as a whole
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        if server:
            context.num_tickets = 0
        context.load_verify_locations(cadata=theirs)
        descriptor = os.memfd_create("kvflow")  # OpenSSL reads keys from files only, and no disk may have this one
        try:
            os.write(descriptor, self.key)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context


def is_of(sock: ssl.SSLSocket, theirs: bytes) -> bool:
    """Return whether the other side of a finished handshake has this certificate, and no other that it has signed."""
    return sock.getpeercert(binary_form=True) == theirs


def draw_identity() -> TlsIdentity:
    """Draw a key, and make its certificate.

    Raises:
        ConfigInvalid: the package ``cryptography`` is missing.
    """
    try:
        from cryptography import x509  # noqa: PLC0415 - loads a library that only encryption needs
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError as error:
        raise ConfigInvalid(
            'tcp_encryption = "tls" requires the package cryptography, which is not installed',
            remedy="Install kvflow[tls].",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvflow")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - _SINCE).not_valid_after(now + _UNTIL)
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return TlsIdentity(
        certificate.public_bytes(serialization.Encoding.DER),
        private + certificate.public_bytes(serialization.Encoding.PEM),
    )
