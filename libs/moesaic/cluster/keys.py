"""Keys made from the cluster's secret, one a purpose: what one gives away says nothing of another."""

import hmac


def derived_key(secret: bytes, purpose: str) -> bytes:
    """The key for ``purpose``, 32 bytes; also of an empty secret, whose keys everyone knows."""
    return hmac.digest(secret, f"moesaic {purpose}".encode(), "sha256")
