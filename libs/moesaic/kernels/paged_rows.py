"""The rows of a step that attend, and the place of keys and values in what is cached."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVLayout:
    """The place of keys and values in a cached row; heads share them in equal groups."""

    num_kv_heads: int
    key_dim: int  # head h's key begins at column h * key_dim
    value_dim: int
    value_column: int  # where the first head's value begins; 0: values are the keys' first columns

    @classmethod
    def grouped(cls, num_kv_heads: int, head_dim: int) -> "KVLayout":
        """All keys, then all values."""
        return cls(num_kv_heads, head_dim, head_dim, num_kv_heads * head_dim)

    @classmethod
    def latent(cls, kv_lora_rank: int, rope_dim: int) -> "KVLayout":
        """One head for all: the latent is its value, and with the rotated key its key."""
        return cls(1, kv_lora_rank + rope_dim, kv_lora_rank, 0)


@dataclass(frozen=True)
class PagedRows:
    """The query rows of ``B`` sequences: its last tokens of each. A row sees its own position and those
    before it.

    Tensors are int32, on the device of the queries. The two bounds are known to the host, so that
    a launch need not ask the device; they may be larger than what they bound.
    """

    first_rows: Tensor  # [B]: index of the sequence's first query
    num_rows: Tensor  # [B]
    lengths: Tensor  # [B]: cached tokens, those of the rows included
    block_tables: Tensor  # [B, M]; entries past the length are not read
    max_rows: int
    max_length: int
