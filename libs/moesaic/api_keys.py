"""The file of API keys: tenants of the gateway with their scopes and limits, and digests of their keys."""

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from moesaic.errors import InvalidInput

Scope: TypeAlias = Literal["infer", "batch", "console", "admin"]
Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]

ALL_SCOPES: frozenset[Scope] = frozenset({"infer", "batch", "console", "admin"})
# Every caller where there are no keys, and the holder of the one key with all rights.
DEFAULT_TENANT = "default"
KEY_PREFIX = "moesaic_sk_"  # scanners for leaked secrets look for such prefixes


class TenantEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One tenant of the gateway.

    Attributes:
        name: in logs and metrics.
        keys: digests of the keys; several, so that a new key can be handed out before the old one goes.
        scopes: allowed by the keys.
        requests_per_minute, tokens_per_minute, max_concurrent: bounds in each gateway process; None is no bound.
        expires: end of the keys, with a time zone; None is never.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    keys: Annotated[list[Digest], msgspec.Meta(min_length=1)]
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    @property
    def is_expired(self) -> bool:
        """True once its keys have ended."""
        return self.expires is not None and datetime.now(UTC) >= self.expires


class ApiKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: list[TenantEntry]


_decoder = msgspec.json.Decoder(ApiKeys)


def read_api_keys(path: Path) -> ApiKeys:
    """Read the file.

    Raises:
        InvalidInput: the file cannot be read, or a field is wrong; the text names both.
    """
    try:
        return parse_api_keys(path.read_bytes())
    except OSError as error:
        raise InvalidInput("--api-keys-file", f"cannot read {path}: {error.strerror}") from error
    except InvalidInput as error:
        raise InvalidInput("--api-keys-file", f"{path}: {error}") from error


def parse_api_keys(text: bytes) -> ApiKeys:
    """Read the file's text, which is JSON.

    Raises:
        InvalidInput: a field is wrong; the text names it, such as ``tenants[0].scopes[1]``, but no key.
    """
    try:
        keys = _decoder.decode(text)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        field = place.strip("`").removeprefix("$").lstrip(".") or "tenants"
        raise InvalidInput(field, f"{problem[:1].lower()}{problem[1:]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("tenants", f"is not valid JSON: {error}") from error
    _check_unique(keys)
    return keys


def dump_api_keys(keys: ApiKeys) -> bytes:
    """Write the file's text."""
    return msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n"


def new_api_key() -> str:
    """Draw a key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Digest a key for storage; keys are random, so a fast digest is enough."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _check_unique(keys: ApiKeys) -> None:
    names, digests = {DEFAULT_TENANT}, set[str]()
    for i, tenant in enumerate(keys.tenants):
        if tenant.name in names:
            reserved = tenant.name == DEFAULT_TENANT
            why = "is the tenant without keys of its own" if reserved else "appears twice"
            raise InvalidInput(f"tenants[{i}].name", f"{tenant.name!r} {why}")
        names.add(tenant.name)
        for k, digest in enumerate(tenant.keys):
            if digest in digests:
                raise InvalidInput(f"tenants[{i}].keys[{k}]", "appears twice")
            digests.add(digest)
