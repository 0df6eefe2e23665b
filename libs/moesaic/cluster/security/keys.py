"""Keys made from the cluster's secret, one a purpose: a leak of one reveals no other."""

import hmac


def derived_key(secret: bytes, purpose: str) -> bytes:
    """Derive the key for ``purpose``, 32 bytes; keys of an empty secret are known to everyone."""
    return hmac.digest(secret, f"moesaic {purpose}".encode(), "sha256")
