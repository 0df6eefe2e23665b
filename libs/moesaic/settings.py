"""One frozen, typed settings model per service, read from four sources under the same names.

Flags come before environment before files before defaults: ``--slots-per-layer 16``,
``MOESAIC_SLOTS_PER_LAYER=16`` and a file ``moesaic_slots_per_layer`` in ``/run/secrets``, where
containers get their secrets, mean the same. An empty variable counts as unset. Bad settings stop the
process at start, naming the setting, its value and the expected form.
"""

import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from moesaic.addresses import host_port, is_address, is_everywhere, is_name, public_url
from moesaic.loopback import plain_host
from moesaic.messages.registry import Weights
from moesaic.model_names import name_of_model
from moesaic.usage.modes import foreign
from moesaic.usage.reading import secrets_directory
from moesaic.usage.variables import ENV_PREFIX

_THOUSANDS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def _read_length(length: object) -> object:
    """Read 32k as 32,000 and 32K as 32,768, as vLLM does."""
    if isinstance(length, str) and length[-1:] in _THOUSANDS and length[:-1].isdecimal():
        return int(length[:-1]) * _THOUSANDS[length[-1]]
    return length


MaxModelLen = Annotated[
    int,
    BeforeValidator(_read_length),
    Field(
        ge=0,
        le=1 << 26,
        description="largest number of tokens of prompt and answer together, such as 8192 or 8K (k is "
        "1000); 0: all positions of the model",
    ),
]


class Place(NamedTuple):
    """The hosts of one plane of a service."""

    host: str  # listened on
    advertised_host: str  # dialled by others

    def advertised(self, address: str) -> str:
        """Turn an address listened on into the ``host:port`` for others."""
        return host_port(self.advertised_host, int(address.rpartition(":")[2]))


class ServiceSettings(BaseSettings):
    """Settings of every service.

    Attributes:
        groups: fields that begin a group of the help, with its title; later fields belong to it too.
            The titles are shown in this order.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        env_ignore_empty=True,
    )
    groups: ClassVar[Mapping[str, str]] = {
        "host": "Network",
        "cluster": "Cluster",
        "log_level": "Process",
        "otlp_endpoint": "Traces",
    }

    cluster: str = Field(
        "default",
        pattern=r"^[a-z0-9-]{1,40}$",
        description="name of the cluster; several clusters can share one Redis",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("MOESAIC_REDIS_URL", "REDIS_URL"),
        description="Redis for control metadata",
    )
    secret: SecretStr = Field(
        SecretStr(""),
        description="secret that authenticates services to each other; the same in all services, and "
        "required to listen beyond this machine",
    )
    clock_skew_s: float = Field(
        300,
        ge=0,
        le=86400,
        description="largest difference between the clocks of two machines of the cluster, in seconds; "
        "tokens stay valid for a minute and this time",
    )
    tls_cert: str = Field(
        "", description="certificate of this service for gRPC, a PEM file; both ends need one"
    )
    tls_key: SecretStr = Field(
        SecretStr(""), description="private key of that certificate, a PEM file"
    )
    tls_ca: str = Field(
        "", description="certificate of the authority that signs all these certificates, a PEM file"
    )
    tls_name: str = Field(
        "",
        description="name in all these certificates (default: the address that a client connects to)",
    )
    worker_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="stable name of this process; {host} stands for the name of this machine (default: "
        "role-host-random)",
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on, or a name of such an address",
    )
    control_host: str = Field("", description="address for gRPC and metrics (default: --host)")
    advertise_host: str = Field(
        "", description="host that other services connect to instead of the listening addresses"
    )
    admin_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level to log"
    )
    grace_s: float = Field(
        30.0, ge=0, le=3600, description="seconds that running work has to finish after SIGTERM"
    )
    otlp_endpoint: str = Field(
        "",
        validation_alias=AliasChoices(
            "MOESAIC_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
        pattern=r"^((https?://)?[^/\s]+:[0-9]{1,5}/?)?$",
        description="collector that takes traces by OTLP over gRPC, such as http://127.0.0.1:4317; "
        "without one, there are no traces",
    )
    trace_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests that are traced, of those whose callers do not decide it; by "
        "default as OTEL_TRACES_SAMPLER says",
    )

    def identity(self, role: str) -> str:
        """Give the worker id, or make one of role and host name."""
        return self.worker_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(2)}"

    @property
    def node_name(self) -> str:
        """The label of the machine: its host name."""
        return socket.gethostname()

    @property
    def control(self) -> Place:
        """The place of gRPC and metrics."""
        return self._place(self.control_host)

    def _place(self, host: str) -> Place:
        host = host or self.host
        return Place(host, self.advertise_host or host)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources behind the flags: environment, then files."""
        directory = secrets_directory()
        files = [SecretsSettingsSource(settings_cls, directory)] if directory else []
        return init_settings, env_settings, *files

    @field_validator("worker_id", mode="before")
    @classmethod
    def _name_the_machine(cls, worker_id: Any) -> Any:
        if not isinstance(worker_id, str):
            return worker_id
        return worker_id.replace("{host}", socket.gethostname())

    @field_validator("advertise_host")
    @classmethod
    def _can_be_dialled(cls, host: str) -> str:
        if is_everywhere(host):
            raise ValueError(f"{host} is not an address that others can connect to")
        return host

    @field_validator("advertise_host", "host", "control_host", "data_host", check_fields=False)
    @classmethod
    def _is_address_or_name(cls, host: str) -> str:
        host = plain_host(host)
        if host and not (is_address(host) or is_name(host)):
            raise ValueError("must be an IP address or a host name, without a port")
        return host

    @model_validator(mode="after")
    def _has_what_its_mode_has(self) -> Self:
        if complaint := foreign(self):
            raise ValueError(complaint)
        return self

    @model_validator(mode="after")
    def _control_can_be_dialled(self) -> Self:
        return self._must_be_dialled("control_host")

    def _must_be_dialled(self, setting: Literal["control_host", "data_host"]) -> Self:
        own: str = getattr(self, setting)
        host = own or self.host
        if is_everywhere(host) and not self.advertise_host:
            flag = setting.replace("_", "-")
            raise ValueError(
                f"--{flag if own else 'host'} {host} listens on all addresses; give the address "
                "that others connect to with --advertise-host"
                + ("" if own else f", or one to listen on with --{flag}")
            )
        return self


