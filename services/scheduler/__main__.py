"""``python -m moesaic.services.scheduler``, and ``moesaic-scheduler``."""

from moesaic.cluster.start import start_service
from moesaic.services.scheduler.settings import SchedulerSettings


def main() -> None:
    """Run a scheduler."""
    start_service(SchedulerSettings, "moesaic.services.scheduler.main")


if __name__ == "__main__":
    main()
