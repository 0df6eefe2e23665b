"""``moesaic scale``: shows and sets how many workers of each side there are."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.clients.scheduler import (
    answers,
    calling,
    print_policy,
    scheduler_address,
)
from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption, SchedulerOption, sets, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting
from moesaic.messages.scaling import ScalingPolicy

if TYPE_CHECKING:
    from moesaic.v1 import scheduler_pb2 as pb

POLL_S = 0.5

app = typer.Typer(help="Numbers of attention and of expert workers.", no_args_is_help=True)


@app.command()
def show(scheduler: SchedulerOption = "", as_json: JsonOption = False) -> None:
    """Show the current policy, the current and wanted numbers of workers, and the last decisions."""
    from moesaic.cli.clients import scaling as client
    from moesaic.cli.clients.decisions import as_dict, print_decisions
    from moesaic.cli.clients.fleet import gather_facts

    address = scheduler_address(scheduler)

    async def ask() -> "tuple[pb.GetScalingResponse, list[dict[str, Any]]]":
        found = await _scaling(address)
        return found, (await gather_facts({}, address))[0]

    found, services = calling(ask())
    workers = [
        {"id": one["id"], "role": one["role"], "state": one["state"]}
        for one in sorted(services, key=lambda one: (one["role"], one["id"]))
        if one["role"] in ("attention", "expert")
    ]
    if as_json:
        print_json({**as_dict(found), "workers": workers})
        return
    print(client.policy_text(found.policy))
    print(client.state_text(found))
    print_table(("worker", "state"), [(one["id"], one["state"]) for one in workers])
    columns, row, note = client.DECISION_COLUMNS, client.decision_row, client.decision_note
    print_decisions(columns, row, note, found.decisions)


@app.command()
def to(
    shape: Annotated[
        str,
        typer.Argument(
            callback=valid_text, help="Numbers of attention and of expert workers, such as 2A4E."
        ),
    ],
    keep_mode: Annotated[
        bool,
        typer.Option(
            "--keep-mode", help="Stay in mode auto, which may change the numbers again later."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the change; 0: do not wait.")
    ] = 120,
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Set the numbers of workers, and wait for them; in mode auto, the policy then only advises."""
    from moesaic.cli.clients.decisions import as_dict
    from moesaic.cli.clients.scaling import shape_text, state_text
    from moesaic.messages.scaling import read_shape
    from moesaic.v1 import scheduler_pb2 as pb

    with correcting():
        wanted = read_shape(shape)
    address = scheduler_address(scheduler)
    message = pb.FleetShape(attention=wanted.attention, experts=wanted.experts)

    async def ask() -> "tuple[pb.GetScalingResponse, pb.ScalingDecision | None]":
        [done] = await answers(address, pb.ScaleRequest(shape=message, keep_mode=keep_mode))
        if done.decision_id and timeout:
            say(f"{shape_text(message)} is wanted")
        return await _awaited(address, done.decision_id, timeout)

    found, decision = calling(ask())
    if as_json:
        told = [as_dict(decision)] if decision is not None else []
        print_json({**as_dict(found), "decisions": told})
    else:
        print(state_text(found))
    if decision is not None and decision.failure:
        raise CommandError(f"{shape_text(message)}: {decision.failure}")
    is_there = decision.HasField("seconds") if decision is not None else found.shape == message
    if timeout and not is_there:
        text = f"{shape_text(message)} is not there after {timeout:g} s; the scheduler goes on"
        raise CommandError(text, Exit.TIMEOUT)


@app.command("set")
@sets(ScalingPolicy)
def set_policy(
    values: dict[str, Any], scheduler: SchedulerOption = "", as_json: JsonOption = False
) -> None:
    """Change the given parts of the policy."""
    from moesaic.cli.clients.scaling import policy_text
    from moesaic.v1 import scheduler_pb2 as pb

    request = pb.SetScalingRequest(policy=pb.ScalingPolicy(**values))
    print_policy(scheduler, request, policy_text, as_json)


async def _scaling(address: str) -> "pb.GetScalingResponse":
    from moesaic.v1 import scheduler_pb2 as pb

    found: list[pb.GetScalingResponse] = await answers(address, pb.GetScalingRequest())
    return found[0]


async def _awaited(
    address: str, decision_id: str, within_s: float
) -> "tuple[pb.GetScalingResponse, pb.ScalingDecision | None]":
    """Wait until a decision has ended, or another one has overtaken it; without an id the shape was there already."""
    import asyncio

    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while True:
        found = await _scaling(address)
        decision = next((d for d in found.decisions if d.decision_id == decision_id), None)
        has_ended = decision is not None and (decision.failure or decision.HasField("seconds"))
        if not decision_id or has_ended or loop.time() >= until_s:
            return found, decision
        await asyncio.sleep(POLL_S)
