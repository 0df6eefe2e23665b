"""Settings of an expert worker."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from moesaic.settings import ModelSettings


class ExpertHostSettings(ModelSettings):
    """Settings of all that hold experts: expert workers and edge agents."""

    activation_window_s: float = Field(
        5.0,
        ge=0.1,
        le=3600,
        description="interval between reports to the scheduler of the experts that batches activate",
    )
    expert_load_series: int = Field(
        64,
        ge=0,
        le=1 << 16,
        description="largest number of experts whose load is a metric of its own; the most chosen ones have it",
    )
    weights_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port for workers that fetch experts; 0 takes a free one",
    )

    @model_validator(mode="after")
    def _data_can_be_dialled(self) -> Self:
        return self._must_be_dialled("data_host")


class ExpertSettings(ExpertHostSettings):
    """Settings of an expert worker."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "slots_per_layer": "Experts",
        "activation_window_s": "Experts",
        **ModelSettings.groups,
        "weights_port": "Network",
    }

    slots_per_layer: int = Field(
        0,
        ge=0,
        le=4096,
        description="expert slots per layer; 0: one for each expert of the model, or as many as fit the "
        "free memory of the device",
    )
    max_expert_bytes: int = Field(
        0,
        ge=0,
        description="memory limit of experts, with those held twice while a placement changes; 0: no limit",
    )
    standby: bool = Field(
        False,
        description="start on standby: registered and warm, but in no placement until activation",
    )
