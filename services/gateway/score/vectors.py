"""Vectors of prompts: workers pool hidden states, and callers get them shortened, normalised and encoded."""

import base64
import math
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.fields.embedding import EmbeddingWire
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.replies.accounts import Provenance, Usage
from moesaic.services.gateway.replies.embedding import Vector
from moesaic.services.gateway.score.reading import carry_out
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import POOLING_LAST, POOLING_MEAN, Embedding, Pooled, Scores

_POOLINGS = {"last": POOLING_LAST, "mean": POOLING_MEAN}


@dataclass(frozen=True)
class Pooling:
    """Vectors of all prompts of a request, float32 as workers gave them, and what they took."""

    vectors: list["array[float]"]
    usage: Usage
    provenance: Provenance


async def pool(
    admitted: Admitted[EmbeddingWire], prompts: Sequence[Sequence[int]], field: str
) -> Pooling:
    """Have the vector of each prompt computed, or none.

    Args:
        admitted: the request.
        prompts: token ids.
        field: field of the body that the prompts are made of.

    Raises:
        TenantLimited: the tenant may not have so many tokens now.
        MoesaicError: a vector cannot be computed.
    """
    work = Embedding(pooling=_POOLINGS[admitted.body.moesaic.pooling])
    runs, found = [Run(prompt, work, admitted.terms) for prompt in prompts], dict[int, Pooled]()

    def take(i: int, event: Scores | Pooled) -> None:
        assert isinstance(event, Pooled)
        found[i] = event

    usage, provenance = await carry_out(admitted, runs, field, take)
    size = admitted.gateway.language.config.hidden_size
    vectors = [_checked(found.get(i, Pooled()), size) for i in range(len(runs))]
    return Pooling(vectors, usage, provenance)


def check_dimensions(asked: int | None, allowed: Collection[int]) -> None:
    """Check that a model's vectors may be cut to ``asked`` numbers.

    Raises:
        InvalidInput: they may not.
    """
    if asked is not None and asked not in allowed:
        is_range = isinstance(allowed, range)
        told = f"1 to {max(allowed)}" if is_range else ", ".join(map(str, sorted(allowed)))
        fix = f"this model's vectors have {told} numbers; vectors of other sizes were not trained"
        raise InvalidInput("dimensions", f"{fix}: leave it out")


def written(vector: "array[float]", body: EmbeddingWire) -> Vector:
    """Shorten, normalise and encode a vector as the body asks."""
    vector = vector[: body.dimensions]
    length = math.hypot(*vector) if body.normalizes else 1.0
    if length not in (0.0, 1.0):
        vector = array("f", [value / length for value in vector])
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(_swapped(vector).tobytes()).decode()


def _checked(pooled: Pooled, size: int) -> "array[float]":
    """Check a worker's vector.

    Raises:
        MoesaicError: it has not ``size`` numbers.
    """
    count = len(pooled.values) / 4
    vector = array("f")
    if count == size:
        vector.frombytes(pooled.values)
    if count != size or not all(map(math.isfinite, vector)):
        wanted = f"expected {size} numbers of an attention worker"
        raise MoesaicError(f"{wanted}, got {count:g}, or some that are no numbers")
    return _swapped(vector)


def _swapped(vector: "array[float]") -> "array[float]":
    """Change between this machine's order of bytes and the little-endian one."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector
