"""``python -m moesaic.services.expert``, and ``moesaic-expert``."""

from moesaic.cluster.start import start_service
from moesaic.services.expert.settings import ExpertSettings


def main() -> None:
    """Run an expert worker."""
    start_service(ExpertSettings, "moesaic.services.expert.main")


if __name__ == "__main__":
    main()
