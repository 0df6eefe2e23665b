"""Requests in flight, and what each of them waits for."""

import time
from collections.abc import Mapping, Sequence

from moesaic.services.gateway.console.state import RequestState
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.workers.run import Run

MOST_REQUESTS = 100


def requests_of(inflight: Mapping[RequestRecord, Sequence[Run]]) -> list[RequestState]:
    """Describe requests, the oldest first, at most ``MOST_REQUESTS``."""
    oldest = sorted(inflight.items(), key=lambda item: item[0].started)[:MOST_REQUESTS]
    now_s = time.monotonic()
    return [
        RequestState(
            id=record.request_id,
            route=record.route,
            tenant=record.tenant,
            age_s=round(now_s - record.started, 3),
            waits_for=waits_for(runs),
            prompt_tokens=record.prompt_tokens,
            tokens=sum(len(run.token_ids) for run in runs),
            workers=sorted({run.placed_at[0] for run in runs if run.placed_at}),
        )
        for record, runs in oldest
    ]


def waits_for(runs: Sequence[Run]) -> str:
    """Say what keeps the first open run of a request from its end."""
    if not runs:
        return "its turn to be read"
    run = next((run for run in runs if not run.done), None)
    if run is None:
        return "its client"
    if run.under_way is None:
        return "a place among its tenant's requests"
    if run.placed_at is None:
        return "an attention worker"
    worker = run.placed_at[0]
    if not run.token_ids:
        return f"the first result of {worker}"
    return f"token {len(run.token_ids) + 1} of {worker}"
