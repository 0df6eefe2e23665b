"""Settings of the gateway."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr

from moesaic.model_names import name_of_model
from moesaic.models.text.dialects.detection import ReasoningParser, ToolCallParser
from moesaic.origins import checked_names, checked_origins
from moesaic.prefix.policies import POLICY_NAMES
from moesaic.settings import MaxModelLen, ServiceSettings
from moesaic.usage.flags import OneOf


class GatewaySettings(ServiceSettings):
    """Settings of the gateway."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "api_key": "Access",
        "console_port": "Console",
        "max_body_bytes": "Limits",
        "files_dir": "Files and batches",
        "block_secret": "Choice of workers",
        "batch_max_inflight": "Files and batches",
        "metrics_compat": "Process",
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
        description="format of the model's tool calls, as named by vLLM; auto: detected from the chat "
        "template",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="format of the model's reasoning; auto: detected from the chat template",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="defaults of fields that a request leaves out; auto: from the model's "
        "generation_config.json; none: from this API",
    )
    port: int = Field(8000, ge=0, le=65535, description="REST port; 0 takes a free one")
    api_key: SecretStr = Field(
        SecretStr(""),
        description="key with all scopes; it or --api-keys-file is required beyond loopback",
    )
    api_keys_file: str = Field(
        "",
        description="JSON file of tenants with digests of their keys, scopes and limits; reloaded on change",
    )
    no_auth: bool = Field(False, description="serve beyond loopback without a key")
    allowed_hosts: str = Field(
        "",
        pattern=r"^[^\s/@]*( ?, ?[^\s/@]+)*$",
        description="further host names, comma-separated, that a gateway without keys accepts, such as "
        "those of a proxy or of a web page that calls it",
    )
    console_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of a listener for the console alone, which callers with keys need; 0: no such "
        "listener, and the console is on the REST port if callers need no keys",
    )
    console_host: str = Field(
        "127.0.0.1", description="address that --console-port listens on; its callers need keys too"
    )
    allowed_origins: Annotated[str, AfterValidator(checked_origins)] = Field(
        "",
        description="origins whose web pages may call this gateway, comma-separated or a JSON list, such "
        "as https://app.example; *: every page, which needs API keys or --no-auth",
    )
    allowed_methods: Annotated[str, AfterValidator(checked_names)] = Field(
        "*", description="methods that these pages may use, comma-separated or a JSON list; *: all"
    )
    allowed_headers: Annotated[str, AfterValidator(checked_names)] = Field(
        "*", description="headers that these pages may send, comma-separated or a JSON list; *: all"
    )
    allow_credentials: bool = Field(
        False,
        description="let these pages send cookies and other credentials that the browser adds",
    )
    ssl_certfile: str = Field(
        "",
        description="certificate of the REST port, a PEM file; REST is then HTTPS, TLS 1.2 or later",
    )
    ssl_keyfile: str = Field(
        "", description="private key of that certificate, a PEM file (default: in --ssl-certfile)"
    )
    ssl_ca_certs: str = Field(
        "", description="authorities that sign certificates of REST clients, a PEM file"
    )
    ssl_cert_reqs: int = Field(
        0,
        ge=0,
        le=2,
        description="certificates of REST clients; 0: none is asked for; 1: one that is shown is checked; "
        "2: each client needs one",
    )
    max_body_bytes: int = Field(
        4 << 20,
        ge=1024,
        le=1 << 30,
        description="largest request body, and largest stored response",
    )
    control_tokens_in_content: bool = Field(
        False,
        description="read control tokens such as <|im_end|> in the content of chat messages as tokens; "
        "otherwise they are text",
    )
    max_inflight: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="largest number of requests in flight; further ones are rejected",
    )
    site: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="site whose edge agent answers requests without a site while it accepts requests; "
        "default: any",
    )
    request_timeout_s: float = Field(
        300.0, gt=0, le=86400, description="longest duration of a request"
    )
    stream_idle_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="longest time without a message from an attention worker during a request",
    )
    recovery_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="longest time that requests wait for an attention worker if all are lost",
    )
    files_dir: str = Field(
        "",
        description="directory for /v1/files, /v1/batches and stored responses, which gateways may share; "
        "empty: nothing is stored",
    )
    files_quota_bytes: int = Field(
        10 << 30,
        ge=1 << 20,
        le=1 << 60,
        description="largest size of the files, batches and responses of a tenant",
    )
    files_keep_days: float = Field(
        30.0,
        gt=0,
        le=3650,
        description="time after which files, ended batches and responses are deleted",
    )
    block_secret: SecretStr = Field(
        SecretStr(""),
        description="secret of the names of cached KV blocks; the same in attention workers (default: "
        "derived from --secret)",
    )
    router_policy: Annotated[str, OneOf(POLICY_NAMES, "router_policies")] = Field(
        "prefix-flops", description="policy that chooses the attention worker of a request"
    )
    router_saturation_flops: float = Field(
        0.0,
        ge=0,
        le=1e24,
        description="amount of work that fills a worker; 0: 1.2 times that of its largest step",
    )
    batch_max_inflight: int = Field(
        16,
        ge=1,
        le=4096,
        description="largest number of concurrent requests of all batches; other requests have priority",
    )
    metrics_compat: Literal["none", "vllm"] = Field(
        "none", description="names of another server that the gateway's metrics have as well"
    )
