"""How much a tenant may ask of this gateway process: requests and tokens a minute, requests at once."""

import time
from collections.abc import Iterator

from moesaic.api_keys import TenantEntry
from moesaic.errors import MoesaicError
from services.gateway.buckets import Bucket
from services.gateway.places import Places

CONCURRENCY_RETRY_S = 1.0  # nobody knows when one of a tenant's requests will end


class TenantLimited(MoesaicError):
    """A tenant asks for more than was agreed on; others are not concerned."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, code: str, what: str, retry_after_s: float) -> None:
        self.code = code  # type: ignore[misc]  # rate_limit_exceeded, tenant_concurrency_exceeded
        self.retry_after_s = retry_after_s
        super().__init__(what)


class Allowance:
    """What one tenant may still use.

    Attributes:
        places: for what is computed at once of all its requests, which may be many works each.

    A request takes its place and one of the requests a minute when it comes. Once its prompt is known it takes the
    prompt's tokens and those of the answer that it asked for; at its end it gives back what it did not use, or pays
    for what it used besides, which can leave a debt that time has to pay off.
    """

    def __init__(self) -> None:
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._num_running = 0
        self.places = Places()

    def set_limits(self, entry: TenantEntry) -> None:
        """Take over new limits; what was used under an unchanged one stays used."""
        self._requests = _bucket(self._requests, entry.requests_per_minute)
        self._tokens = _bucket(self._tokens, entry.tokens_per_minute)
        self.places.most = entry.max_concurrent

    def enter(self) -> None:
        """Let a request in; ``leave`` lets it out again.

        Raises:
            TenantLimited: too many are running, or came within the last minute.
        """
        if self.places.most is not None and self._num_running >= self.places.most:
            what = f"{self._num_running} requests are running, which is all this key may have"
            raise TenantLimited("tenant_concurrency_exceeded", what, CONCURRENCY_RETRY_S)
        _take(self._requests, 1, "requests")
        self._num_running += 1

    def leave(self) -> None:
        """A request that was let in is over."""
        self._num_running -= 1

    def take_tokens(self, count: int) -> None:
        """Take what a request may use.

        Raises:
            TenantLimited: that many are not there yet.
        """
        _take(self._tokens, count, "tokens")

    def settle_tokens(self, taken: int, used: int) -> None:
        """Correct what was taken by what was used."""
        if self._tokens is not None:
            self._tokens.settle(taken - used, time.monotonic_ns())

    def headers(self) -> Iterator[tuple[str, str]]:
        """OpenAI's ``x-ratelimit-…`` headers, for the limits there are."""
        now_ns = time.monotonic_ns()
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{unit}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{unit}", str(bucket.remaining(now_ns))
                yield f"x-ratelimit-reset-{unit}", duration(bucket.full_after_ns(now_ns))


def duration(nanoseconds: int) -> str:
    """A time as OpenAI's headers have it: ``120ms``, ``1s``, ``6m0s``, rounded up."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _bucket(bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None or (bucket is not None and bucket.per_minute == per_minute):
        return bucket if per_minute is not None else None
    return Bucket(per_minute, time.monotonic_ns())


def _take(bucket: Bucket | None, count: int, unit: str) -> None:
    if bucket is None:
        return
    if wait_ns := bucket.take(count, time.monotonic_ns()):
        wait_s = wait_ns / 10**9
        what = (
            f"this key's limit is {bucket.per_minute} {unit} a minute; retry after {wait_s:.3g} s"
        )
        raise TenantLimited("rate_limit_exceeded", what, wait_s)
