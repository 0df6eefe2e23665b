"""The end of the time for which a certificate is valid, read from its DER: field 5 of the signed part of RFC 5280.

Python's ``ssl`` tells it only of certificates that authorities own, or that a peer has shown.
"""

import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from prometheus_client import Gauge

_expiry_s = Gauge(
    "moesaic_tls_certificate_expiry_timestamp_seconds",
    "Time since 1970 at which a certificate of this process expires; rest: of the REST port, the others: for gRPC",
    ["certificate"],
)
_UTC_TIME, _VERSION = 0x17, 0xA0


def show_expiry(**certificates: bytes) -> None:
    """Show when certificates expire: the first of each PEM file, by the name under which it is told."""
    for name, pem in certificates.items():
        # TLS decides about certificates, and says which are wrong.
        with suppress(ValueError):
            _expiry_s.labels(name).set(expiry_s(pem))


def expiry_s(pem: bytes) -> float:
    """Return the Unix time at which the first certificate of a PEM file expires.

    Raises:
        ValueError: there is no certificate that can be read.
    """
    text = pem.decode("ascii", "replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if not 0 <= begin < end:
        raise ValueError("has no certificate")
    try:
        der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])
        [(_, certificate)] = _parts(der)
        (_, signed), *_ = _parts(certificate)
        fields = [part for part in _parts(signed) if part[0] != _VERSION]
        _, (tag, until) = _parts(fields[3][1])
        # Two digits of a year are of 1950 to 2049.
        if tag == _UTC_TIME:
            until = (b"19" if until >= b"5" else b"20") + until
        return datetime.strptime(until.decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (IndexError, ValueError) as error:
        raise ValueError("is not a certificate of X.509") from error


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Give tag and content of each value that stands in ``der``."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            width = length & 0x7F
            length, at = int.from_bytes(der[at : at + width], "big"), at + width
        yield tag, der[at : at + length]
        at += length
