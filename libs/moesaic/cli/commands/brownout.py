"""``moesaic brownout``: shows and sets when, and how far, workers degrade what they compute."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.clients.scheduler import (
    SchedulerOption,
    calling,
    scheduler_address,
    scheduler_stub,
)
from moesaic.cli.terminal.console import print_entries, print_json, print_table
from moesaic.cli.terminal.options import JsonOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.v1 import scheduler_pb2 as pb

app = typer.Typer(
    help="Brownout: less exact answers in time instead of late ones.", no_args_is_help=True
)

ThresholdOption = Annotated[
    float | None,
    typer.Option(help="Mode manual: share of choices whose own experts stay; 1 is exact."),
]


@app.command()
def show(scheduler: SchedulerOption = "", as_json: JsonOption = False) -> None:
    """Show the policy in force, the state of each attention worker, and the last decisions."""
    from moesaic.cli.clients import brownout as client
    from moesaic.cli.clients.decisions import as_dict
    from moesaic.v1 import scheduler_pb2 as pb

    address = scheduler_address(scheduler)

    async def ask() -> "tuple[pb.GetBrownoutResponse, dict[str, dict[str, Any]]]":
        async with scheduler_stub(address) as stub:
            found = await stub.GetBrownout(pb.GetBrownoutRequest(), timeout=5)
        return found, await client.brownout_of_workers(address)

    found, workers = calling(ask())
    if as_json:
        states = [{"id": name, **state} for name, state in workers.items()]
        print_json({**as_dict(found), "workers": states})
        return
    print(client.policy_text(found.policy))
    rows = [client.worker_row(name, state) for name, state in workers.items()]
    print_table(client.WORKER_COLUMNS, rows)
    decisions = list(found.decisions)
    print_entries(
        client.DECISION_COLUMNS,
        [client.decision_row(decision) for decision in decisions],
        [client.decision_note(decision) for decision in decisions],
    )


@app.command("set")
def set_policy(
    mode: Annotated[
        str,
        typer.Option(
            callback=valid_text,
            help="off, manual (thresholds as set here), paper (by measured latencies), or auto (by "
            "predicted ones, shedding where that does not suffice).",
        ),
    ] = "",
    prefill_threshold: ThresholdOption = None,
    decode_threshold: ThresholdOption = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds that 90 of 100 first tokens should take at most.")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="The same, for each later token.")] = None,
    min_threshold: Annotated[
        float | None, typer.Option(help="No threshold is ever less, of prompts or answers.")
    ] = None,
    window: Annotated[float | None, typer.Option(help="Seconds for which latencies count.")] = None,
    way: Annotated[
        int | None,
        typer.Option(
            help="Experts that share one united expert; 0: rows make do with fewer experts."
        ),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            callback=valid_text,
            help="Experts that stay: those that most rows chose (tokens), whose absence costs most (error), or as many "
            "on each worker (instances).",
        ),
    ] = "",
    scheduler: SchedulerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Set the policy, or parts of it; what is not named stays. Workers follow within seconds."""
    from moesaic.cli.clients.brownout import policy_text
    from moesaic.cli.clients.decisions import as_dict
    from moesaic.v1 import scheduler_pb2 as pb

    given: dict[str, Any] = {
        "mode": mode or None,
        "prefill_threshold": prefill_threshold,
        "decode_threshold": decode_threshold,
        "slo_ttft_s": slo_ttft,
        "slo_tpot_s": slo_tpot,
        "min_prefill_threshold": min_threshold,
        "min_decode_threshold": min_threshold,
        "window_s": window,
        "way": way,
        "rule": rule or None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise CommandError("nothing to set; name a part of the policy, such as --mode", Exit.USAGE)
    if way is not None and not 0 <= way <= 4096:
        raise CommandError(f"--way must be in 0..4096, got {way}", Exit.USAGE)
    address = scheduler_address(scheduler)

    async def ask() -> "pb.SetBrownoutResponse":
        async with scheduler_stub(address) as stub:
            request = pb.SetBrownoutRequest(policy=pb.BrownoutPolicy(**changes))
            return await stub.SetBrownout(request, timeout=5)

    done = calling(ask()).policy
    if as_json:
        print_json(as_dict(done))
    else:
        print(policy_text(done))
