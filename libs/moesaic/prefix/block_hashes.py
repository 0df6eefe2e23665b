"""Names of KV blocks by their content: equal names mean equal tokens, from a prompt's start on.

Whoever finds a block by its name learns that somebody computed the same text, so a name must not be
constructible: the hash is cryptographic and keyed, chained over all blocks before, and begins at a
root that parts models, tenants (by their salt) and quality levels.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256

HASH_BYTES = 16


def naming_key(block_secret: str, cluster_secret: str = "") -> bytes:
    """The key of all who must give equal blocks equal names.

    Args:
        block_secret: given for this alone, so that who names blocks need not hold another secret.
        cluster_secret: what the key is made from otherwise; it cannot be told from the key.
    """
    return sha256((block_secret or cluster_secret).encode()).digest()


class BlockHasher:
    """Names the blocks of prompts for one model; equal arguments give equal names everywhere."""

    def __init__(self, key: bytes, model_digest: str, block_size: int) -> None:
        """``key``: a secret of at most 64 bytes; ``block_size``: tokens a block."""
        self._key, self._model_digest, self._block_size = key, model_digest, block_size
        self._keyed = blake2b(digest_size=HASH_BYTES, key=key, person=b"moesaic.block")

    @property
    def naming(self) -> bytes:
        """Tells whether another hasher gives the same names; says nothing about the key."""
        told = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.naming")
        told.update(f"{self._block_size} {self._model_digest}".encode())
        return told.digest()

    def root(self, salt: str = "", *, exact: bool = False) -> bytes:
        """What the first block's name is chained to.

        Args:
            salt: parts those who must not find each other's blocks.
            exact: never find blocks of those who accept degraded computation.
        """
        root = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.root")
        for part in (self._model_digest, "exact" if exact else "standard", salt):
            encoded = part.encode()
            root.update(len(encoded).to_bytes(8, "little") + encoded)
        return root.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the names of those full blocks of ``tokens`` (ids below 2**32) that ``hashes``,
        the names of the first blocks, does not have yet."""
        size = self._block_size
        packed = array("I", tokens[len(hashes) * size : len(tokens) // size * size]).tobytes()
        parent = hashes[-1] if hashes else root
        for start in range(0, len(packed), 4 * size):
            block = self._keyed.copy()
            block.update(parent + packed[start : start + 4 * size])
            parent = block.digest()
            hashes.append(parent)
