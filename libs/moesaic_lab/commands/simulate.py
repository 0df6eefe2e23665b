"""``moesaic simulate``: studies of fleets that nobody needs to have."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.terminal.console import print_json, print_table, progress_bar, say
from moesaic.cli.terminal.options import JsonOption
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic_lab.commands.simulate_edge import edge
from moesaic_lab.commands.simulate_trace import trace

if TYPE_CHECKING:
    from moesaic_lab.simulation.elastic.demand import DemandSeries
    from moesaic_lab.simulation.elastic.fleet_times import Hardware
    from moesaic_lab.simulation.elastic.fleets import FleetFamily

app = typer.Typer(no_args_is_help=True, add_completion=False)

TRACES = Path("benchmarks/data")  # of the project's sources
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
SHORT_S = 6 * 3600.0  # traces up to so long are looked at second by second
BROWNOUT = 0.6  # loses 0.8 % of the demo model's right answers, docs/measured/brownout.md


@app.callback()
def studies() -> None:
    """Predict the results of fleets of any size for recorded traffic."""


app.command()(edge)
app.command()(trace)


@app.command()
def elastic(
    model: Annotated[
        str, typer.Option(help="Name of a known model, or a model directory.")
    ] = "qwen3-235b",
    device: Annotated[str, typer.Option(help="Kind of devices: h100, h200, a100 or cpu.")] = "h100",
    trace: Annotated[
        str,
        typer.Option(
            help="File of requests or of rates, or azure2023_conv or servegen_rates; ':NAME' "
            "after rates selects the rates of one model."
        ),
    ] = "azure2023_conv",
    slo_ttft: Annotated[
        float, typer.Option(min=0.001, help="Target for the time to the first token, in seconds.")
    ] = 0.5,
    slo_tpot: Annotated[
        float, typer.Option(min=0.001, help="Target for the time per later token, in seconds.")
    ] = 0.1,
    attainment: Annotated[
        float,
        typer.Option(min=0.5, max=0.9999, help="Share of requests that must meet both targets."),
    ] = 0.99,
    decide_every: Annotated[
        str, typer.Option(help="Time between decisions, such as 5m or 30m.")
    ] = "5m",
    requests_per_s: Annotated[
        float, typer.Option(min=0.0, help="Scale the trace to this mean rate; 0: as recorded.")
    ] = 0.0,
    prompt_tokens: Annotated[
        float, typer.Option(min=1, help="Prompt tokens of a request, if the trace has only rates.")
    ] = 512,
    answer_tokens: Annotated[
        float, typer.Option(min=1, help="Answer tokens of a request, if the trace has only rates.")
    ] = 256,
    price: Annotated[
        float, typer.Option(min=0.0, help="Price of one device for an hour, in any unit.")
    ] = 1.0,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="File of measured costs, such as from 'bench costs', instead of published rates."
        ),
    ] = None,
    routing: Annotated[
        Path | None,
        typer.Option(help="Trace from 'moesaic trace record', instead of random routing."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random numbers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Draw a picture (PNG or SVG).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the attention and expert devices that traffic needs over time, and compare other ways of scaling."""
    from moesaic.errors import InvalidInput, PlacementInfeasible

    every_s = _seconds(decide_every)
    if out is not None and not out.parent.is_dir():
        raise CommandError(f"--out {out}: no such directory", Exit.USAGE)
    try:
        family = _family(model, device, costs, routing, seed)
        demand, before = _demand(trace, requests_per_s, prompt_tokens, answer_tokens, seed, every_s)
        facts = _study(family, demand, before, (slo_ttft, slo_tpot, attainment), every_s, price)
    except InvalidInput as error:
        raise CommandError(f"{error.field}: {error.fix}", Exit.USAGE) from error
    except PlacementInfeasible as error:
        raise CommandError(f"the model does not fit: {error}", Exit.USAGE) from error
    if out is not None:
        _draw(facts, out)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * UNITS_S[found[2] or "s"] if found else 0.0
    if not 10 <= seconds <= 86400:
        raise CommandError(f"--decide-every {text}: must be from 10s to 24h", Exit.USAGE)
    return float(round(seconds))


def _family(
    model: str, device: str, costs: Path | None, routing: Path | None, seed: int
) -> "FleetFamily":
    from dataclasses import replace

    from moesaic_lab.commands.study_inputs import model_of, performance_of, routing_of
    from moesaic_lab.simulation.elastic.fleet_times import Hardware
    from moesaic_lab.simulation.elastic.fleets import FleetFamily
    from moesaic_lab.simulation.elastic.hardware import device_profile
    from moesaic_lab.simulation.elastic.roofline import roofline

    shape, profile = model_of(model), device_profile(device)
    performance = roofline(profile, shape)
    if costs is not None:
        performance = performance_of(costs, model, performance)
    family = FleetFamily.drawn(Hardware(profile, shape, performance), seed)
    return family if routing is None else replace(family, routing=routing_of(routing, shape))


