"""What the gateway's histograms say of tokens."""

import pytest
from prometheus_client import REGISTRY

from moesaic.services.gateway.http import request_record as record
from moesaic.services.gateway.http.request_record import RequestRecord

NAME = "moesaic_inter_token_latency_seconds"


def test_tokens_that_come_together_were_made_at_even_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now_s[0])
    asked = RequestRecord("r", "POST", route="/v1/completions", model="latencies", started=99.0)

    asked.note_tokens(2)  # the first of each of two answers
    now_s[0] += 0.5
    asked.note_tokens(9, 5)  # five of one, four of the other
    now_s[0] += 0.1
    asked.note_tokens(0, 0)  # the end

    [gaps] = [m for m in REGISTRY.collect() if m.name == NAME]
    mine = {s.name: s.value for s in gaps.samples if "latencies" in s.labels.values()}
    assert mine[f"{NAME}_count"] == 5
    assert mine[f"{NAME}_sum"] == pytest.approx(0.5)
    assert asked.completion_tokens == 11
