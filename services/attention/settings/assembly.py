"""Settings of experts that come layer by layer."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from moesaic.services.attention.settings.modes import ModeSettings


class AssemblySettings(ModeSettings):
    """Settings of ``gathered``, and of ``local`` if it offloads."""

    modes: ClassVar[tuple[str, ...]] = ("local", "gathered")

    offload: bool = Field(
        False,
        description="keep experts in a file, and only a few layers of experts in memory",
    )
    offload_dir: str = Field(
        "", description="directory of the file of --offload (default: the user's cache directory)"
    )
    expert_memory_bytes: int = Field(
        0,
        ge=0,
        description="memory limit of gathered or offloaded experts, checked at start; 0: no limit",
    )

    @model_validator(mode="after")
    def _experts_stream_to_a_cpu(self) -> Self:
        if self.offload and self.device != "cpu":
            raise ValueError(f"--offload needs --device cpu, got {self.device}")
        return self