def _demand(
    trace: str, rate: float, prompt: float, answer: float, seed: int, every_s: float
) -> tuple["DemandSeries", float]:
    """Read the demand, and the rate in the window before it."""
    from moesaic_lab.commands.study_inputs import demand_of

    return demand_of(trace, TRACES, rate, (prompt, answer), seed, every_s, SHORT_S)


def _study(
    family: "FleetFamily",
    demand: "DemandSeries",
    before: float,
    targets: tuple[float, float, float],
    every_s: float,
    price: float,
) -> dict[str, Any]:
    from moesaic.scaling.contract import Objectives
    from moesaic_lab.simulation.elastic.days import DecisionRule, with_least_headroom

    objectives, rule = Objectives(*targets), DecisionRule(every_s)
    fleets = [
        family.ours,
        family.unbalanced,
        family.unreplicated,
        family.browned_out(BROWNOUT),
        family.fixed_sizes,
        family.any_size,
    ]
    rows: dict[str, Any] = {}
    series: dict[str, Any] = {}
    with progress_bar() as bar:
        task = bar.add_task("fleets", total=len(fleets))
        for fleet in fleets:
            bar.update(task, description=fleet.name)
            headroom, days = with_least_headroom(fleet, demand, objectives, rule, before)
            hours = days.device_hours(demand.bin_s)
            rows[fleet.name] = {
                "mean_attention": _mean([s.attention for s in days.shapes]),
                "mean_experts": _mean([s.experts for s in days.shapes]),
                "mean_devices": _mean(days.devices),
                "peak_devices": max(days.devices),
                "device_hours": round(hours, 2),
                "cost": round(hours * price, 2),
                "attainment": round(days.attainment, 5),
                "headroom": headroom,
                "changes": days.changes,
                "unmet_decisions": days.unmet,
            }
            each = max(1, len(days.shapes) // 600)
            series[fleet.name] = {
                "step_s": each * demand.bin_s,
                "attention": [s.attention for s in days.shapes[::each]],
                "experts": [s.experts for s in days.shapes[::each]],
                "devices": days.devices[::each],
            }
            bar.advance(task)
    return {
        "config": _config(family.hardware, demand, objectives, every_s),
        "fleets": rows,
        "requests_per_s": _rates(demand),
        "series": series,
    }


def _config(
    hardware: "Hardware", demand: "DemandSeries", objectives: Any, every_s: float
) -> dict[str, Any]:
    return {
        "model": hardware.model.title,
        "device": hardware.performance.device or hardware.device.title,
        "assumptions": hardware.device.assumptions,
        "sources": hardware.device.sources,
        "costs": hardware.performance.source,
        "span_s": demand.span_s,
        "requests_per_s": round(demand.rate(0.0, demand.span_s), 3),
        "prompt_tokens": round(demand.prompt_tokens, 1),
        "answer_tokens": round(demand.answer_tokens, 1),
        "slo_ttft_s": objectives.ttft_s,
        "slo_tpot_s": objectives.tpot_s,
        "attainment": objectives.attainment,
        "decide_every_s": every_s,
    }


def _rates(demand: "DemandSeries") -> dict[str, Any]:
    step_s = max(demand.bin_s, demand.span_s / 300)
    times = [i * step_s for i in range(int(demand.span_s / step_s))]
    return {"step_s": step_s, "values": [round(demand.rate(t, t + step_s), 3) for t in times]}


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 2)


def _draw(facts: dict[str, Any], out: Path) -> None:
    from moesaic_lab.pictures.elastic import draw

    try:
        draw(facts, out)
    except (OSError, ValueError) as error:
        raise CommandError(f"--out {out}: {error}", Exit.USAGE) from error
    say(f"picture: {out}")


def _print(facts: dict[str, Any]) -> None:
    config = facts["config"]
    print(f"{config['model']} on {config['device']}")
    print(
        f"{config['span_s'] / 3600:.1f} h at {config['requests_per_s']:g} requests/s of "
        f"{config['prompt_tokens']:g} and {config['answer_tokens']:g} tokens; targets: first token "
        f"{config['slo_ttft_s']:g} s, later {config['slo_tpot_s']:g} s, for "
        f"{config['attainment']:.2%} of the requests"
    )
    columns = ("fleet", "attention", "experts", "devices", "peak", "device-hours", "cost")
    print_table(
        (*columns, "attainment", "headroom"),
        [
            (
                name,
                row["mean_attention"],
                row["mean_experts"],
                row["mean_devices"],
                row["peak_devices"],
                f"{row['device_hours']:,.1f}",
                f"{row['cost']:,.1f}",
                f"{row['attainment']:.2%}",
                row["headroom"],
            )
            for name, row in facts["fleets"].items()
        ],
    )
    print("means over time; each fleet with the least headroom that attains the targets")
    for name, row in facts["fleets"].items():
        if row["unmet_decisions"]:
            print(f"{name}: at {row['unmet_decisions']} decisions no shape meets the targets")
    if not config["device"].startswith("measured"):
        print("seconds are from published rates; docs/measured/elastic.md says what is assumed")
