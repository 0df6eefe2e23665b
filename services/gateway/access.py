"""Callers: their keys and scopes, their limits of requests and tokens, and the runs that they have at once.

Scopes are declared here alone. A route that is not named needs ``infer``, so a new one is closed until it is opened.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from moesaic.api_keys import (
    ALL_SCOPES,
    DEFAULT_TENANT,
    ApiKeys,
    Scope,
    TenantEntry,
    read_api_keys,
)
from moesaic.errors import InvalidInput, MoesaicError

NO_KEY = frozenset({"/livez", "/readyz", "/health"})
PROBED = NO_KEY | {"/load", "/metrics"}  # asked every few seconds by machines
ANY_KEY = frozenset({"/load", "/version", "/openapi.json", "/docs", "/docs/rapidoc.js"})
_SCOPES: dict[str, Scope] = {  # of these paths and all below them
    "/v1/files": "batch",
    "/v1/batches": "batch",
    "/metrics": "admin",
    "/v1/moesaic": "console",
}
# The page and its scripts hold nothing of the cluster.
CONSOLE_PAGE = "/console"
MINUTE_NS = 60 * 10**9
CONCURRENCY_RETRY_S = 1.0  # nobody knows when one of a tenant's requests will end
log = structlog.get_logger()
LOOK_EVERY_S = 1.0
BATCH_PRIORITY = 1000  # of requests in batches: less goes first, and interactive ones have 0


def is_open(path: str) -> bool:
    """True for paths that need no key."""
    return path in NO_KEY or is_below(path, CONSOLE_PAGE)


def is_of_console(path: str) -> bool:
    """True for the console and for all that only it shows."""
    return is_below(path, CONSOLE_PAGE) or scope_of(path) == "console"


def is_below(path: str, root: str) -> bool:
    """True for a path and all paths below it."""
    return path == root or path.startswith(f"{root}/")


def scope_of(path: str) -> Scope | None:
    """Find the scope that a path needs that is not open; None: any key will do."""
    if path in ANY_KEY:
        return None
    for root, scope in _SCOPES.items():
        if is_below(path, root):
            return scope
    return "infer"


class Bucket:
    """A minute's worth at most, filling at that rate; full at first. May be in debt.

    Times are nanoseconds on any clock that does not go back.
    """

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._full = per_minute * MINUTE_NS  # in units of which per_minute come in each nanosecond
        self._level = self._full
        self._at_ns = now_ns

    def spend(self, cost: int, now_ns: int) -> int:
        """Spend ``cost`` if that much is there; a cost of more than a minute's worth needs a full bucket.

        Returns:
            0, or the nanoseconds until another attempt succeeds if nobody else spends meanwhile.
        """
        self._fill(now_ns)
        needed = min(cost * MINUTE_NS, self._full)
        if self._level < needed:
            return -(-(needed - self._level) // self.per_minute)
        self._level -= cost * MINUTE_NS
        return 0

    def settle(self, refund: int, now_ns: int) -> None:
        """Correct what was spent: give back the unused part, or (negative) pay for use beyond it."""
        self._fill(now_ns)
        self._level = min(self._full, self._level + refund * MINUTE_NS)

    def remaining(self, now_ns: int) -> int:
        """Count the amount that could be spent now."""
        self._fill(now_ns)
        return max(0, self._level // MINUTE_NS)

    def full_after_ns(self, now_ns: int) -> int:
        """Count the nanoseconds until the bucket is full again if nobody spends."""
        self._fill(now_ns)
        return -(-(self._full - self._level) // self.per_minute)

    def _fill(self, now_ns: int) -> None:
        self._level = min(self._full, self._level + (now_ns - self._at_ns) * self.per_minute)
        self._at_ns = now_ns


class Taker(Protocol):
    """A request that takes places."""

    def wake(self) -> None:
        """Try again: a place may be free."""
        ...


class Places:
    """Places for runs: some, or as many as anyone takes."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._held: dict[Taker, int] = {}
        self._wanting: dict[Taker, None] = {}  # refused one last, by time

    @property
    def most(self) -> int | None:
        """Number of places; None: as many as anyone takes. A higher one wakes those that want one."""
        return self._most

    @most.setter
    def most(self, most: int | None) -> None:
        self._most = most
        self._wake()

    def take(self, taker: Taker) -> bool:
        """Take a place; one is left for a taker that wants one and has fewer.

        Returns:
            False: not now; ``taker.wake`` is called later.
        """
        held = self._held.get(taker, 0)
        poorer = any(
            self._held.get(other, 0) < held for other in self._wanting if other is not taker
        )
        if not self._is_free(2 if poorer else 1):
            self._wanting[taker] = None
            return False
        self._wanting.pop(taker, None)
        self._held[taker] = held + 1
        self._wake()
        return True

    def give_back(self, taker: Taker) -> None:
        """Give a place of ``taker`` back: one of its runs has ended."""
        self._held[taker] -= 1
        self._wake()

    def leave(self, taker: Taker) -> None:
        """Forget ``taker``, which has given all its places back."""
        assert not self._held.pop(taker, 0)
        self._wanting.pop(taker, None)
        self._wake()

    def _is_free(self, count: int) -> bool:
        return self.most is None or sum(self._held.values()) + count <= self.most

    def _wake(self) -> None:
        if self._is_free(1):
            for taker in self._wanting:
                taker.wake()


