"""The expiry of certificates, of which alerts warn."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from moesaic.cluster.security.expiry import expiry_s, show_expiry
from tests.certificates import certificate

NAME = "moesaic_tls_certificate_expiry_timestamp_seconds"


def told_by_openssl(cert: Path) -> float:
    command = ["openssl", "x509", "-in", str(cert), "-noout", "-enddate"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    when = datetime.strptime(told.strip(), "notAfter=%b %d %H:%M:%S %Y GMT")
    return when.replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("days", ["1", "9000", "36500"])  # the last two are written in two ways
def test_the_expiry_is_that_which_openssl_tells(days: str, tmp_path: Path) -> None:
    cert = certificate(tmp_path, "own", "-addext", "basicConstraints=critical,CA:FALSE", days=days)

    assert expiry_s(cert.read_bytes()) == told_by_openssl(cert)
    assert expiry_s(b"a line before\n" + cert.read_bytes()) == told_by_openssl(cert)


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nMAMwAQA=\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        b"-----END CERTIFICATE----------BEGIN CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIQ=\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_certificate_is_refused_and_stops_nothing(pem: bytes) -> None:
    with pytest.raises(ValueError, match="certificate"):
        expiry_s(pem)
    show_expiry(own=pem, authority=pem)


def test_no_cut_or_changed_certificate_raises_another_error(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "own").read_bytes()
    body = pem.split(b"\n")
    for line in range(1, len(body) - 2):
        for changed in (body[:line] + body[line + 1 :], [*body[:line], body[1], *body[line:]]):
            show_expiry(own=b"\n".join(changed))


def test_both_certificates_are_shown(tmp_path: Path) -> None:
    cert = certificate(tmp_path, "own")
    pem = cert.read_bytes()
    show_expiry(own=pem, authority=pem)

    for which in ("own", "authority"):
        assert REGISTRY.get_sample_value(NAME, {"certificate": which}) == told_by_openssl(cert)