class ModelSettings(ServiceSettings):
    """Further settings of every service that computes."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        **ServiceSettings.groups,
        "data_host": "Network",
    }

    model: str = Field(
        ...,
        description="HF-format model directory, or a repository of the Hugging Face hub: owner/name or "
        "owner/name@revision",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of weights in memory; auto: that of the checkpoint. On a GPU, activations and "
        "KV have the same type (not float16); on a CPU, they are float32",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="quantization of linear layers and experts to 8 bits (int8), or to 4 bits in groups "
        "of 32 inputs (int4, with 8 for embedding and head); CPU only",
    )
    device: str = Field(
        "cpu", pattern="^(cpu|cuda(:[0-9]+)?)$", description="device for computation"
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads for computation; 0: the default of torch"
    )
    data_host: str = Field("", description="address for tensors (default: --host)")
    node: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="label of the machine; workers with the same label use fast local exchange "
        "(default: the host name)",
    )
    data_port: int = Field(
        0, ge=0, le=65535, description="TCP port for tensors; 0 takes a free one"
    )
    transports: Literal["auto", "socket", "ring", "shm", "tcp"] = Field(
        "auto",
        description="transports of tensors: authenticated TCP (socket), rings in shared memory of a "
        "host (ring), UCX over shared memory (shm) or TCP (tcp; beyond this machine only "
        "with --private-network). The default auto takes ring within a host; between hosts "
        "it takes the RDMA devices in UCX_NET_DEVICES, else socket",
    )
    private_network: bool = Field(
        False,
        description="declare that only this cluster uses the network of --data-host; UCX may then use "
        "TCP there, which it reads before peers prove the cluster secret",
    )

    @model_validator(mode="after")
    def _only_on_a_cpu(self) -> Self:
        if self.device != "cpu" and self.quantization != "none":
            raise ValueError(
                f"--quantization {self.quantization} needs --device cpu, got {self.device}"
            )
        if self.device != "cpu" and self.dtype == "float16":
            raise ValueError(f"--dtype float16 needs --device cpu, got {self.device}")
        return self

    def weights_of(self, digest: str) -> Weights:
        """Describe this worker's weights, of a model with ``digest``, to its cluster."""
        return Weights(
            digest=digest,
            dtype=self.dtype,
            quantization=self.quantization,
            worker_id=self.worker_id,
        )

    @property
    def name_of_model(self) -> str:
        """The name of the model's directory, or of its repository."""
        return name_of_model(self.model)

    @property
    def node_name(self) -> str:
        """The label of the machine, by default its host name."""
        return self.node or socket.gethostname()

    @property
    def data(self) -> Place:
        """The place of tensors."""
        return self._place(self.data_host)


def redacted(settings: BaseSettings) -> dict[str, Any]:
    """Give the settings as plain values, with secrets and credentials in URLs hidden."""
    values = settings.model_dump(mode="json")
    if "redis_url" in values:
        values["redis_url"] = public_url(values["redis_url"])
    return values
