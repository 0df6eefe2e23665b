"""Retries of a request: the wait before each, and the last."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
# Nothing was done yet: asking again costs nobody anything. 529 is Anthropic's for an overload.
BUSY_STATUSES = frozenset({429, 503, 529})
_RETRYABLE = BUSY_STATUSES | {502, 504}


def retry_wait_s(
    num_tries: int, status: int | None, retry_after: str | None, should_retry: str | None
) -> float | None:
    """Decide on the wait before a request is sent again.

    Args:
        num_tries: attempts so far.
        status: status of the last answer; None if the connection failed.
        retry_after: its header ``Retry-After``, seconds.
        should_retry: its header ``x-should-retry``, which decides if it is given.

    Returns:
        Seconds; None if another attempt cannot help.
    """
    if status is not None and (
        should_retry == "false" or (should_retry != "true" and status not in _RETRYABLE)
    ):
        return None
    try:
        asked_s = float(retry_after or "")
    except ValueError:
        asked_s = -1.0
    if 0 <= asked_s < float("inf"):
        return min(asked_s, LONGEST_WAIT_S)
    return float(min(FIRST_WAIT_S * 2 ** min(num_tries - 1, 10), LONGEST_WAIT_S))
