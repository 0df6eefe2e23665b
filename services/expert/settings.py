"""What an expert worker is told."""

from pydantic import Field

from moesaic.settings import ModelSettings


class ExpertSettings(ModelSettings):
    """Settings of an expert worker."""

    slots_per_layer: int = Field(
        0, ge=0, le=4096, description="expert slots per layer; 0: one for every expert of the model"
    )
