"""``python -m services.expert``, and ``moesaic-expert``."""

import gc

from moesaic.settings import load_settings
from services.expert.settings import ExpertSettings


def main() -> None:
    """Run an expert worker, once its settings are read: help and mistakes need not wait for the rest to load."""
    settings = load_settings(ExpertSettings)
    gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start
    from services.expert.main import run

    run(settings)


if __name__ == "__main__":
    main()
