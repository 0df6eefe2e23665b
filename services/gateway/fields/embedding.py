"""Bodies of ``/v1/embeddings`` and ``/pooling``: texts to turn into vectors."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from moesaic.services.gateway.fields.bodies import (
    TOKEN_IDS,
    Extension,
    InferenceWire,
    is_text_or_ids,
)
from moesaic.services.gateway.fields.messages import Message
from moesaic.services.gateway.fields.truncating import MEANING, KeptTokens

MAX_INPUTS = 2048  # as in OpenAI's API


class PoolingExtension(Extension):
    """The ``moesaic`` object of a request for vectors."""

    pooling: Literal["last", "mean"] = Field(
        "last", description="output of the last token, or mean of the outputs of all tokens"
    )


class EmbeddingWire(InferenceWire):
    """Body of ``/v1/embeddings``: ``input`` as in completions, or ``messages``."""

    input: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                TOKEN_IDS,
                {"type": "array", "items": TOKEN_IDS, "minItems": 1},
            ]
        },
    )
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, description="first numbers of each vector to keep, if the model allows it"
    )
    normalize: bool | None = Field(None, description="false: vectors keep their length")
    use_activation: bool | None = Field(None, description="another name of normalize")
    add_special_tokens: bool | None = Field(
        None, description="default: true for input; with messages it must not be true"
    )
    truncate_prompt_tokens: KeptTokens | None = Field(None, description=MEANING)
    add_generation_prompt: bool = False
    continue_final_message: bool | None = Field(
        None, description="true: end with the last message's text"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    moesaic: PoolingExtension = Field(default_factory=lambda: PoolingExtension.model_validate({}))

    # Checked by hand: a union of types reports every item once for each of them.
    @field_validator("input")
    @classmethod
    def _inputs(cls, value: Any) -> list[str | list[int]] | None:
        if value is None:
            return None
        inputs = [value] if is_text_or_ids(value) else value
        if not isinstance(inputs, list) or not all(is_text_or_ids(each) for each in inputs):
            raise ValueError(
                "must be a string, a list of strings, token ids, or a list of those, not empty"
            )
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise ValueError(f"must hold 1 to {MAX_INPUTS} inputs, got {len(inputs)}")
        if "" in inputs:
            raise ValueError(f"must not be an empty string, as number {inputs.index('')} is")
        return inputs

    @model_validator(mode="after")
    def _one_kind_is_given(self) -> "EmbeddingWire":
        if (self.input is None) == (self.messages is None):
            raise ValueError("send either input or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens must not be true with messages: their template adds them"
            )
        return self

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(self.input or (None,))

    @property
    def normalizes(self) -> bool:
        """True if vectors get the length 1."""
        return self.normalize is not False and self.use_activation is not False


class PoolingWire(EmbeddingWire):
    """Body of ``/pooling``."""

    task: Literal["embed"] = Field("embed", description="one vector for each input")
