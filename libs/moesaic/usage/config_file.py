"""Settings from a YAML file, by the names of their flags; flags, variables and files of secrets win over it."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from moesaic.usage.flags import Flag, WrongFlag
from moesaic.usage.names import COMMANDS, settings
from moesaic.usage.nearest import proposal
from moesaic.usage.variables import ENV_PREFIX, told

CONFIG = Flag(
    field="config",
    group="",
    description="YAML file of settings, by the names of their flags: 'max-num-seqs: 32'",
    form="<file>",
)
_LARGEST = 1 << 20  # bytes
# Options of 'moesaic up' that no variable gives.
OF_UP = frozenset({"detach", "json", "timeout"})
_OTHER_VARIABLES = {"redis_url": "REDIS_URL"}  # besides MOESAIC_REDIS_URL


def others_settings() -> set[str]:
    """Name the flags of all services and of ``moesaic up``, without the dashes before them."""
    return {_dashed(name.removeprefix(ENV_PREFIX)) for name in settings() | COMMANDS} | OF_UP


def read_config(
    path: str | Path, known: Collection[str], others: Collection[str]
) -> dict[str, str]:
    """Read the settings of a file; a value that is empty counts as unset.

    Args:
        path: of a YAML file with one mapping of names to single values.
        known: names of the reader's own flags, without the dashes before them.
        others: names that are left out, as the same file may serve other commands.

    Returns:
        Texts by name, with dashes.

    Raises:
        WrongFlag: naming the file, the line and the fix.
    """
    found: dict[str, str] = {}
    for line, name, value in _pairs(Path(path)):
        if name not in known and name not in others:
            fix = proposal(name, {*known, *others})
            if name in others_settings():
                fix = f" of this command; variables may give it, as {_variable(name)}"
            raise WrongFlag(f"{path}:{line}: {name}: unknown setting{fix}")
        if name in found:
            raise WrongFlag(f"{path}:{line}: {name}: is set twice; keep one of them")
        found[name] = value
    return {name: value for name, value in found.items() if value and name in known}


def untold(values: Mapping[str, str]) -> dict[str, str]:
    """Leave out the fields that a variable or a file of secrets gives, which win over a file of settings."""
    return {field: value for field, value in values.items() if not _is_told(field)}


def _is_told(field: str) -> bool:
    try:
        return bool(told(field) or os.environ.get(_OTHER_VARIABLES.get(field, "")))
    # A file that cannot be read is there; its reader complains.
    except ValueError:
        return True


_NULL = ("", "~", "null", "Null", "NULL")


def _pairs(path: Path) -> Iterator[tuple[int, str, str]]:
    """Give the line, the name and the text of each setting in a file, whatever type YAML sees in it."""
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise WrongFlag(f"--config {path}: is larger than 1 MiB; give a file of settings")
        root = yaml.compose(content, Loader=yaml.BaseLoader)
    except OSError as error:
        raise WrongFlag(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise WrongFlag(f"--config {path}: is no YAML: {why}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise WrongFlag(f"--config {path}: must hold settings, such as 'max-num-seqs: 32'")
    for key, value in root.value if root else ():
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            name = key.value if isinstance(key, yaml.ScalarNode) else "a name"
            raise WrongFlag(
                f"{path}:{line}: {name}: takes a single value, such as 32; write several with commas"
            )
        # YAML's null, in all its spellings, is no text.
        if value.style is None and value.value in _NULL:
            continue
        yield line, _dashed(key.value), value.value


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper().replace("-", "_")


def _dashed(name: str) -> str:
    return name.lower().replace("_", "-")
