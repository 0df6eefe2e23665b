"""Fields that prescribe the form of an answer."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from moesaic.services.gateway.fields.bounded import Bounded

AllowedTexts = Annotated[list[str], Field(min_length=1, max_length=1024)]
Schema = dict[str, Any] | bool | str  # a JSON schema, or its text


class BodyPart(Bounded):
    """Base of the objects in a body. A number is no text, and neither a truth value nor a fraction is an integer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class JsonSchema(BodyPart):
    """``response_format.json_schema``."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="refuse keywords that no grammar can enforce")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BodyPart):
    """``response_format``: what the whole answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BodyPart):
    """``structured_outputs``: the same, as vLLM has it. At most one of the fields is given."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: AllowedTexts | None = None
