"""Settings of an attention worker."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from moesaic.addresses import is_everywhere, is_host_port
from moesaic.messages.scheduling import SCHEDULINGS
from moesaic.messages.wire import WireDtype
from moesaic.settings import MaxModelLen, ModelSettings
from moesaic.usage.flags import OneOf, Unlisted

MIN_KV_BLOCKS = 8


class AttentionSettings(ModelSettings):
    """Settings of an attention worker."""

    dispatches: ClassVar[tuple[str, ...]] = ("local", "routed", "gathered", "all-to-all")
    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "dispatch": "Experts",
        "kv_blocks": "KV and steps",
        "exchange": "Experts",
        **ModelSettings.groups,
    }

    dispatch: Annotated[
        Literal["local", "routed", "gathered", "all-to-all", "collaborative"],
        Unlisted(("all-to-all", "collaborative")),
    ] = Field(
        "routed",
        description="place where experts are computed: in this process (local; gathered: brought here from "
        "other attention workers meanwhile), or by expert workers (routed)",
    )
    share: str = Field(
        "0/1",
        pattern=r"^[0-9]{1,4}/[0-9]{1,4}$",
        description="gathered: the part of the experts that this worker has, 0/2 is the first of two",
    )
    offload: bool = Field(
        False,
        description="local and gathered: keep experts in a file, and only a few layers of them in memory",
    )
    offload_dir: str = Field(
        "", description="directory of that file (default: the user's cache directory)"
    )
    gather_window: int = Field(
        1,
        ge=1,
        le=1024,
        description="layers whose experts are brought here ahead, gathered or offloaded",
    )
    expert_memory_bytes: int = Field(
        0,
        ge=0,
        description="refuse to start if gathered or offloaded experts need more memory; 0: no limit",
    )
    kv_blocks: int = Field(
        0, ge=0, le=1 << 22, description="KV blocks of 16 tokens each; 0: as many as memory allows"
    )
    kv_memory_bytes: int = Field(
        0, ge=0, le=1 << 50, description="memory for KV blocks; 0: --kv-memory-fraction of it"
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
    decode_graph_tokens: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="local and routed, on a CUDA device: capture steps of single rows of up to so many tokens "
        "each, as CUDA graphs (routed: one for each layer, up to the exchange with its experts); 0: none",
    )
    deterministic: bool = Field(
        False,
        description="give the same bits whatever requests are beside one and wherever experts are: refuse to start "
        "but in float32 on a CPU with compiled kernels; routed: have outputs of experts one by one",
    )
    exchange: Literal["auto", "direct", "reduce", "relay"] = Field(
        "auto",
        description="routed: the way of rows to expert workers on other nodes: direct, or brought together "
        "on the node first (reduce, relay); auto: relay for many rows, else direct",
    )
    wire_dtype: WireDtype = Field(
        "own",
        description="routed: the form in which rows go to expert workers and sums come back: their own dtype, or "
        "int8 with a scale for each row: fewer bytes, with an error",
    )
    expert_timeout_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="longest wait for one layer's answers to up to 512 rows; in proportion for more",
    )
    expert_scheduling: Annotated[str, OneOf(SCHEDULINGS, "expert_schedulings")] = Field(
        "aebs",
        description="routed: the way expert workers choose among replicas: so that none has much more to do "
        "than others, by measured costs (aebs) or by experts alone (aebs-memory-bound); or by the "
        "placement alone (static)",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that divide heads, KV and MLPs of this worker's layers, its ranks; on GPUs, one each",
    )
    tensor_parallel_rank: int = Field(
        0, ge=0, le=63, description="rank of this process; 0 leads, and starts the others"
    )
    tensor_parallel_address: str = Field(
        "",
        description="host:port where the ranks meet, if they are started one by one, as on several machines; the "
        "host is the first rank's address (default: the first starts the others beside it)",
    )
    recovery_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="longest wait of running requests for a lost expert worker before they fail",
    )

    standby: bool = Field(
        False,
        description="begin on standby: loaded and warm, but without work until it is activated",
    )

    @field_validator("kv_blocks")
    @classmethod
    def _are_enough(cls, kv_blocks: int) -> int:
        if 0 < kv_blocks < MIN_KV_BLOCKS:
            raise ValueError(f"must be 0 or at least {MIN_KV_BLOCKS}")
        return kv_blocks

    @model_validator(mode="after")
    def _experts_stream_to_a_cpu(self) -> Self:
        if self.offload and self.dispatch not in ("local", "gathered"):
            raise ValueError(f"--offload needs --dispatch local or gathered, got {self.dispatch}")
        if (self.gathers_experts or self.dispatch == "all-to-all") and self.device != "cpu":
            raise ValueError(
                f"experts that are shared or offloaded need --device cpu, got {self.device}"
            )
        captures = self.device != "cpu" and self.dispatch in ("local", "routed")
        if self.decode_graph_tokens and not captures:
            raise ValueError(
                "--decode-graph-tokens needs --dispatch local or routed and a CUDA --device, got "
                f"{self.dispatch} and {self.device}"
            )
        index, _, count = self.share.partition("/")
        if int(index) >= int(count):
            raise ValueError(f"--share must be like 0/2, the first of two, got {self.share}")
        return self

    @model_validator(mode="after")
    def _serves_what_it_can(self) -> Self:
        if self.dispatch not in self.dispatches:
            choices = " or ".join(self.dispatches)
            raise ValueError(f"--dispatch must be {choices} here, got {self.dispatch}")
        if self.standby and self.dispatch == "collaborative":
            raise ValueError("--standby is for attention and expert workers: edge agents have none")
        return self

    @model_validator(mode="after")
    def _ranks_can_meet(self) -> Self:
        ranks, rank = self.tensor_parallel, self.tensor_parallel_rank
        if rank >= ranks:
            raise ValueError(f"--tensor-parallel-rank must be less than {ranks}, got {rank}")
        address = self.tensor_parallel_address
        if rank and not address:
            raise ValueError("--tensor-parallel-rank needs --tensor-parallel-address")
        if address and not address.startswith("/") and not _can_meet_at(address):
            raise ValueError(
                "--tensor-parallel-address must be host:port of the first rank, IPv6 in brackets, "
                f"got {address}"
            )
        if ranks > 1 and self.dispatch == "collaborative":
            raise ValueError(
                "--tensor-parallel is for attention workers: edge agents have one rank"
            )
        if ranks > 1 and self.decode_graph_tokens:
            raise ValueError("--tensor-parallel above 1 needs --decode-graph-tokens 0")
        if ranks > 2 and self.deterministic:
            raise ValueError(
                f"--deterministic needs --tensor-parallel 1 or 2, got {ranks}: the order of longer sums "
                "depends on the size of a step"
            )
        return self

    @property
    def gathers_experts(self) -> bool:
        """True if experts come to rows, layer by layer."""
        return self.offload or self.dispatch == "gathered"

    @model_validator(mode="after")
    def _deterministic_on_a_cpu(self) -> Self:
        if self.deterministic and self.device != "cpu":
            raise ValueError(f"--deterministic needs --device cpu, got {self.device}")
        if self.deterministic and self.exchange in ("reduce", "relay"):
            raise ValueError(
                f"--deterministic needs --exchange direct (or none), got {self.exchange}: on the way, "
                "sums are added up as experts are placed"
            )
        return self

    @model_validator(mode="after")
    def _packed_rows_have_a_way(self) -> Self:
        if self.wire_dtype == "own":
            return self
        if self.dispatch not in ("routed", "collaborative"):
            raise ValueError(
                f"--wire-dtype {self.wire_dtype} needs --dispatch routed, got {self.dispatch}: no rows travel"
            )
        if self.deterministic:
            raise ValueError(
                f"--deterministic needs --wire-dtype own, got {self.wire_dtype}: rounded rows give other bits"
            )
        return self


def _can_meet_at(address: str) -> bool:
    return is_host_port(address) and not is_everywhere(address.rpartition(":")[0])
