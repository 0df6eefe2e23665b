"""The start of a service's command."""

import gc
import sys
from importlib import import_module

from pydantic_settings import BaseSettings

from moesaic.usage.packages import how_to_install, missing_packages
from moesaic.usage.reading import EXIT_USAGE, load_settings


def start_service(settings_class: type[BaseSettings], main: str) -> None:
    """Read the settings, then import the module ``main`` and call its ``run`` with them.

    Help and mistakes need not wait for the other imports.
    """
    settings = load_settings(settings_class)
    # While all this is imported: none of it is garbage, and looking takes a fifth of the start.
    gc.disable()
    try:
        module = import_module(main)
    except ModuleNotFoundError as error:
        role = main.split(".")[2].replace("_", "-")
        if not (missing := missing_packages(role)):
            raise
        how = how_to_install(role, torch="torch" in missing)
        print(f"{role}: not installed: {', '.join(missing)} -> {how}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error
    module.run(settings)
