"""``moesaic serve``: run one service in this process."""

import sys
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand

from moesaic.cli.terminal.outcome import CommandError, Exit

Role = Literal["gateway", "attention", "expert", "scheduler", "edge-agent"]


class RoleCommand(TyperCommand):
    """A command that hands its words to a service, whose flags it completes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the role; a model in its place is a suite's."""
        role = args[0] if args else ""
        if "/" in role and not ctx.resilient_parsing:
            fix = f"'moesaic up {role}' starts all services of a model"
            raise CommandError(
                f"{role}: give one of {', '.join(get_args(Role))}; {fix}", Exit.USAGE
            )
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """List its own parameters; for completion behind a role, also the settings of that service."""
        own, role = super().get_params(ctx), ctx.params.get("role")
        if not ctx.resilient_parsing or role is None:
            return own
        from moesaic.cli.suite.service_settings import options_of
        from moesaic.usage.names import settings_model
        from moesaic.usage.reading import flags_in

        return [*own, *options_of(flags_in(settings_model(role)))]


def serve(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="Service to run.")],
) -> None:
    """Run one service; 'moesaic serve ROLE --help' lists its flags.

    A model may follow the role, as in 'moesaic serve attention owner/name'. --config FILE reads settings.
    """
    from importlib import import_module

    from moesaic.cli.suite.processes import module_of

    # Services read their flags from the command line, as when they are started by their own names.
    sys.argv = [f"moesaic serve {role}", *context.args]
    import_module(f"{module_of(role)}.__main__").main()
