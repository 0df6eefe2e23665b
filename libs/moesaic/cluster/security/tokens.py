"""Short-lived tokens that prove a gRPC caller's knowledge of the cluster's secret.

    scope:audience:expiry:nonce:mac

The audience is the worker id of the only service that accepts the token, or ``*``. The expiry is in
seconds since 1970 by the caller's clock. The mac is HMAC-SHA256, by a key made from the secret, of
all that stands before it. A token costs no round trip. In return, an intercepted token can be
replayed until it expires, at its audience and for its scope.
"""

import hmac
import secrets
import time
from collections.abc import Callable

from moesaic.cluster.security.scopes import Scope, allows

ANYONE = "*"
SKEW_S = 300  # by which the clocks of two machines may differ, unless settings say otherwise
LIFETIME_S = 60  # of a service's own tokens
MAX_LIFETIME_S = 24 * 3600  # of one that an operator asks for
MAX_TOKEN_CHARS = 512


class TokenRefused(Exception):
    """A token is invalid or does not allow the call.

    Attributes:
        allowed_more: a wider scope would help: the caller is known, and may not make this call.
    """

    def __init__(self, why: str, *, allowed_more: bool = False) -> None:
        self.allowed_more = allowed_more
        super().__init__(why)


class Tokens:
    """Maker and checker of one cluster's tokens.

    Args:
        secret: the cluster's secret; not empty.
        clock: seconds since 1970.
        skew_s: most seconds by which the clocks of two machines may differ.
    """

    def __init__(
        self, secret: bytes, clock: Callable[[], float] = time.time, skew_s: float = SKEW_S
    ) -> None:
        self._key, self._clock = derived_key(secret, "grpc token v1"), clock
        self._skew_s = skew_s
        self._current: dict[tuple[Scope, str], tuple[float, str]] = {}

    def current(self, scope: Scope, audience: str = ANYONE) -> str:
        """Give this process's own token, renewed after half of its lifetime."""
        made_at_s, token = self._current.get((scope, audience), (0.0, ""))
        now_s = self._clock()
        if not made_at_s <= now_s < made_at_s + LIFETIME_S / 2:
            # Audiences come and go with workers; old ones must not pile up.
            kept = self._current.items()
            self._current = {k: v for k, v in kept if v[0] > now_s - LIFETIME_S}
            token = self.new(scope, audience)
            self._current[scope, audience] = now_s, token
        return token

    def new(self, scope: Scope, audience: str = ANYONE, lifetime_s: float = LIFETIME_S) -> str:
        """Make a token that is valid for ``lifetime_s`` seconds."""
        expiry = int(self._clock() + lifetime_s)
        claims = f"{scope}:{audience}:{expiry}:{secrets.token_hex(8)}"
        return f"{claims}:{self._mac(claims)}"

    def check(self, token: str, needed: Scope, worker_id: str) -> None:
        """Check that a token allows ``needed`` at the service ``worker_id`` now.

        Raises:
            TokenRefused: it does not; the text names a fix.
        """
        claims, _, mac = token[: MAX_TOKEN_CHARS + 1].rpartition(":")
        parts = claims.split(":")
        if len(token) > MAX_TOKEN_CHARS or len(parts) != 4 or not token.isascii():
            raise TokenRefused("not a token of a cluster: make one with 'moesaic token'")
        if not hmac.compare_digest(self._mac(claims), mac):
            raise TokenRefused(
                "the token was made with another secret: give caller and service the same "
                "--secret (MOESAIC_SECRET)"
            )
        scope, audience, expiry, _ = parts
        left_s = int(expiry) - self._clock()
        if left_s < -self._skew_s:
            raise TokenRefused(
                f"the token expired {-left_s:.0f} s ago: make a new one, correct the clocks of the two "
                "machines, or raise --clock-skew-s"
            )
        if left_s > MAX_LIFETIME_S + self._skew_s:
            raise TokenRefused(
                f"the token is valid for another {left_s:.0f} s, more than the limit of {MAX_LIFETIME_S} s: "
                "correct the clocks of the two machines"
            )
        if audience not in (ANYONE, worker_id):
            raise TokenRefused(f"the token is for {audience}, but this is {worker_id}")
        if not allows(scope, needed):
            raise TokenRefused(
                f"the token allows {scope}, but this call needs {needed}: make one with "
                f"'moesaic token --scope {needed}'",
                allowed_more=True,
            )

    def _mac(self, claims: str) -> str:
        return hmac.digest(self._key, claims.encode(), "sha256").hex()


def derived_key(secret: bytes, purpose: str) -> bytes:
    """Derive the key for ``purpose``, 32 bytes; keys of an empty secret are known to everyone."""
    return hmac.digest(secret, f"moesaic {purpose}".encode(), "sha256")
