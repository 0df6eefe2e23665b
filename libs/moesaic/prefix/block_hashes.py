"""Names of KV blocks by their content: equal names mean equal tokens, from a prompt's start on.

To find a block by its name is to learn that somebody computed the same text, so nobody may construct
a name: the hash is cryptographic and keyed, chained over all blocks before. It begins at a root that
parts models, tenants (by their salt) and quality levels.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256

BLOCK_SIZE = 16  # tokens that one name stands for
HASH_BYTES = 16


def naming_key(block_secret: str, cluster_secret: str = "") -> bytes:
    """Make the key with which equal blocks get equal names everywhere.

    Args:
        block_secret: for this key alone, so that nobody needs another secret to name blocks.
        cluster_secret: source of the key otherwise; the key does not give it away.
    """
    return sha256((block_secret or cluster_secret).encode()).digest()


class BlockHasher:
    """Names the blocks of prompts for one model; equal arguments give equal names everywhere."""

    def __init__(self, key: bytes, model_digest: str, block_size: int) -> None:
        """Name by a key.

        Args:
            key: a secret of at most 64 bytes.
            model_digest: parts models.
            block_size: tokens of a block.
        """
        self._key, self._model_digest, self._block_size = key, model_digest, block_size
        self._keyed = blake2b(digest_size=HASH_BYTES, key=key, person=b"moesaic.block")

    @property
    def naming(self) -> bytes:
        """Digest that only hashers with the same names share; it says nothing about the key."""
        told = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.naming")
        told.update(f"{self._block_size} {self._model_digest}".encode())
        return told.digest()

    def root(self, salt: str = "") -> bytes:
        """Make the root that the first block's name is chained to.

        Args:
            salt: parts requests that must not find each other's blocks.
        """
        root = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.root")
        for part in (self._model_digest, salt):
            encoded = part.encode()
            root.update(len(encoded).to_bytes(8, "little") + encoded)
        return root.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the names of full blocks that ``hashes`` lacks.

        Args:
            hashes: names of the first blocks; more are appended.
            root: the root of the prompt.
            tokens: all its token ids, below 2**32.
        """
        size = self._block_size
        packed = array("I", tokens[len(hashes) * size : len(tokens) // size * size]).tobytes()
        parent = hashes[-1] if hashes else root
        for start in range(0, len(packed), 4 * size):
            block = self._keyed.copy()
            block.update(parent + packed[start : start + 4 * size])
            parent = block.digest()
            hashes.append(parent)
