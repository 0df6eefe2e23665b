"""Limits of a tenant in this gateway process: requests and tokens a minute, requests at once."""

import time
from collections.abc import Iterator

from moesaic.api_keys import TenantEntry
from moesaic.errors import MoesaicError
from moesaic.services.gateway.access.buckets import Bucket
from moesaic.services.gateway.access.places import Places

CONCURRENCY_RETRY_S = 1.0  # nobody knows when one of a tenant's requests will end


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
