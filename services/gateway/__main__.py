"""``python -m moesaic.services.gateway``, and ``moesaic-gateway``."""

from moesaic.cluster.start import start_service
from moesaic.services.gateway.settings import GatewaySettings


def main() -> None:
    """Run a gateway."""
    start_service(GatewaySettings, "moesaic.services.gateway.main")


if __name__ == "__main__":
    main()
