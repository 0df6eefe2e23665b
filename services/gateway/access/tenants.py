"""Tenants and their keys, from the settings and the file of keys."""

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from moesaic.api_keys import (
    ALL_SCOPES,
    DEFAULT_TENANT,
    ApiKeys,
    Scope,
    TenantEntry,
    read_api_keys,
)
from moesaic.errors import InvalidInput
from moesaic.services.gateway.access.limits import TenantAllowance

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
BATCH_PRIORITY = 1000  # of requests in batches: less goes first, and interactive ones have 0


@dataclass(frozen=True)
class Tenant:
    """A party that may call."""

    name: str
    scopes: frozenset[Scope]
    entry: TenantEntry | None = None  # as the file has it
    allowance: TenantAllowance | None = None  # None: no limits

    @property
    def is_expired(self) -> bool:
        """True once its keys have ended."""
        return self.entry is not None and self.entry.is_expired


DEFAULT = Tenant(DEFAULT_TENANT, ALL_SCOPES)


class Tenants:
    """All parties that may call.

    Raises:
        InvalidInput: the file of keys is not valid.
    """

    def __init__(self, api_key: str, keys_file: str) -> None:
        self._own = [(_digest(api_key), DEFAULT)] if api_key else []
        self._file = Path(keys_file) if keys_file else None
        self._allowances: dict[
            str, TenantAllowance
        ] = {}  # of a tenant for as long as this process runs
        self._batch_allowances: dict[str, TenantAllowance] = {}
        self._keys: list[tuple[bytes, Tenant]] = list(self._own)
        if self._file is not None:
            self._seen = _stamp(self._file)
            self._install(read_api_keys(self._file))

    @property
    def need_keys(self) -> bool:
        """True if callers must send a key; otherwise everyone is the default tenant."""
        return bool(self._own) or self._file is not None

    @property
    def has_file(self) -> bool:
        """True if there may be tenants with limits."""
        return self._file is not None

    def find(self, key: str) -> Tenant | None:
        """Find the owner of a key. All keys are compared, so that the time tells nothing about any."""
        digest, found = _digest(key), None
        for known, tenant in self._keys:
            if secrets.compare_digest(digest, known):
                found = tenant
        return found

    def for_batches(self, name: str) -> Tenant | None:
        """Find the tenant of this name, as the caller of its batches' requests.

        Its limits hold for these once more, counted apart: a batch takes nothing from requests that somebody waits
        for.

        Returns:
            None while the tenant may have no batches.
        """
        if name == DEFAULT_TENANT:
            return DEFAULT if self._own or not self.need_keys else None
        for _, tenant in self._keys:
            if tenant.name == name and "batch" in tenant.scopes and not tenant.is_expired:
                return replace(tenant, allowance=self._batch_allowances[name])
        return None

    async def follow(self) -> None:
        """Adopt the file of keys whenever it changes; runs until cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            stamp = await asyncio.to_thread(_stamp, self._file)
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                keys = await asyncio.to_thread(read_api_keys, self._file)
            except InvalidInput as error:
                log.error("api_keys.refused", problem=str(error), kept=len(self._keys))
            else:
                self._install(keys)
                log.info("api_keys.loaded", tenants=len(keys.tenants), keys=len(self._keys))

    def _install(self, keys: ApiKeys) -> None:
        known = list(self._own)
        for entry in keys.tenants:
            tenant = self._tenant(entry)
            known += [(bytes.fromhex(key.removeprefix("sha256:")), tenant) for key in entry.keys]
        self._keys = known

    def _tenant(self, entry: TenantEntry) -> Tenant:
        allowance = self._allowances.setdefault(entry.name, TenantAllowance())
        for_batches = self._batch_allowances.setdefault(entry.name, TenantAllowance())
        allowance.set_limits(entry)
        for_batches.set_limits(entry)
        return Tenant(entry.name, frozenset(entry.scopes), entry, allowance)


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Tell one version of a file from another; None: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
