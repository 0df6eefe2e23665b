"""One frozen, typed settings model per service: flags before environment before files before
defaults, the same names in all.

``--slots-per-layer 16``, ``MOESAIC_SLOTS_PER_LAYER=16`` and a file ``moesaic_slots_per_layer`` in
``/run/secrets``, where containers get their secrets, say the same; an empty variable says nothing.
Bad settings stop the process at start, naming the setting, its value and what was expected.
"""

import os
import secrets
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from moesaic.addresses import host_port, is_address, is_everywhere, is_name, public_url
from moesaic.usage.flags import Flag, WrongFlag, flags_of, read_flags
from moesaic.usage.help import print_help
from moesaic.usage.names import unknown_files, unknown_variables
from moesaic.variables import ENV_PREFIX, SECRETS_DIR

EXIT_USAGE = 2


class Place(NamedTuple):
    """Where one plane of a service is found."""

    host: str  # listened on
    advertised_host: str  # dialled by others

    def advertised(self, address: str) -> str:
        """``host:port`` for others, of an address that is listened on."""
        return host_port(self.advertised_host, int(address.rpartition(":")[2]))


class ServiceSettings(BaseSettings):
    """What every service is told.

    Attributes:
        groups: fields that begin a group of the help, with its title: those that follow belong to it. The
            titles are shown in this order.
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
    }

    cluster: str = Field(
        "default",
        pattern=r"^[a-z0-9-]{1,40}$",
        description="name that keeps clusters on one Redis apart",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("MOESAIC_REDIS_URL", "REDIS_URL"),
        description="where control metadata lives",
    )
    secret: SecretStr = Field(
        SecretStr(""),
        description="cluster secret that authenticates services to each other; the same everywhere, "
        "and needed to listen beyond this machine",
    )
    tls_cert: str = Field(
        "", description="certificate of this service for gRPC, a PEM file; both ends show one"
    )
    tls_key: SecretStr = Field(SecretStr(""), description="its private key, a PEM file")
    tls_ca: str = Field("", description="the authority of all such certificates, a PEM file")
    tls_name: str = Field(
        "", description="name in all these certificates (default: the address that is dialled)"
    )
    worker_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="stable name of this process; {host} in it is the name of this machine "
        "(default: role-host-random)",
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on, or a name that stands for an address of this machine",
    )
    control_host: str = Field(
        "", description="the same for gRPC and metrics alone (default: --host)"
    )
    advertise_host: str = Field(
        "", description="what others dial instead of the addresses that are listened on"
    )
    admin_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level to log"
    )
    grace_s: float = Field(
        30.0, ge=0, le=3600, description="seconds that running work gets to finish after SIGTERM"
    )

    def identity(self, role: str) -> str:
        """The worker id: given, or made of role and host name."""
        return self.worker_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(2)}"

    @property
    def control(self) -> Place:
        """Where gRPC and metrics are."""
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
        """Flags, which come before these, then environment, then files."""
        directory = _secrets_directory()
        files = [SecretsSettingsSource(settings_cls, directory)] if directory else []
        return init_settings, env_settings, *files

    @field_validator("worker_id", mode="before")
    @classmethod
    def _name_the_machine(cls, worker_id: Any) -> Any:
        if not isinstance(worker_id, str):
            return worker_id
        return worker_id.replace("{host}", socket.gethostname())

    @field_validator("host", "control_host", "data_host", check_fields=False)
    @classmethod
    def _is_address_or_name(cls, host: str) -> str:
        if host and not (is_address(host) or is_name(host)):
            raise ValueError("must be an IP address or a host name, without a port")
        return host

    @model_validator(mode="after")
    def _control_can_be_dialled(self) -> Self:
        return self._must_be_dialled("control_host")

    def _must_be_dialled(self, setting: Literal["control_host", "data_host"]) -> Self:
        own: str = getattr(self, setting)
        host = own or self.host
        if is_everywhere(host) and not self.advertise_host:
            flag = setting.replace("_", "-")
            raise ValueError(
                f"--{flag if own else 'host'} {host} listens everywhere, which is no address "
                "others can dial; give the one they reach this process at with --advertise-host"
                + ("" if own else f", or one to listen on with --{flag}")
            )
        return self


class ModelSettings(ServiceSettings):
    """What every service that computes is told besides."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        **ServiceSettings.groups,
        "data_host": "Network",
    }

    model: str = Field(..., description="HF-format model directory")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of weights and activations"
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="round the weights of linear layers and experts to 8 bits (CPU only)"
    )
    device: str = Field("cpu", pattern="^(cpu|cuda(:[0-9]+)?)$", description="where to compute")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads for computing; 0 leaves it to torch"
    )
    data_host: str = Field("", description="--host for tensors alone (default: --host)")
    node: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="label of the machine: workers with the same one exchange tensors fast "
        "(default: the host name)",
    )
    data_port: int = Field(
        0, ge=0, le=65535, description="UCXX port for tensors; 0 takes a free one"
    )
    transports: Literal["auto", "tcp", "shm"] = Field("auto", description="UCX transports to use")

    @model_validator(mode="after")
    def _only_on_a_cpu(self) -> Self:
        if self.device != "cpu" and self.quantization != "none":
            raise ValueError(
                f"--quantization {self.quantization} needs --device cpu, got {self.device}"
            )
        if self.dtype != "float32" and self.quantization != "none":
            raise ValueError(
                f"--quantization {self.quantization} needs --dtype float32, got {self.dtype}"
            )
        return self

    @property
    def name_of_model(self) -> str:
        """What the model's directory is called."""
        return Path(self.model).resolve().name

    @property
    def node_name(self) -> str:
        """The label of the machine: given, or its host name."""
        return self.node or socket.gethostname()

    @property
    def data(self) -> Place:
        """Where tensors are."""
        return self._place(self.data_host)


