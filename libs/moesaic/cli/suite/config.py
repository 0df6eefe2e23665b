"""The model and the file of settings that the commands of a suite take, besides its options."""

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.terminal.options import taken_fields
from moesaic.cli.terminal.outcome import CommandError, Exit

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="HF-format model directory, or a repository of the Hugging Face hub: owner/name or "
        "owner/name@revision (default: the demo model).",
    ),
]


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of a file the defaults of this command, behind flags and variables."""
    if path is None or context.resilient_parsing:
        return path
    from moesaic.usage.config_file import OF_UP, read_config, untold
    from moesaic.usage.flags import WrongFlag

    options = [each for each in context.command.get_params(context) if each.opts[0][:2] == "--"]
    fields = {each.opts[0][2:]: each.name or "" for each in options if each.name != "config"}
    of_up: set[str] = set()
    if context.command.name != "up":
        of_up = {name.replace("_", "-") for name in taken_fields(SuiteOptions)} | OF_UP
        # Another command means the memory of the machine by it, 'up' and the file that of agents.
        fields.pop("memory", None)
    try:
        found = read_config(path, fields, of_up)
    except WrongFlag as error:
        raise CommandError(str(error), Exit.USAGE) from error
    context.default_map = untold({fields[key]: text for key, text in found.items()})
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_read,
        help="YAML file of settings, by the names of their flags, such as 'max-num-seqs: 32'. Flags and "
        "variables win over it.",
    ),
]
