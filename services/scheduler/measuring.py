"""Measurements of the epoch in force, set beside the prediction it was committed for."""

from prometheus_client import Gauge

from moesaic.messages.decisions import DecisionOutcome
from moesaic.messages.placement import Placement
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.traffic import TrafficFeed

FIRST_MEASURED = 100  # batches; then whenever there are twice as many
FIRST_CHOICES = 10_000  # of edge agents; the same

_busiest = Gauge(
    "moesaic_busiest_worker_experts",
    "Experts activated on the busiest worker, as the mean over batches of the current epoch",
)


async def measure_sites(profiles: SiteProfiles, decisions: DecisionLog, current: Placement) -> None:
    """Log the local share of the epoch in force, and the cost of other sites, with the decision that led to it."""
    served, outcome = profiles.served(current.epoch), decisions.outcome_of(current.epoch)
    if not served.choices:
        return
    if outcome and served.choices >= max(FIRST_CHOICES, 2 * outcome.measured_choices):
        await decisions.note_outcome(
            DecisionOutcome(
                decision_id=outcome.decision_id,
                measured_local_share=round(served.local / served.choices, 4),
                measured_row_s=served.away_s / served.choices,
                measured_choices=served.choices,
            )
        )


async def measure(feed: TrafficFeed, decisions: DecisionLog, current: Placement) -> None:
    """Show how evenly workers serve the epoch in force, and log it with the decision that led to it."""
    served = feed.served(current)
    if served is None:
        return
    batches, busiest = served
    if batches:
        _busiest.set(busiest / batches)
    outcome = decisions.outcome_of(current.epoch)
    if outcome and batches >= max(FIRST_MEASURED, 2 * outcome.measured_batches):
        await decisions.note_outcome(
            DecisionOutcome(
                decision_id=outcome.decision_id,
                measured_after=round(busiest / batches, 3),
                measured_batches=batches,
            )
        )
