"""Settings of the gateway."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr

from moesaic.model_names import name_of_model
from moesaic.models.text.dialects.detection import ReasoningParser, ToolCallParser
from moesaic.prefix.policies import POLICY_NAMES
from moesaic.settings import MaxModelLen, ServiceSettings
from moesaic.usage.flags import OneOf


class GatewaySettings(ServiceSettings):
    """Settings of the gateway."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "api_key": "Access",
        "max_body_bytes": "Limits",
        "files_dir": "Files and batches",
        "block_secret": "Choice of workers",
        "batch_max_inflight": "Files and batches",
        **ServiceSettings.groups,
        "port": "Network",
    }

    @property
    def name_in_api(self) -> str:
        """Name of the model: as set, or its directory's or repository's."""
        return self.served_model_name or name_of_model(self.model)

    model: str = Field(
        ...,
        description="HF-format model directory, or a repository of the Hugging Face hub: owner/name or "
        "owner/name@revision; only its config and tokenizer are read",
    )
    served_model_name: str = Field(
        "", description="name in the API (default: the directory's name, or owner/name)"
    )
    max_model_len: MaxModelLen = 0
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="how the model writes tool calls, as vLLM names it; auto: as its chat template has it",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="how the model sets reasoning apart; auto: as its chat template has it",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: what a request leaves out is as the model's generation_config.json has it; "
        "none: as this API has it",
    )
    port: int = Field(8000, ge=0, le=65535, description="REST port; 0 takes a free one")
    api_key: SecretStr = Field(
        SecretStr(""),
        description="key of all rights; one, or --api-keys-file, is required beyond loopback",
    )
    api_keys_file: str = Field(
        "",
        description="JSON file of tenants with their keys' digests, scopes and limits; read again on change",
    )
    no_auth: bool = Field(False, description="serve beyond loopback without a key")
    allowed_hosts: str = Field(
        "",
        pattern=r"^[^\s/@]*( ?, ?[^\s/@]+)*$",
        description="names that callers may use for a gateway without keys, beside loopback's and --host, with "
        "commas: for a proxy before it, or a page of yours that calls it",
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="largest request body")
    control_tokens_in_content: bool = Field(
        False,
        description="let the content of chat messages spell control tokens, such as <|im_end|>; "
        "else what they spell is text",
    )
    max_inflight: int = Field(
        1024, ge=1, le=1 << 20, description="requests in the house before new ones are refused"
    )
    site: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="site whose edge agent answers requests that name none, as long as it takes them; "
        "default: any",
    )
    request_timeout_s: float = Field(
        300.0, gt=0, le=86400, description="longest time a request may take"
    )
    stream_idle_s: float = Field(
        30.0, gt=0, le=3600, description="longest silence of an attention worker within a request"
    )
    recovery_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="how long requests wait for an attention worker to come back when none is left",
    )
    files_dir: str = Field(
        "",
        description="directory for /v1/files and /v1/batches, which gateways may share; empty turns them off",
    )
    files_quota_bytes: int = Field(
        10 << 30, ge=1 << 20, le=1 << 60, description="what files and batches of a tenant may take"
    )
    files_keep_days: float = Field(
        30.0, gt=0, le=3650, description="how long files and batches that have ended are kept"
    )
    block_secret: SecretStr = Field(
        SecretStr(""),
        description="guards the names of cached KV blocks; the same for attention workers "
        "(default: made from --secret)",
    )
    router_policy: Annotated[str, OneOf(POLICY_NAMES, "router_policies")] = Field(
        "prefix-flops", description="how the attention worker of a request is picked"
    )
    router_consolidate: bool = Field(
        False,
        description="prefix-flops: under light load, fill one worker before the next is given work",
    )
    router_saturation_flops: float = Field(
        0.0,
        ge=0,
        le=1e24,
        description="work that fills a worker; 0: 1.2 times that of its largest step",
    )
    batch_max_inflight: int = Field(
        16, ge=1, le=4096, description="requests of all batches at once; others go first anyway"
    )
