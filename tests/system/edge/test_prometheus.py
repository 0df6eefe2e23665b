"""The dashboard of edge sites asks for series that agents have."""

from pathlib import Path

from tests.deploy.test_observability import queries
from tests.prometheus import metrics_of, needs_prometheus, scraping
from tests.suites import SERVED_PROMPT, Suite
from tests.waiting import eventually


@needs_prometheus
def test_every_query_of_the_dashboard_gives_series(roomy: Suite, tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": SERVED_PROMPT, "max_tokens": 8}
    expected = {query for where, query in queries() if where.startswith("edge.json")}

    with scraping(tmp_path, metrics_of(roomy)) as prometheus, roomy.client() as client:

        def unanswered() -> set[str]:
            assert client.post("/v1/completions", json=body).status_code == 200
            return {query for query in expected if not prometheus.series(query)}

        eventually(lambda: not unanswered())
        complaints = prometheus.complaints()

    assert len(expected) >= 8
    assert complaints == []
