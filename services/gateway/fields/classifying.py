"""Body of ``/v1/classify``."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from moesaic.classification.forms import MAX_LABELS
from moesaic.services.gateway.fields.bodies import MAX_PROMPTS, AskingWire, as_list
from moesaic.services.gateway.fields.formats import BodyPart


class LabelWire(BodyPart):
    """A label with its description."""

    label: str
    description: str | None = None


class ClassifyWire(AskingWire):
    """Body of ``/v1/classify``."""

    input: str | list[str]
    labels: (
        Annotated[
            list[str | LabelWire],
            # Too few are told from none, by the route.
            Field(max_length=MAX_LABELS, json_schema_extra={"minItems": 2}),
        ]
        | None
    ) = None
    instruction: str | None = Field(None, max_length=10_000)
    method: Literal["auto", "token", "choice", "sequence", "multi"] = "auto"
    top_k: int | None = Field(None, ge=1)

    @field_validator("input")
    @classmethod
    def _input_is_bounded(cls, value: str | list[str]) -> str | list[str]:
        if not 1 <= len(as_list(value)) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} texts, got {len(value)}")
        return value

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(as_list(self.input)) * (len(self.labels or ()) if self.method == "multi" else 1)
