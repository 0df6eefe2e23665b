"""Answers of ``/v1/embeddings`` and ``/pooling``."""

import msgspec

from moesaic.services.gateway.replies.accounts import ListReply

Vector = list[float] | str  # base64 of float32, little-endian


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    object: str = "embedding"
    index: int
    embedding: Vector


class Embeddings(ListReply, kw_only=True):
    """Answer of ``/v1/embeddings``."""

    data: list[Embedding]


class PooledInput(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    object: str = "pooling"
    index: int
    data: Vector


class PooledInputs(ListReply, kw_only=True):
    """Answer of ``/pooling``."""

    data: list[PooledInput]
