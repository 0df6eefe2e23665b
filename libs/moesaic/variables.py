"""Settings where the model of a service's settings would take too long to import: probes, commands."""

import os
from pathlib import Path

ENV_PREFIX = "MOESAIC_"
SECRETS_DIR = Path("/run/secrets")


def told(name: str) -> str:
    """What a setting is, as services find it beside their flags; empty if nobody says.

    That is the variable named like it, with the prefix, else the file ``moesaic_<name>`` where containers get their
    secrets, or where ``MOESAIC_SECRETS_DIR`` says.

    Raises:
        ValueError: the file is there and cannot be read.
    """
    variable = f"{ENV_PREFIX}{name.upper()}"
    if value := os.environ.get(variable):
        return value
    path = Path(os.environ.get(f"{ENV_PREFIX}SECRETS_DIR") or SECRETS_DIR) / variable.lower()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
