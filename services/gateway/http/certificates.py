"""Certificate of the REST port: read at the start, and again whenever its files change."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from moesaic.cluster.security.expiry import show_expiry
from moesaic.errors import InvalidInput

LOOK_EVERY_S = 1.0
log = structlog.get_logger()


class Certificates:
    """The TLS context of a server, kept up with its files.

    Attributes:
        context: for new connections of the server.
    """

    def __init__(self, certfile: str, keyfile: str, ca_certs: str, cert_reqs: int) -> None:
        """Read the files.

        Args:
            certfile: certificate with those that lead to its authority, PEM.
            keyfile: its private key, PEM; empty: in ``certfile``.
            ca_certs: authorities of clients' certificates, PEM; empty: none.
            cert_reqs: 0: clients need no certificate; 1: one that is shown is checked; 2: they need one.

        Raises:
            InvalidInput: a file cannot be used, or one is missing; names the flag.
        """
        if not certfile:
            given = (
                "--ssl-keyfile" if keyfile else "--ssl-ca-certs" if ca_certs else "--ssl-cert-reqs"
            )
            raise InvalidInput("--ssl-certfile", f"is needed with {given}")
        if cert_reqs and not ca_certs:
            fix = f"is needed with --ssl-cert-reqs {cert_reqs}: it checks clients' certificates"
            raise InvalidInput("--ssl-ca-certs", fix)
        self._certfile, self._keyfile, self._ca_certs = certfile, keyfile, ca_certs
        self._verify_mode = ssl.VerifyMode(cert_reqs)
        self._seen = self._stamps()
        self.context = self._read()

    async def follow(self) -> None:
        """Adopt the files whenever they change; runs until cancelled. Files that cannot be used change nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            stamps = await asyncio.to_thread(self._stamps)
            if stamps == self._seen:
                continue
            self._seen = stamps
            try:
                # A new one: an authority cannot be taken out of a context, nor out of its sessions.
                self.context = await asyncio.to_thread(self._read)
            except InvalidInput as error:
                log.error("certificates.refused", problem=str(error))
            else:
                log.info("certificates.loaded", certfile=self._certfile)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = self._verify_mode
        key = self._keyfile or None
        with _naming("--ssl-certfile", self._certfile):
            pem = Path(self._certfile).read_bytes()
        with _naming("--ssl-keyfile", self._keyfile or self._certfile):
            Path(self._keyfile or self._certfile).read_bytes()
        with _naming("--ssl-certfile", self._certfile, f" with key {key}" if key else ""):
            # An empty password, or OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(self._certfile, key, password="")
        if self._ca_certs:
            with _naming("--ssl-ca-certs", self._ca_certs):
                context.load_verify_locations(self._ca_certs)
        show_expiry(rest=pem)
        return context

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(file) for file in (self._certfile, self._keyfile, self._ca_certs) if file]


@contextmanager
def _naming(flag: str, file: str, beside: str = "") -> Iterator[None]:
    """Turn failures of reading a file into an error of its flag."""
    try:
        yield
    except (OSError, ValueError) as error:  # TLS's own errors are of the first kind
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        told = str(why).lower().replace("_", " ")
        raise InvalidInput(flag, f"cannot use {file}{beside}: {told}") from None


def _stamp(file: str) -> tuple[int, ...] | None:
    """Tell one version of a file from another; None: it is not there."""
    try:
        found = Path(file).stat()
    except (OSError, ValueError):  # no path has a NUL
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
