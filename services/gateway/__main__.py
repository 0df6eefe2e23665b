"""``python -m services.gateway``, and ``moesaic-gateway``."""

import gc

from moesaic.settings import load_settings
from services.gateway.settings import GatewaySettings


def main() -> None:
    """Run a gateway, once its settings are read: help and mistakes need not wait for the rest to load."""
    settings = load_settings(GatewaySettings)
    gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start
    from services.gateway.main import run

    run(settings)


if __name__ == "__main__":
    main()
