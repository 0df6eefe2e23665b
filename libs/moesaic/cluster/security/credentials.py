"""The credentials of this process: the cluster's secret, and certificates.

A process belongs to one cluster, so its credentials are kept here, instead of being passed through
every call that leads to a connection; ``using`` sets them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesaic.cluster.security.tls import Tls, read_tls
from moesaic.cluster.security.tokens import SKEW_S, Tokens
from moesaic.errors import InvalidInput

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings  # not loaded by commands, which start sooner


@dataclass(frozen=True)
class Credentials:
    """The cluster's secret, empty if it has none, and certificates, if there are any.

    Attributes:
        skew_s: most seconds by which the clocks of two machines may differ.
    """

    secret: bytes = field(default=b"", repr=False)
    tls: Tls | None = field(default=None, repr=False)
    skew_s: float = SKEW_S
    tokens: Tokens | None = field(init=False, repr=False, compare=False)  # none without a secret

    def __post_init__(self) -> None:
        tokens = Tokens(self.secret, skew_s=self.skew_s) if self.secret else None
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def of(cls, settings: "ServiceSettings") -> "Credentials":
        """Read the credentials that settings name.

        Raises:
            InvalidInput: a certificate is missing or cannot be read.
        """
        try:
            tls = read_tls(
                settings.tls_cert,
                settings.tls_key.get_secret_value(),
                settings.tls_ca,
                settings.tls_name,
            )
        except ValueError as error:
            raise InvalidInput("tls", str(error)) from error
        return cls(settings.secret.get_secret_value().encode(), tls, settings.clock_skew_s)


_own = [Credentials()]


def own_credentials() -> Credentials:
    """Return this process's own credentials; without a secret until ``using`` sets some."""
    return _own[-1]


@contextmanager
def using(credentials: Credentials) -> Iterator[Credentials]:
    """Make ``credentials`` this process's own for the length of the block."""
    _own.append(credentials)
    try:
        yield credentials
    finally:
        _own.remove(credentials)
