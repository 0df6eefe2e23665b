"""Settings of rows that go to expert workers, or to other sites."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesaic.messages.scheduling import SCHEDULINGS
from moesaic.messages.wire import WireDtype
from moesaic.services.attention.settings.modes import ModeSettings
from moesaic.usage.flags import OneOf


class AnswerSettings(ModeSettings):
    """Settings of all modes that wait for other processes within a layer."""

    modes: ClassVar[tuple[str, ...]] = ("routed", "gathered", "all-to-all", "collaborative")

    expert_timeout_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="longest wait for the answers of a layer to up to 512 rows; in proportion for more rows",
    )


class RowSettings(ModeSettings):
    """Settings of the modes whose rows travel to experts."""

    modes: ClassVar[tuple[str, ...]] = ("routed", "collaborative")

    wire_dtype: WireDtype = Field(
        "own",
        description="format of rows and sums between attention and expert workers: their own dtype, or "
        "int8 with a scale for each row, smaller but rounded",
    )

    @model_validator(mode="after")
    def _bits_are_the_same(self) -> Self:
        if self.deterministic and self.wire_dtype != "own":
            raise ValueError(
                f"--deterministic needs --wire-dtype own, got {self.wire_dtype}: rounded rows give other bits"
            )
        return self


class RoutedSettings(ModeSettings):
    """Settings of ``routed`` alone."""

    modes: ClassVar[tuple[str, ...]] = ("routed",)

    exchange: Literal["auto", "direct", "reduce", "relay"] = Field(
        "auto",
        description="exchange with expert workers on other nodes: direct, or collected by node first "
        "(reduce, relay); auto: relay for many rows, else direct",
    )
    expert_scheduling: Annotated[str, OneOf(SCHEDULINGS, "expert_schedulings")] = Field(
        "aebs",
        description="choice among replicas: balanced by measured costs (aebs) or by the number of "
        "activated experts (aebs-memory-bound), or fixed by the placement (static)",
    )

    @model_validator(mode="after")
    def _sums_are_the_same(self) -> Self:
        if self.deterministic and self.exchange in ("reduce", "relay"):
            raise ValueError(
                f"--deterministic needs --exchange direct (or none), got {self.exchange}: on the way, "
                "sums are added up as experts are placed"
            )
        return self
