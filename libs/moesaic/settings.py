"""One frozen, typed settings model per service: flags before environment before defaults, the same
names in both.

``--slots-per-layer 16`` and ``MOESAIC_SLOTS_PER_LAYER=16`` say the same. Bad settings stop the
process at start, naming the setting, its value and what was expected.
"""

import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import AliasChoices, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

ENV_PREFIX = "MOESAIC_"
EXIT_USAGE = 2


class ServiceSettings(BaseSettings):
    """What every service is told."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        populate_by_name=True,
    )

    cluster: str = Field(
        "default",
        pattern=r"^[a-z0-9-]{1,40}$",
        description="name that keeps clusters on one Redis apart",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("redis-url", "MOESAIC_REDIS_URL", "REDIS_URL"),
        description="where control metadata lives",
    )
    secret: SecretStr = Field(
        SecretStr(""),
        description="cluster secret that authenticates tensor connections; the same everywhere",
    )
    worker_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="stable name of this process (default: role-host)",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    advertise_host: str = Field(
        "", description="address others reach this process at (default: --host)"
    )
    admin_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="least severe level to log"
    )
    grace_s: float = Field(
        30.0, ge=0, le=3600, description="seconds that running work gets to finish after SIGTERM"
    )

    def identity(self, role: str) -> str:
        """The worker id: given, or made of role and host name."""
        return self.worker_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(2)}"

    @property
    def reachable_host(self) -> str:
        """The host that goes into the addresses this process registers."""
        return self.advertise_host or self.host

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.host in ("0.0.0.0", "::") and not self.advertise_host:
            raise ValueError(
                f"--host {self.host} listens everywhere, which is no address others can dial; "
                "give the one they reach this process at with --advertise-host"
            )
        return self


class ModelSettings(ServiceSettings):
    """What every service that computes is told besides."""

    model: str = Field(..., description="HF-format model directory")
    dtype: str = Field(
        "float32", pattern="^(float32|bfloat16)$", description="type of weights and activations"
    )
    device: str = Field("cpu", pattern="^(cpu|cuda(:[0-9]+)?)$", description="where to compute")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads for computing; 0 leaves it to torch"
    )
    data_port: int = Field(
        0, ge=0, le=65535, description="UCXX port for tensors; 0 takes a free one"
    )
    transports: Literal["auto", "tcp", "shm"] = Field("auto", description="UCX transports to use")


AnySettings = TypeVar("AnySettings", bound=BaseSettings)


def load_settings(cls: type[AnySettings], arguments: Sequence[str] | None = None) -> AnySettings:
    """Read settings from flags and environment.

    Exits with status 2 and one line a problem on standard error if any is bad.
    """
    try:
        return CliApp.run(cls, cli_args=list(sys.argv[1:] if arguments is None else arguments))
    except ValidationError as error:
        for problem in error.errors():
            print(_problem(problem), file=sys.stderr)
    except SettingsError as error:
        print(f"settings: {error}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def _problem(problem: Any) -> str:
    if not problem["loc"]:  # about several settings at once; the text names them
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    name = name.removeprefix(ENV_PREFIX).lower().replace("_", "-")
    given = "" if problem["type"] == "missing" else f", got {str(problem['input'])[:100]!r}"
    flag = f"--{name} ({ENV_PREFIX}{name.upper().replace('-', '_')})"
    return f"{flag}: {problem['msg'][:1].lower()}{problem['msg'][1:]}{given}"


def redacted(settings: BaseSettings) -> dict[str, Any]:
    """The settings as plain values, secrets and credentials in URLs hidden."""
    values = settings.model_dump(mode="json")
    if "@" in str(values.get("redis_url", "")):
        scheme, rest = values["redis_url"].split("://", 1)
        values["redis_url"] = f"{scheme}://***@{rest.rsplit('@', 1)[1]}"
    return values
