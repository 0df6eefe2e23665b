"""Single settings for probes and commands, for which importing a service's settings takes too long."""

import os
from pathlib import Path

ENV_PREFIX = "MOESAIC_"
SECRETS_DIR = Path("/run/secrets")


def told(name: str) -> str:
    """Read a setting as services do, but for their flags; empty if it is not set.

    The sources are the variable ``MOESAIC_<NAME>``, then the file ``moesaic_<name>`` in the directory
    of containers' secrets, or in ``MOESAIC_SECRETS_DIR``.

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
