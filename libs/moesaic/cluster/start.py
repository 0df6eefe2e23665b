"""The start of a service's command."""

import gc
from importlib import import_module

from pydantic_settings import BaseSettings

from moesaic.usage.reading import load_settings


def start_service(settings_class: type[BaseSettings], main: str) -> None:
    """Read the settings, then import the module ``main`` and call its ``run`` with them.

    Help and mistakes need not wait for the other imports.
    """
    settings = load_settings(settings_class)
    # While all this is imported: none of it is garbage, and looking takes a fifth of the start.
    gc.disable()
    import_module(main).run(settings)