AnySettings = TypeVar("AnySettings", bound=BaseSettings)


def flags_in(cls: type[BaseSettings]) -> list[Flag]:
    """The flags of a settings model, in its groups."""
    return flags_of(cls, getattr(cls, "groups", {}))


def load_settings(cls: type[AnySettings], arguments: Sequence[str] | None = None) -> AnySettings:
    """Read settings from flags, environment and files.

    Exits with status 2 and one line a problem on standard error if any is bad, and with 0 after the
    help, if that is asked for.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print_help(_program(), cls.__doc__ or "", flags_in(cls))
        raise SystemExit(0)
    try:
        return read_settings(cls, arguments)
    except BadSettings as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


class BadSettings(Exception):
    """Settings that no service can start with: one line a problem, each naming what to correct."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_settings(cls: type[AnySettings], arguments: Sequence[str]) -> AnySettings:
    """The settings that these flags, the environment and the files of secrets make.

    Raises:
        BadSettings: some cannot be used.
    """
    if problems := [*_unknown(cls)]:
        raise BadSettings(problems)
    try:
        given: dict[str, Any] = dict(read_flags(flags_in(cls), arguments))
        with warnings.catch_warnings():
            # What should be a secret and cannot be read as one is only warned of, then passed over.
            warnings.simplefilter("error", UserWarning)
            return cls(**given)
    except WrongFlag as error:
        raise BadSettings([f"{error} ('{_program()} --help' lists them)"]) from error
    except ValidationError as error:
        raise BadSettings([_problem(problem) for problem in error.errors()]) from error
    except SettingsError as error:
        why = f": {error.__cause__}" if error.__cause__ else ""
        raise BadSettings([f"settings: {error}{why}"]) from error


def _unknown(cls: type[BaseSettings]) -> Iterator[str]:
    """One line for each variable, and each file of secrets, that stands for no setting of anybody."""
    own = {f"{ENV_PREFIX}{name.upper()}" for name in cls.model_fields}
    yield from unknown_variables(os.environ, own)
    try:
        directory = _secrets_directory()
    except SettingsError as error:
        yield f"settings: {error}"
    else:
        yield from unknown_files(directory, own) if directory else ()


def _program() -> str:
    """How this process was called, for people."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"python -m services.{program.parent.name}"
    return program.name


def _secrets_directory() -> Path | None:
    given = os.environ.get(f"{ENV_PREFIX}SECRETS_DIR")
    directory = Path(given or SECRETS_DIR)
    if directory.is_dir():
        return directory
    if given:
        raise SettingsError(f"{ENV_PREFIX}SECRETS_DIR must name a directory, got {given!r}")
    return None


def _problem(problem: Any) -> str:
    if not problem["loc"]:  # about several settings at once; the text names them
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    name = name.removeprefix(ENV_PREFIX).lower().replace("_", "-")
    given = "" if problem["type"] == "missing" else f", got {str(problem['input'])[:100]!r}"
    flag = f"--{name} ({ENV_PREFIX}{name.upper().replace('-', '_')})"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return f"{flag}: {text[:1].lower()}{text[1:]}{given}"


def redacted(settings: BaseSettings) -> dict[str, Any]:
    """The settings as plain values, secrets and credentials in URLs hidden."""
    values = settings.model_dump(mode="json")
    if "redis_url" in values:
        values["redis_url"] = public_url(values["redis_url"])
    return values
