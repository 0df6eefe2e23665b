"""``moesaic experts``: lists experts with their traffic and holders, and pins them to workers."""

from typing import Annotated, Any

import typer

from moesaic.cli.clients.scheduler import call
from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption, SchedulerOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit

app = typer.Typer(
    help="Experts: show their traffic and holders; pin them to workers.", no_args_is_help=True
)

LayerOption = Annotated[
    int | None, typer.Option("--layer", min=0, help="Decoder layer (default: all).")
]


@app.command()
def ls(
    layer: LayerOption = None, scheduler: SchedulerOption = "", as_json: JsonOption = False
) -> None:
    """Show every expert: its share of the recent traffic, and the workers that hold it."""
    from moesaic.v1 import scheduler_pb2 as pb

    wanted = pb.GetPlacementRequest(), pb.SchedulerServiceGetActivationsRequest()
    found, seen = call(scheduler, *wanted)
    placed = found.placement
    layers = [one.layer for one in placed.layers]
    if layer is not None and layer not in layers:
        raise CommandError(f"--layer {layer}: layers with experts are {layers}", Exit.USAGE)
    rows = _experts(placed, seen, layer)
    if as_json:
        print_json(rows)
        return
    columns = ("layer", "expert", "share of rows", "active in batches", "workers")
    print_table(
        columns,
        [
            (
                row["layer"],
                f"{row['expert']}, united" if row["united"] else row["expert"],
                f"{row['row_share']:.1%}" if row["row_share"] is not None else "",
                f"{row['active_share']:.1%}" if row["active_share"] is not None else "",
                ", ".join(row["workers"]),
            )
            for row in rows
        ],
    )


@app.command()
def pin(
    expert: Annotated[int, typer.Argument(min=0, help="Id of the expert.")],
    worker: Annotated[str, typer.Argument(callback=valid_text, help="Id of the expert worker.")],
    layer: LayerOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Keep an expert on a worker in all placements."""
    from moesaic.v1 import scheduler_pb2 as pb

    pin = pb.Pin(layer=layer, expert=expert, worker_id=worker)
    request = pb.SchedulerServiceSetPolicyRequest(
        add_pins=[] if remove else [pin], remove_pins=[pin] if remove else []
    )
    done, fleet = call(scheduler, request, pb.GetFleetRequest())
    known = [one.worker_id for one in fleet.workers if one.role in ("expert", "edge-agent")]
    if not remove and worker not in known:
        say(f"no expert worker {worker} is here now ({', '.join(known) or 'none'}): the pin waits")
    pins = [
        {
            "expert": one.expert,
            "layer": one.layer if one.HasField("layer") else None,
            "worker": one.worker_id,
        }
        for one in done.pins
    ]
    if as_json:
        print_json(pins)
        return
    columns = ("expert", "layer", "worker")
    rows = [
        (one["expert"], "every" if one["layer"] is None else one["layer"], one["worker"])
        for one in pins
    ]
    print_table(columns, rows, title="pins")


def _experts(placement: Any, seen: Any, only: int | None) -> list[dict[str, Any]]:
    traffic = {layer.layer: layer for layer in seen.layers}
    rows = []
    for placed in placement.layers:
        if only not in (None, placed.layer):
            continue
        counted = traffic.get(placed.layer)
        total = sum(counted.tokens) if counted else 0.0
        for expert in range(placement.num_experts):
            rows_share = active_share = None
            if counted is not None and total > 0 and expert < len(counted.tokens):
                rows_share = counted.tokens[expert] / total
                active_share = counted.active[expert] / counted.batches
            rows.append(
                {
                    "layer": placed.layer,
                    "expert": expert,
                    "united": expert >= placement.num_experts - placement.num_united,
                    "row_share": rows_share,
                    "active_share": active_share,
                    "workers": [
                        worker.worker_id
                        for worker, slots in zip(placement.workers, placed.workers, strict=True)
                        if expert in slots.expert_ids
                    ],
                }
            )
    return rows
