"""``python -m services.gateway``, and ``moesaic-gateway``."""

import gc
import sys

from moesaic.settings import load_settings
from services.gateway.settings import GatewaySettings

LOOP_BACK_S = 0.0005  # for which a thread that reads a long text may keep the event loop waiting


def main() -> None:
    """Run a gateway, once its settings are read: help and mistakes need not wait for the rest to load."""
    settings = load_settings(GatewaySettings)
    gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start
    from services.gateway.main import run

    sys.setswitchinterval(LOOP_BACK_S)
    run(settings)


if __name__ == "__main__":
    main()
