"""``python -m services.scheduler``, and ``moesaic-scheduler``."""

import gc

from moesaic.settings import load_settings
from services.scheduler.settings import SchedulerSettings


def main() -> None:
    """Run a scheduler, once its settings are read: help and mistakes need not wait for the rest to load."""
    settings = load_settings(SchedulerSettings)
    gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start
    from services.scheduler.main import run

    run(settings)


if __name__ == "__main__":
    main()
