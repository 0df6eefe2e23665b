"""Reading of settings from flags, environment and files, with one line for each problem."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

from moesaic.usage.config_file import CONFIG, others_settings, read_config, untold
from moesaic.usage.flags import Flag, WrongFlag, flags_of, read_flags
from moesaic.usage.help import print_help
from moesaic.usage.names import unknown_files, unknown_variables
from moesaic.usage.variables import ENV_PREFIX, SECRETS_DIR

EXIT_USAGE = 2

AnySettings = TypeVar("AnySettings", bound=BaseSettings)


def flags_in(cls: type[BaseSettings]) -> list[Flag]:
    """Make the flags of a settings model, in its groups."""
    return flags_of(cls, getattr(cls, "groups", {}))


def load_settings(cls: type[AnySettings], arguments: Sequence[str] | None = None) -> AnySettings:
    """Read settings from flags, environment and files.

    The process exits with status 2 and one line a problem on standard error if a setting is bad, and
    with 0 after the help.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print_help(_program(), cls.__doc__ or "", flags_in(cls))
        raise SystemExit(0)
    try:
        return read_settings(cls, arguments)
    except BadSettings as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


class BadSettings(Exception):
    """Settings that no service can start with: one line a problem, naming the setting to correct."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_settings(cls: type[AnySettings], arguments: Sequence[str]) -> AnySettings:
    """Read settings from flags, environment, files of secrets and a file of settings.

    Raises:
        BadSettings: a setting is wrong or unknown.
    """
    if problems := [*_unknown(cls)]:
        raise BadSettings(problems)
    try:
        given = _given(flags_in(cls), arguments)
        with warnings.catch_warnings():
            # A secret that cannot be read would only be warned of, then passed over.
            warnings.simplefilter("error", UserWarning)
            return cls(**given)
    except WrongFlag as error:
        raise BadSettings([f"{error} ('{_program()} --help' lists them)"]) from error
    except ValidationError as error:
        raise BadSettings(problems_of(error)) from error
    except SettingsError as error:
        why = f": {error.__cause__}" if error.__cause__ else ""
        raise BadSettings([f"settings: {error}{why}"]) from error


def _given(flags: Sequence[Flag], arguments: Sequence[str]) -> dict[str, Any]:
    """Read flags, and what neither they nor variables say from the file that ``--config`` names."""
    given: dict[str, Any] = dict(read_flags([*flags, CONFIG], arguments))
    path = given.pop(CONFIG.field, None)
    if path is None:
        return given
    fields = {flag.name[2:]: flag.field for flag in flags}
    found = read_config(path, fields, others_settings())
    return untold({fields[name]: text for name, text in found.items()}) | given


def _unknown(cls: type[BaseSettings]) -> Iterator[str]:
    """Write one line for each variable and file of secrets that no program reads."""
    own = {f"{ENV_PREFIX}{name.upper()}" for name in cls.model_fields}
    yield from unknown_variables(os.environ, own)
    try:
        directory = secrets_directory()
    except SettingsError as error:
        yield f"settings: {error}"
    else:
        yield from unknown_files(directory, own) if directory else ()


def _program() -> str:
    """Name the command that started this process, for people."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"python -m moesaic.services.{program.parent.name}"
    return program.name


def secrets_directory() -> Path | None:
    """Find the directory of files with settings; None if there is none.

    Raises:
        SettingsError: ``MOESAIC_SECRETS_DIR`` names no directory.
    """
    given = os.environ.get(f"{ENV_PREFIX}SECRETS_DIR")
    directory = Path(given or SECRETS_DIR)
    if directory.is_dir():
        return directory
    if given:
        raise SettingsError(f"{ENV_PREFIX}SECRETS_DIR must name a directory, got {given!r}")
    return None


def problems_of(error: ValidationError) -> list[str]:
    """Write one line for each setting that a settings model refuses."""
    return [_problem(problem) for problem in error.errors()]


def _problem(problem: Any) -> str:
    # About several settings at once; the text names them.
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    name = name.removeprefix(ENV_PREFIX).lower().replace("_", "-")
    given = "" if problem["type"] == "missing" else f", got {str(problem['input'])[:100]!r}"
    flag = f"--{name} ({ENV_PREFIX}{name.upper().replace('-', '_')})"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return f"{flag}: {text[:1].lower()}{text[1:]}{given}"
