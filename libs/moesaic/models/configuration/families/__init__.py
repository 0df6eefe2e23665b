"""The families that are served, a module each; every module here has its ``FAMILY``."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from moesaic.models.configuration.family import Family


def _found() -> Mapping[str, Family]:
    modules = (import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    families: list[Family] = [module.FAMILY for module in modules]
    return {name: family for family in families for name in family.model_types}


FAMILIES = _found()
"""All families, by ``model_type``."""
