"""``moesaic doctor``: checks of this machine, and fixes."""

from typing import Annotated

import typer

from moesaic.cli.terminal.console import print_entries, print_json, print_table
from moesaic.cli.terminal.options import JsonOption
from moesaic.cli.terminal.outcome import Exit


def doctor(
    model: Annotated[
        str, typer.Option(help="Model directory to check (default: the demo model).")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")] = 8000,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and show the addresses of a running suite; exit status 3 if something must be fixed."""
    import msgspec

    from moesaic.cli.checks.listeners import row_of
    from moesaic.cli.checks.machine_checks import run_checks

    findings = run_checks(model, port)
    if as_json:
        print_json(msgspec.to_builtins(findings))
    else:
        rows = [(f.name, f.status) for f in findings]
        notes = [f"{f.detail} -> {f.fix}" if f.fix else f.detail for f in findings]
        print_entries(("check", "status"), rows, notes)
        if listeners := [each for finding in findings for each in finding.listeners]:
            print_table(
                ("process", "listens for", "protocol", "at", "who may speak", "what proves it"),
                [(each.process, *row_of(each)) for each in listeners],
            )
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(Exit.UNHEALTHY)
