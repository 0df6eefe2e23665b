"""Prometheus scrapes a real suite by the project's configuration, and answers what dashboards and alerts ask."""

from pathlib import Path

from tests.deploy.test_observability import alerts, queries
from tests.prometheus import metrics_of, needs_prometheus, scraping
from tests.suites import SERVED_PROMPT, Suite
from tests.waiting import eventually

pytestmark = needs_prometheus

# Of what a healthy suite with expert workers has not seen: each has another cause.
NOTHING_OF = (
    "moesaic_site_",  # of edge agents
    "moesaic_gather_wait_seconds_total",  # of the topology `gathered`
    "moesaic_tls_certificate_expiry_timestamp_seconds",
    "moesaic_admission_rejections_total",
    "moesaic_reruns_total",
    "moesaic_brownout_degraded_choices_total",
    "vllm:",  # of --metrics-compat vllm
)


def test_every_query_of_dashboards_gives_series_and_no_alert_is_raised(
    disaggregated: Suite, tmp_path: Path
) -> None:
    targets = metrics_of(disaggregated)
    body = {"model": "demo", "prompt": SERVED_PROMPT, "max_tokens": 8}
    raised = {str(alert["expr"]) for alert in alerts()}
    expected = {
        query
        for _, query in queries()
        if query not in raised and not any(each in query for each in NOTHING_OF)
    }

    with scraping(tmp_path, targets) as prometheus:

        def unanswered() -> set[str]:
            # Rates take two scrapes, and some series tell of the last seconds alone.
            with disaggregated.client() as client:
                assert client.post("/v1/completions", json=body).status_code == 200
            return {query for query in expected if not prometheus.series(query)}

        up = {job: [("up", "")] * len(addresses) for job, addresses in targets.items()}
        eventually(lambda: prometheus.targets() == up)
        eventually(lambda: not unanswered())
        # Others only begin: a start of a suite looks like an outage for a moment.
        alarms = prometheus.asked("alerts")["alerts"]
        seen = [alarm for alarm in alarms if alarm["state"] == "firing"]
        complaints = prometheus.complaints()

    assert {*targets} == {"gateway", "scheduler", "attention", "expert"}
    assert (seen, complaints) == ([], [])
