"""The fields with which callers say what an answer must look like."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]
Schema = dict[str, Any] | bool | str  # a JSON schema, or its text


class JsonSchema(BaseModel):
    """``response_format.json_schema``."""

    model_config = ConfigDict(extra="allow")

    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """``response_format``: what the whole answer must be."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """``structured_outputs``: the same, as vLLM has it. At most one of the fields is given."""

    model_config = ConfigDict(extra="allow")

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
