"""Settings of an attention worker."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from moesaic.services.attention.settings.assembly import AssemblySettings
from moesaic.services.attention.settings.modes import ModeSettings
from moesaic.services.attention.settings.ranks import RankSettings
from moesaic.services.attention.settings.rows import AnswerSettings, RoutedSettings, RowSettings
from moesaic.services.attention.settings.shares import ShareSettings
from moesaic.settings import MaxModelLen, ModelSettings
from moesaic.usage.flags import Unlisted

MIN_KV_BLOCKS = 8


class StandbySettings(ModeSettings):
    """Settings of workers that the scheduler activates."""

    modes: ClassVar[tuple[str, ...]] = ("local", "routed", "gathered", "all-to-all")

    standby: bool = Field(
        False,
        description="start on standby: loaded and warm, but without work until activation",
    )


class AttentionSettings(
    StandbySettings,
    RankSettings,
    AssemblySettings,
    ShareSettings,
    RoutedSettings,
    RowSettings,
    AnswerSettings,
):
    """Settings of an attention worker."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "dispatch": "Experts",
        "kv_blocks": "KV and steps",
        **ModelSettings.groups,
    }

    dispatch: Annotated[
        Literal["local", "routed", "gathered", "all-to-all"], Unlisted(("all-to-all",))
    ] = Field(
        "routed",
        description="place where experts are computed: in this process (local; gathered: with experts "
        "fetched from other attention workers), or by expert workers (routed)",
    )
    recovery_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="longest time that running requests wait for a lost expert worker before they fail",
    )
    kv_blocks: int = Field(
        0, ge=0, le=1 << 22, description="KV blocks of 16 tokens each; 0: as many as memory allows"
    )
    kv_memory_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share for KV blocks of the memory that is free after the weights are loaded",
    )
    max_model_len: MaxModelLen = 0
    max_num_seqs: int = Field(
        64, ge=1, le=4096, description="largest number of sequences in one step"
    )
    max_num_batched_tokens: int = Field(
        2048, ge=16, le=1 << 20, description="largest number of rows in one step"
    )
    step_target_s: float = Field(
        0.25,
        ge=0,
        le=600,
        description="target duration of a step, which limits the prompt rows in it by the speed of the "
        "last steps; 0: always allow --max-num-batched-tokens",
    )
    max_num_queued_reqs: int = Field(
        512,
        ge=1,
        le=1 << 20,
        description="largest number of queued requests; further ones are rejected",
    )
    max_num_queued_tokens: int = Field(
        1 << 20,
        ge=1,
        le=1 << 40,
        description="largest number of prompt tokens of queued requests; further requests are rejected",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep computed KV blocks for prompts with the same prefix"
    )
    store_scoring_kv: bool = Field(
        True,
        description="store the KV of prompts that are only scored, unless a request sets store_kv to false",
    )
    sweep_bytes: int = Field(
        1 << 28,
        ge=0,
        le=1 << 44,
        description="memory for scoring without stored KV: hidden states, and one layer's keys and values",
    )
    block_secret: SecretStr = Field(
        SecretStr(""),
        description="secret of the names of cached KV blocks; the same in gateways (default: derived "
        "from --secret)",
    )
    deterministic: bool = Field(
        False,
        description="give bitwise equal results for any batch and placement; requires float32 on a CPU "
        "with compiled kernels. With routed, workers return the output of each expert",
    )

    @field_validator("kv_blocks")
    @classmethod
    def _are_enough(cls, kv_blocks: int) -> int:
        if 0 < kv_blocks < MIN_KV_BLOCKS:
            raise ValueError(f"must be 0 or at least {MIN_KV_BLOCKS}")
        return kv_blocks

    @model_validator(mode="after")
    def _deterministic_on_a_cpu(self) -> Self:
        if self.deterministic and self.device != "cpu":
            raise ValueError(f"--deterministic needs --device cpu, got {self.device}")
        return self
