"""``python -m services.attention``, and ``moesaic-attention``."""

import gc

from moesaic.settings import load_settings
from services.attention.settings import AttentionSettings


def main() -> None:
    """Run an attention worker, once its settings are read: help and mistakes need not wait for the rest to load."""
    settings = load_settings(AttentionSettings)
    gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start
    from services.attention.main import run

    run(settings)


if __name__ == "__main__":
    main()
