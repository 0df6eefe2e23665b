"""Certificates for gRPC: each end shows one and checks the other's.

The module imports little, for the health probe.
"""

from pathlib import Path
from typing import NamedTuple

import grpc

_PEM = "-----BEGIN "


class Tls(NamedTuple):
    """One process's certificate with its key, and the authority that it trusts; PEM."""

    cert: bytes
    key: bytes
    ca: bytes
    name: str = ""  # in all certificates of the cluster; empty: the address that is dialled

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make credentials of a server that refuses callers without a certificate of the authority."""
        pair = [(self.key, self.cert)]
        return grpc.ssl_server_credentials(pair, self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Make credentials of a caller that refuses servers without a certificate of the authority."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """Options of a channel, for a name in the certificates."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []


def read_tls(cert: str, key: str, ca: str, name: str = "") -> Tls | None:
    """Read certificates from settings, each a path or PEM text; None if none is given.

    Raises:
        ValueError: a setting is missing or cannot be read; the text names it.
    """
    given = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
    if not any(given.values()):
        return None
    read = {setting: _pem(setting, value) for setting, value in given.items()}
    return Tls(read["tls_cert"], read["tls_key"], read["tls_ca"], name)


def _pem(setting: str, value: str) -> bytes:
    flag = f"--{setting.replace('_', '-')} (MOESAIC_{setting.upper()})"
    if not value:
        raise ValueError(f"{flag} is missing: certificate, key and authority are needed together")
    if value.lstrip().startswith(_PEM):
        return value.encode()
    try:
        pem = Path(value).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag} {value[:100]}: cannot be read ({why})") from None
    if _PEM.encode() not in pem:
        raise ValueError(f"{flag} {value}: is not a PEM file")
    return pem
