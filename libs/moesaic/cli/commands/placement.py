"""``moesaic placement``: shows, plans and changes the placement of experts on workers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.clients.scheduler import (
    PLAN_S,
    answers,
    call,
    calling,
    scheduler_address,
)
from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption, SchedulerOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit, using

if TYPE_CHECKING:
    from moesaic.messages.placement import Placement
    from moesaic.v1 import scheduler_pb2 as pb

app = typer.Typer(help="Placement of experts on workers: show, plan, change.", no_args_is_help=True)

PolicyOption = Annotated[
    str,
    typer.Option(callback=valid_text, help="Policy to plan with (default: the current one)."),
]


@app.command()
def show(scheduler: SchedulerOption = "", as_json: JsonOption = False) -> None:
    """Show the current placement, its policy, and the last decisions."""
    from moesaic.cli.clients.decisions import (
        COLUMNS,
        as_dict,
        decision_note,
        decision_row,
        print_decisions,
    )
    from moesaic.cli.clients.fleet import placement_facts
    from moesaic.cli.commands.status import experts_text
    from moesaic.v1 import scheduler_pb2 as pb

    address = scheduler_address(scheduler)

    async def ask() -> tuple[dict[str, Any] | None, list[Any]]:
        found = await answers(address, pb.GetDecisionsRequest(), pb.GetFleetRequest())
        return await placement_facts(address), found

    placement, (decided, fleet) = calling(ask())
    waits = list(fleet.waiting_for)
    if as_json:
        facts = as_dict(decided)
        print_json({"placement": placement, "waiting_for": waits, **facts})
    else:
        if placement is not None:
            print(f"epoch {placement['epoch']}, {len(placement['layers'])} MoE layers")
            rows = [(w["id"], experts_text(w["experts"])) for w in placement["workers"]]
            print_table(("worker", "experts"), rows)
        pins = ", ".join(_pin_text(pin) for pin in decided.pins)
        print(f"policy {decided.policy}" + (f"; pinned: {pins}" if pins else ""))
        for wait in waits:
            print(f"waiting for: {wait}")
        print()
        print_decisions(COLUMNS, decision_row, decision_note, decided.decisions)
    if placement is None:
        raise CommandError("no placement is committed yet", Exit.UNHEALTHY)


@app.command()
def plan(
    policy: PolicyOption = "",
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, for diff and apply.")
    ] = None,
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the plan that a policy would make now, with its predicted gain; changes nothing."""
    from moesaic.cli.clients.decisions import as_dict, plan_text

    made = _planned(scheduler_address(scheduler), policy)
    if out is not None:
        _write(out, as_dict(made))
        say(f"written to {out}: 'moesaic placement apply {out}' makes it the placement")
    if as_json:
        print_json(as_dict(made))
    else:
        print(plan_text(made))


@app.command()
def diff(
    file: Annotated[
        Path | None,
        typer.Argument(help="Plan to compare (default: a new one).", show_default=False),
    ] = None,
    policy: PolicyOption = "",
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the changes from the current placement to that of a plan."""
    address = scheduler_address(scheduler)
    wanted = _read(file) if file is not None else _planned(address, policy)
    changes = _changes(address, wanted)
    if as_json:
        print_json(changes)
        return
    if not changes:
        say("nothing changes")
        return
    columns = ("layer", "worker", "loads", "frees")
    print_table(columns, [tuple(change[name] for name in columns) for change in changes])


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(help="Plan from 'placement plan --out'.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for workers.")] = 300,
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Apply a plan; fails if another placement was committed since it was made."""
    from moesaic.v1 import scheduler_pb2 as pb

    scheduler, wanted = scheduler_address(scheduler), _read(file)
    request = pb.ApplyPlacementRequest(placement=wanted.placement, base_epoch=wanted.base_epoch)
    done = call(scheduler, request, timeout_s=timeout)
    if as_json:
        print_json({"epoch": done.epoch, "decision_id": done.decision_id or None})
    else:
        print(f"epoch {done.epoch} is in force" + ("" if done.decision_id else " already"))


@app.command("policy")
def set_policy(
    name: Annotated[
        str,
        typer.Argument(
            callback=valid_text, help="auto, keep, or a policy such as eplb or janus-batches."
        ),
    ],
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Set the policy that rebalances experts by traffic."""
    from moesaic.v1 import scheduler_pb2 as pb

    done = call(scheduler, pb.SchedulerServiceSetPolicyRequest(policy=name))
    if as_json:
        print_json({"policy": done.policy})
    else:
        print(f"policy {done.policy}")


def _planned(address: str, policy: str) -> "pb.Plan":
    from moesaic.v1 import scheduler_pb2 as pb

    made: pb.Plan = call(address, pb.PlanRequest(policy=policy), timeout_s=PLAN_S).plan
    return made


def _changes(address: str, wanted: "pb.Plan") -> list[dict[str, Any]]:
    from moesaic.cluster.placements import decode_placement
    from moesaic.placement.decide.moves import Move, freed, moves
    from moesaic.v1 import scheduler_pb2 as pb

    current = call(address, pb.GetPlacementRequest()).placement
    if current.epoch != wanted.base_epoch:
        say(
            f"the plan was made for epoch {wanted.base_epoch}, but {current.epoch} is in force: "
            "it would not be applied"
        )
    before, after = decode_placement(current), _placement_of(wanted)

    def experts(changed: list[Move], layer: int, worker: str) -> list[int]:
        return [move.expert for move in changed if (move.layer, move.worker_id) == (layer, worker)]

    loads, frees = moves(before, after), freed(before, after)
    places = sorted({(move.layer, move.worker_id) for move in [*loads, *frees]})
    return [
        {
            "layer": layer,
            "worker": worker,
            "loads": experts(loads, layer, worker),
            "frees": experts(frees, layer, worker),
        }
        for layer, worker in places
    ]


def _read(file: Path) -> "pb.Plan":
    from google.protobuf.json_format import ParseDict, ParseError

    from moesaic.errors import InvalidInput
    from moesaic.v1 import scheduler_pb2 as pb

    with using(file):
        text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        plan = ParseDict(found if isinstance(found, dict) else {}, pb.Plan())
        if not plan.placement.workers:
            raise ValueError("it has no placement")
        _placement_of(plan)
        return plan
    except (ValueError, ParseError, InvalidInput) as error:
        raise CommandError(f"{file}: not a plan: {error}", Exit.USAGE) from error


def _placement_of(plan: "pb.Plan") -> "Placement":
    """The placement of a plan; it has no epoch yet."""
    from moesaic.cluster.placements import decode_placement

    whole = type(plan.placement)()
    whole.CopyFrom(plan.placement)
    whole.epoch = max(1, whole.epoch)
    return decode_placement(whole)


def _write(file: Path, plan: dict[str, Any]) -> None:
    with using(f"--out {file}"):
        file.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


def _pin_text(pin: "pb.Pin") -> str:
    layer = f" of layer {pin.layer}" if pin.HasField("layer") else ""
    return f"expert {pin.expert}{layer} to {pin.worker_id}"
