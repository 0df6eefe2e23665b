"""Sampling: the fields that say how tokens are picked, declared once.

A field of ``SamplingWire`` that carries ``OnWire`` goes to workers under its own name. A test holds the other places
against it: ``Sampling`` of attention.proto, ``Sampling`` of the engine, and the worker's reading of the one into the
other.

What a body leaves out is as the model's maker has it (``defaults``), and else as here.

| Field of a body | Left out | On the wire |
|---|---|---|
| ``temperature``, ``repetition_penalty`` | 1 | the number |
| ``top_p`` | 1 | the number; for 0 the smallest share, so that only the most likely token is left |
| ``top_k`` | 0, as -1: all tokens | the number |
| ``min_p``, ``presence_penalty``, ``frequency_penalty`` | 0 | the number |
| ``logit_bias``, ``allowed_token_ids`` | empty | the same |
| ``seed`` | drawn at random for each answer | one number per answer |
| ``bad_words`` | none | tokens of each word |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from moesaic.services.gateway.fields.bodies import InferenceWire, TokenId, TokenKey
from moesaic.v1.attention_pb2 import Sampling, Word

MAX_LOGIT_BIASES = 1024
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 128
INT64 = 1 << 63
# Workers count shares in steps of this, and read 0 as 1.
LEAST_TOP_P = 2.0**-53


@dataclass(frozen=True)
class OnWire:
    """A field that workers get by its own name.

    Attributes:
        neutral: value for the wire where the body has none, or one that means nothing.
        encode: from the body's value to the wire's.
    """

    neutral: Any
    encode: Callable[[Any], Any] = lambda value: value


def _without_sign(value: float) -> float:
    """Give zero for minus zero, which JSON can write: fields of 0 are left out on the wire."""
    return value or 0.0


def _once_each(token_ids: Sequence[int]) -> list[int]:
    """Leave out repetitions, so that there are no more than the vocabulary has."""
    return sorted(set(token_ids))


class LengthWire(InferenceWire):
    """Bounds of an answer's length."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="another name of max_tokens, which it overrides"
    )
    min_tokens: int = Field(0, ge=0, lt=1 << 31)

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of an answer, if the caller bounds them."""
        asked: int | None = getattr(self, self.answer_tokens_field)
        return asked

    @property
    def answer_tokens_field(self) -> str:
        """Name of the field that bounds them."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class SamplingWire(LengthWire):
    """Choice of an answer's tokens."""

    temperature: Annotated[float | None, OnWire(1.0)] = Field(None, ge=0, le=2)
    top_p: Annotated[float | None, OnWire(1.0, lambda p: max(p, LEAST_TOP_P))] = Field(
        None, ge=0, le=1, description="0: only the most likely token"
    )
    top_k: Annotated[int | None, OnWire(0, lambda k: max(0, k))] = Field(None, ge=-1, lt=1 << 31)
    min_p: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(None, ge=0, le=1)
    repetition_penalty: Annotated[float | None, OnWire(1.0)] = Field(None, gt=0, le=10)
    presence_penalty: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(None, ge=-2, le=2)
    frequency_penalty: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(
        None, ge=-2, le=2
    )
    logit_bias: Annotated[
        dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None, OnWire({})
    ] = Field(None, max_length=MAX_LOGIT_BIASES)
    allowed_token_ids: Annotated[list[TokenId] | None, OnWire((), _once_each)] = Field(
        None, max_length=MAX_ALLOWED
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    seed: int | None = Field(
        None,
        ge=-INT64,
        lt=INT64,
        description="of the first answer; each further one adds 1; default: random",
    )

    def sampling(
        self, seed: int, bad_words: Sequence[Word], defaults: "SamplingWire | None" = None
    ) -> Sampling:
        """Encode the fields for workers.

        Args:
            seed: of one answer; any integer, it wraps to 64 bits.
            bad_words: the tokens of ``bad_words``.
            defaults: for fields that are left out.
        """
        values = {}
        for name, on_wire in SAMPLED.items():
            value = getattr(self, name)
            if value is None and defaults is not None:
                value = getattr(defaults, name)
            values[name] = on_wire.neutral if value is None else on_wire.encode(value)
        return Sampling(**values, seed=wrapped(seed), bad_words=bad_words)


def wrapped(seed: int) -> int:
    """Wrap any integer to the 64 bits of a seed."""
    return (seed + INT64) % (2 * INT64) - INT64


SAMPLED: dict[str, OnWire] = {
    name: mark
    for name, field in SamplingWire.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, OnWire)
}
"""The fields that go to workers under their own names."""
