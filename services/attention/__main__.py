"""``python -m moesaic.services.attention``, and ``moesaic-attention``."""

from moesaic.cluster.start import start_service
from moesaic.services.attention.settings import AttentionSettings


def main() -> None:
    """Run an attention worker."""
    start_service(AttentionSettings, "moesaic.services.attention.main")


if __name__ == "__main__":
    main()
