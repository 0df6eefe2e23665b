"""``moesaic deploy``: the files that start a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption, valid_text

app = typer.Typer(help="Files that start the services of a cluster.", no_args_is_help=True)


@app.command()
def compose(
    hosts: Annotated[
        str,
        typer.Option(
            callback=valid_text,
            help="Description of the hosts: a TOML file with their addresses, GPUs and workers.",
        ),
    ] = "hosts.toml",
    output: Annotated[
        str, typer.Option(callback=valid_text, help="Directory to write to.")
    ] = "cluster",
    as_json: JsonOption = False,
) -> None:
    """Write a directory for each host, with its compose file and its secrets.

    Everything is checked first: addresses, GPUs, ports, settings, and room for all experts. Existing secrets stay.
    """
    from moesaic.cli.deployment.cluster import deploy
    from moesaic.cli.deployment.compose_file import images_of
    from moesaic.cli.deployment.output import compose_is_there

    services, contents = deploy(Path(hosts), Path(output))
    if as_json:
        print_json(contents)
        return
    columns = ("host", "service", "device", "slots", "KV blocks")
    rows = (
        (
            each.host,
            each.name,
            each.settings.get("device", "cpu") if each.worker else "",
            each.settings.get("slots_per_layer", ""),
            each.settings.get("kv_blocks", ""),
        )
        for each in services
    )
    print_table(columns, rows)
    for host, made in contents.items():
        print(
            f"{Path(output, host, f'{host}.yaml')}: needs the images {', '.join(images_of(made))}"
        )
    if not compose_is_there():
        say("docker compose is not on this machine, so it has not read the files")
    say("copy each directory to its host, and run there: docker compose -f HOST.yaml up -d")
