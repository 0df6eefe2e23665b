"""Requests that are repeated where that can help; no request changes anything at the gateway."""

import asyncio

import httpx

from moesaic.batch.retries import retry_wait_s


async def post_json(
    client: httpx.AsyncClient, url: str, body: bytes, max_tries: int
) -> httpx.Response:
    """Post JSON until an answer is final or ``max_tries`` are made.

    A 429 that says when to come back counts as no try: the caller's limit is reached, and time helps.

    Returns:
        The last answer.

    Raises:
        httpx.HTTPError: there was no answer at all.
    """
    headers = {"Content-Type": "application/json"}
    num_tries = 0
    while True:
        num_tries += 1
        try:
            response = await client.post(url, content=body, headers=headers)
        except httpx.HTTPError as error:
            wait_s = retry_wait_s(num_tries, None, None, None)
            if num_tries == max_tries or _took_too_long(error):
                raise
        else:
            asked = response.headers.get("retry-after"), response.headers.get("x-should-retry")
            wait_s = retry_wait_s(num_tries, response.status_code, *asked)
            if response.status_code == 429 and wait_s is not None and asked[0]:
                num_tries -= 1
            elif num_tries == max_tries or wait_s is None:
                return response
        await asyncio.sleep(wait_s or 0.0)


def _took_too_long(error: httpx.HTTPError) -> bool:
    """Tell a gateway that is too slow, as it would be the next time, from one that is not reached."""
    return isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
