"""Settings of experts that are divided among attention workers."""

from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from moesaic.services.attention.settings.modes import ModeSettings


class ShareSettings(ModeSettings):
    """Settings of ``gathered``, and of the baseline ``all-to-all``."""

    modes: ClassVar[tuple[str, ...]] = ("gathered", "all-to-all")

    share: str = Field(
        "0/1",
        pattern=r"^[0-9]{1,4}/[0-9]{1,4}$",
        description="share of the experts that this worker holds, such as 0/2 for the first of two",
    )

    @field_validator("share")
    @classmethod
    def _is_one_of(cls, share: str) -> str:
        index, _, count = share.partition("/")
        if int(index) >= int(count):
            raise ValueError("must be like 0/2, the first of two")
        return share

    @model_validator(mode="after")
    def _the_baseline_is_on_cpus(self) -> Self:
        if self.dispatch == "all-to-all" and self.device != "cpu":
            raise ValueError(f"--dispatch {self.dispatch} needs --device cpu, got {self.device}")
        return self
