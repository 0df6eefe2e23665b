"""Commands that other packages add."""

from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.plugins import plugins

OF_THE_LAB = ("distill", "simulate")


class Commands(TyperGroup):
    """The commands of this package first. Others are looked up when one is asked for that is not among these."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List all names, for help and completion."""
        return [*super().list_commands(ctx), *plugins("commands")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; None: there is none.

        Raises:
            CommandError: it is of a package that is not installed.
        """
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if (added := plugins("commands").get(cmd_name)) is not None:
            command = get_command(added.load())
            command.name = cmd_name
            return command
        if cmd_name in OF_THE_LAB and not ctx.resilient_parsing:
            raise CommandError(
                f"'moesaic {cmd_name}' is a command of the package moesaic-lab, which is not installed: "
                "in a clone, .venv/bin/pip install -c constraints.txt -e libs/moesaic_lab adds it",
                Exit.USAGE,
            )
        return None