class TenantLimited(MoesaicError):
    """A tenant asks for more than its limits; others are not concerned."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, code: str, what: str, retry_after_s: float) -> None:
        self.code = code  # type: ignore[misc]  # rate_limit_exceeded, tenant_concurrency_exceeded
        self.retry_after_s = retry_after_s
        super().__init__(what)


class TenantAllowance:
    """The rest of one tenant's limits.

    | A request | is charged with |
    |---|---|
    | when it comes | one running request, and one of the requests a minute |
    | once its prompt is known | the tokens of its prompt, and those that it asked for |
    | at its end | the tokens that it used, in place of those: the rest comes back, or a debt is left |

    Attributes:
        places: for the runs of all its requests that are computed at once.
    """

    def __init__(self) -> None:
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._num_running = 0
        self.places = Places()

    def set_limits(self, entry: TenantEntry) -> None:
        """Adopt new limits; an unchanged one keeps its count."""
        self._requests = _bucket(self._requests, entry.requests_per_minute)
        self._tokens = _bucket(self._tokens, entry.tokens_per_minute)
        self.places.most = entry.max_concurrent

    def admit(self) -> None:
        """Admit a request; ``release`` ends it.

        Raises:
            TenantLimited: too many requests are running, or came within the last minute.
        """
        if self.places.most is not None and self._num_running >= self.places.most:
            what = f"{self._num_running} requests are running, which is all this key may have"
            raise TenantLimited("tenant_concurrency_exceeded", what, CONCURRENCY_RETRY_S)
        _spend(self._requests, 1, "requests")
        self._num_running += 1

    def release(self) -> None:
        """Note the end of a request that was admitted."""
        self._num_running -= 1

    def spend_tokens(self, count: int) -> None:
        """Spend tokens that a request may use.

        Raises:
            TenantLimited: so many are not there yet.
        """
        _spend(self._tokens, count, "tokens")

    def settle_tokens(self, spent: int, used: int) -> None:
        """Correct the tokens that were spent by those that were used."""
        if self._tokens is not None:
            self._tokens.settle(spent - used, time.monotonic_ns())

    def headers(self) -> Iterator[tuple[str, str]]:
        """Give OpenAI's ``x-ratelimit-…`` headers, for the limits there are."""
        now_ns = time.monotonic_ns()
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{unit}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{unit}", str(bucket.remaining(now_ns))
                yield f"x-ratelimit-reset-{unit}", duration(bucket.full_after_ns(now_ns))


def duration(nanoseconds: int) -> str:
    """Write a time as OpenAI's headers do: ``120ms``, ``1s``, ``6m0s``, rounded up."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _bucket(bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None or (bucket is not None and bucket.per_minute == per_minute):
        return bucket if per_minute is not None else None
    return Bucket(per_minute, time.monotonic_ns())


def _spend(bucket: Bucket | None, count: int, unit: str) -> None:
    if bucket is None:
        return
    if wait_ns := bucket.spend(count, time.monotonic_ns()):
        wait_s = wait_ns / 10**9
        what = (
            f"this key's limit is {bucket.per_minute} {unit} a minute; retry after {wait_s:.3g} s"
        )
        raise TenantLimited("rate_limit_exceeded", what, wait_s)


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
