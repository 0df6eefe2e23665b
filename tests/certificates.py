"""Keys and certificates of tests, made by OpenSSL."""

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(
    directory: Path,
    name: str,
    *options: str,
    of: str = "IP:127.0.0.1",
    days: str = "2",
    ca: str = "",
) -> Path:
    """Make ``name.key`` and ``name.pem``, and return the latter; skip the test if there is no OpenSSL.

    Args:
        directory: of the files.
        name: of the subject.
        options: of ``openssl req``.
        of: the alternative name.
        days: until it expires.
        ca: the name of its authority; without one it is its own.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", days)
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key") if ca else ()
    subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={of}")
    out = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    command = ["openssl", "req", "-x509", *key, *signer, *subject, *options, *out]
    subprocess.run(command, check=True, capture_output=True, cwd=directory)
    return directory / f"{name}.pem"
