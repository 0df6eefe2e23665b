"""Settings that only some values of ``--dispatch`` have: a class of such settings names them in ``modes``."""

from collections.abc import Mapping, Sequence
from typing import get_args

from pydantic import BaseModel

SETTING = "dispatch"


def listed(words: Sequence[str]) -> str:
    """Write ``local, routed and gathered``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def modes_of(model: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """Give the modes that have a field, by its name; fields that all modes of the model have are left out."""
    if SETTING not in model.model_fields:
        return {}
    choices = set(get_args(model.model_fields[SETTING].annotation))
    return {
        name: tuple(mode for mode in modes if mode in choices) or modes
        for cls in model.__mro__
        if (modes := vars(cls).get("modes")) and not choices <= {*modes}
        for name in vars(cls)["__annotations__"]
        if name in model.model_fields
    }


def missing_in(model: type[BaseModel]) -> frozenset[str]:
    """Name the fields that no mode of the model has: those of relatives that it shares code with."""
    choices = set(get_args(model.model_fields[SETTING].annotation)) if modes_of(model) else set()
    return frozenset(name for name, modes in modes_of(model).items() if not choices & {*modes})


def foreign(settings: BaseModel) -> str:
    """Write the complaint about the first setting that was given and that the chosen mode does not have."""
    fields = type(settings).model_fields
    for name, modes in modes_of(type(settings)).items():
        chosen = getattr(settings, SETTING)
        if chosen not in modes and getattr(settings, name) != fields[name].default:
            flag = name.replace("_", "-")
            return f"--{flag} belongs to --{SETTING} {listed(modes)}, got {chosen}"
    return ""
