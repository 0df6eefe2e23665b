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
        description="begin on standby: loaded and warm, but without work until it is activated",
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
        description="place where experts are computed: in this process (local; gathered: brought here from "
        "other attention workers meanwhile), or by expert workers (routed)",
    )
    recovery_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="longest wait of running requests for a lost expert worker before they fail",
    )
    kv_blocks: int = Field(
        0, ge=0, le=1 << 22, description="KV blocks of 16 tokens each; 0: as many as memory allows"
    )
    kv_memory_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="part of the memory that is free once the weights are loaded, for KV blocks",
    )
    max_model_len: MaxModelLen = 0
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sequences in one step")
    max_num_batched_tokens: int = Field(2048, ge=16, le=1 << 20, description="rows in one step")
    step_target_s: float = Field(
        0.25,
        ge=0,
        le=600,
        description="longest time that a step should take: prompts get as many rows as the last steps were fast "
        "enough for; 0: always all of --max-num-batched-tokens",
    )
    max_num_queued_reqs: int = Field(
        512, ge=1, le=1 << 20, description="requests that may wait before new ones are refused"
    )
    max_num_queued_tokens: int = Field(
        1 << 20,
        ge=1,
        le=1 << 40,
        description="tokens of waiting prompts before new requests are refused",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep computed KV blocks for prompts that begin alike"
    )
    store_scoring_kv: bool = Field(
        True,
        description="store the KV of prompts that are only scored, unless a request declines it",
    )
    sweep_bytes: int = Field(
        1 << 28,
        ge=0,
        le=1 << 44,
        description="memory for scoring without stored KV: hidden states, and one layer's keys and values",
    )
    block_secret: SecretStr = Field(
        SecretStr(""),
        description="guards the names of cached KV blocks; the same for gateways "
        "(default: made from --secret)",
    )
    deterministic: bool = Field(
        False,
        description="give the same bits whatever requests are beside one and wherever experts are: refuse to start "
        "but in float32 on a CPU with compiled kernels; routed: have outputs of experts one by one",
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
