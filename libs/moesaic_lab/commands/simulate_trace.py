"""``moesaic simulate trace``: what a recorded trace holds, and what placements and schedules make of it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.terminal.console import print_json, print_table
from moesaic.cli.terminal.options import JsonOption
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting
from moesaic_lab.commands.study_inputs import read_trace


def trace(
    file: Annotated[Path, typer.Argument(help="Trace from 'moesaic trace record'.")],
    instances: Annotated[int, typer.Option(min=1, help="Expert instances to place on.")] = 4,
    slots: Annotated[
        int,
        typer.Option(
            min=0, help="Slots of each instance per layer; 0: a quarter more than needed."
        ),
    ] = 0,
    batches: Annotated[
        int, typer.Option(min=1, help="Steps of each phase to schedule, evenly spaced.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a trace, and the results of placements and schedules for it."""
    from moesaic.errors import PlacementInfeasible
    from moesaic_lab.placement.trace_report import largest_by_policy, part_facts

    with correcting(str(file)):
        recorded = read_trace(file, str(file))
    per_instance = slots or -(-5 * recorded.num_experts // (4 * instances))
    try:
        largest = largest_by_policy(recorded, [per_instance] * instances, batches)
    except PlacementInfeasible as error:
        raise CommandError(
            f"--slots {per_instance}: {instances} instances have {instances * per_instance} slots a "
            f"layer, the trace is of {recorded.num_experts} experts",
            Exit.USAGE,
        ) from error
    facts: dict[str, Any] = {
        "model_digest": recorded.model_digest,
        "num_experts": recorded.num_experts,
        "top_k": recorded.top_k,
        "layers": list(recorded.layers),
        "parts": part_facts(recorded),
        "placed_on": {"instances": instances, "slots": per_instance},
        "max_activated": largest,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _print(facts: dict[str, Any]) -> None:
    experts, layers = facts["num_experts"], len(facts["layers"])
    print(f"{layers} layers of {experts} experts, top-{facts['top_k']}")
    columns = ("part", "phase", "steps", "rows", "rows a step", "active experts", "busiest expert")
    print_table(
        (*columns, "entropy, bits", "together"),
        [
            (
                fact["part"],
                fact["phase"],
                fact["steps"],
                fact["rows"],
                f"{fact['rows_per_step']:.1f}",
                f"{fact['activated_share']:.0%}",
                f"{fact['busiest_share']:.1%}",
                f"{fact['entropy_bits']:.2f}",
                f"{fact['coactivation_lift']:.1f}",
            )
            for fact in facts["parts"]
        ],
    )
    print(
        "together: how much more often than by chance rows choose the two experts that are most "
        "often chosen together"
    )
    where = facts["placed_on"]
    for phase, policies in facts["max_activated"].items():
        schedules = list(next(iter(policies.values())))
        print_table(
            ("placement", *schedules),
            [(name, *(f"{of[s]:.2f}" for s in schedules)) for name, of in policies.items()],
            title=f"{phase}: activated experts on the fullest of {where['instances']} instances "
            f"x {where['slots']} slots, mean over the second half",
        )
