"""``moesaic brownout``: shows and sets when, and how far, workers degrade what they compute."""

from typing import Any

import typer

from moesaic.cli.clients.scheduler import (
    answers,
    calling,
    print_policy,
    scheduler_address,
)
from moesaic.cli.terminal.console import print_json, print_table
from moesaic.cli.terminal.options import JsonOption, SchedulerOption, sets
from moesaic.messages.brownout import BrownoutPolicy

app = typer.Typer(
    help="Brownout: under overload, answer in time but less exactly.", no_args_is_help=True
)


@app.command()
def show(scheduler: SchedulerOption = "", as_json: JsonOption = False) -> None:
    """Show the current policy, the state of each attention worker, and the last decisions."""
    from moesaic.cli.clients import brownout as client
    from moesaic.cli.clients.decisions import as_dict, print_decisions
    from moesaic.v1 import scheduler_pb2 as pb

    address = scheduler_address(scheduler)

    async def ask() -> tuple[list[Any], dict[str, dict[str, Any]]]:
        found = await answers(address, pb.GetBrownoutRequest())
        return found, await client.brownout_of_workers(address)

    [found], workers = calling(ask())
    if as_json:
        states = [{"id": name, **state} for name, state in workers.items()]
        print_json({**as_dict(found), "workers": states})
        return
    print(client.policy_text(found.policy))
    rows = [client.worker_row(name, state) for name, state in workers.items()]
    print_table(client.WORKER_COLUMNS, rows)
    columns, row, note = client.DECISION_COLUMNS, client.decision_row, client.decision_note
    print_decisions(columns, row, note, found.decisions)


@app.command("set")
@sets(BrownoutPolicy)
def set_policy(
    values: dict[str, Any], scheduler: SchedulerOption = "", as_json: JsonOption = False
) -> None:
    """Change the given parts of the policy; workers apply it within seconds."""
    from moesaic.cli.clients.brownout import policy_text
    from moesaic.v1 import scheduler_pb2 as pb

    request = pb.SetBrownoutRequest(policy=pb.BrownoutPolicy(**values))
    print_policy(scheduler, request, policy_text, as_json)
