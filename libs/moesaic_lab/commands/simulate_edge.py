"""``moesaic simulate edge``: edge servers that call each other's experts, from some GPUs to thousands."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.terminal.console import print_json, print_table, progress_bar, say
from moesaic.cli.terminal.options import JsonOption
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting
from moesaic_lab.commands.study_inputs import read_trace

if TYPE_CHECKING:
    from moesaic_lab.simulation.edge.scale import ScaleStudy
    from moesaic_lab.simulation.edge.state import Advance

COLUMNS = (
    *("GPUs", "policy", "regions", "placed in", "gap", "Mbit/s", "mean", "p90", "first token"),
    *("waiting", "remote", "predicted", "messages/token", "links in use", "events", "events/s"),
)


def edge(
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs of the fleets, comma-separated.")
    ] = "4,16,64,256",
    mbps: Annotated[
        str, typer.Option(help="Rates of links in Mbit/s, comma-separated.")
    ] = "100,500,1000",
    policy: Annotated[
        str, typer.Option(help="Placement policies, comma-separated, such as uniform,eplb,dance.")
    ] = "optimal,eplb",
    arrivals: Annotated[
        str,
        typer.Option(help="Mean gaps between requests of one server in seconds, comma-separated."),
    ] = "8,15",
    mix: Annotated[
        Literal["specialised", "mixed"],
        typer.Option(help="Tasks of the users of a server: one (specialised) or all (mixed)."),
    ] = "specialised",
    costs: Annotated[
        Literal["testbed", "a100"],
        typer.Option(help="Costs fitted to the paper's testbed, or from published rates of A100s."),
    ] = "testbed",
    region: Annotated[
        int,
        typer.Option(min=0, help="Servers that together hold all experts; 0: the whole fleet."),
    ] = 6,
    prompt_tokens: Annotated[
        float, typer.Option(min=8, max=1024, help="Mean number of tokens in a prompt.")
    ] = 300,
    requests: Annotated[
        int, typer.Option(min=1, help="Approximate number of requests of each server.")
    ] = 40,
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace from 'moesaic trace record', instead of random routing."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random numbers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Draw a picture (PNG or SVG).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict latencies of edge servers by fleet size, links, load and placement (DanceMoE, section IV-C)."""
    from moesaic_lab.simulation.edge.scale import ScaleStudy

    sizes = [int(each) for each in _numbers("--gpus", gpus, whole=True)]
    rates, gaps = _numbers("--mbps", mbps), _numbers("--arrivals", arrivals)
    if out is not None and not out.parent.is_dir():
        raise CommandError(f"--out {out}: no such directory", Exit.USAGE)
    with correcting():
        study = ScaleStudy.of(
            costs,
            None if trace is None else read_trace(trace, f"--trace {trace}"),
            mix=mix,
            mean_prompt=prompt_tokens,
            requests=requests,
            region_sites=region or None,
            seed=seed,
        )
        points = _points(study, sizes, policy.split(","), gaps, rates)
    facts = {
        "costs": _source(costs),
        "mix": mix,
        "prompt_tokens": prompt_tokens,
        "seed": seed,
        "points": points,
    }
    if out is not None:
        _draw(points, out)
    if as_json:
        print_json(facts)
        return
    print(facts["costs"])
    print_table(COLUMNS, [_row(point) for point in points])


def _numbers(option: str, text: str, whole: bool = False) -> list[float]:
    try:
        found = [float(int(each) if whole else float(each)) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < 1e6 for each in found):
        raise CommandError(
            f"{option} {text}: must be numbers above 0, by commas, such as 4,16", Exit.USAGE
        )
    return found


def _advance() -> "Advance":
    from moesaic_lab.simulation.edge.native import advancer
    from moesaic_lab.simulation.edge.reference import advance

    fast = advancer()
    if fast is None:
        say("simulating in Python, some 50 times slower: install gcc for full speed")
    return fast or advance


def _points(
    study: "ScaleStudy",
    sizes: list[int],
    policies: list[str],
    gaps: list[float],
    rates: list[float],
) -> list[dict[str, Any]]:
    advance, points = _advance(), list[dict[str, Any]]()
    with progress_bar() as bar:
        task = bar.add_task("", total=len(sizes) * len(policies) * len(gaps) * len(rates))
        for size in sizes:
            for policy in policies:
                bar.update(task, description=f"{size} GPUs, {policy}: placing")
                began_s = time.monotonic()
                plan = study.plan(size, policy)
                place_s = time.monotonic() - began_s
                placed = {
                    "gpus": size,
                    "policy": policy,
                    "regions": plan.num_regions,
                    "place_s": round(place_s, 3),
                    "predicted_remote_share": round(study.predicted(size, plan), 4),
                }
                for gap_s in gaps:
                    for rate in rates:
                        bar.update(task, description=f"{size} GPUs, {policy}, {rate:g} Mbit/s")
                        # Of one core: others may be busy.
                        began_s = time.process_time()
                        outcome = study.point(size, rate, gap_s, plan, advance)
                        took_s = time.process_time() - began_s
                        points.append(
                            {
                                **placed,
                                "gap_s": gap_s,
                                "mbit_per_s": rate,
                                "requests": outcome.requests,
                                "mean_latency_s": round(outcome.mean_s, 4),
                                "latency_p50_s": round(outcome.p50_s, 4),
                                "latency_p90_s": round(outcome.p90_s, 4),
                                "mean_first_token_s": round(outcome.mean_first_s, 4),
                                "mean_waiting_s": round(outcome.mean_wait_s, 4),
                                "remote_share": round(outcome.remote_part, 4),
                                "messages_per_token": round(outcome.messages_per_token, 3),
                                "gpu_busy_share": round(outcome.gpu_part, 4),
                                "link_busy_share": round(outcome.link_part, 4),
                                "events": outcome.events,
                                "simulate_s": round(took_s, 3),
                                "events_per_s": round(outcome.events / max(took_s, 1e-9)),
                            }
                        )
                        bar.advance(task)
    return points


def _source(costs: str) -> str:
    from moesaic_lab.simulation.edge.profiles import PROFILES

    return f"{PROFILES[costs].device}; {PROFILES[costs].source}"


def _row(point: dict[str, Any]) -> tuple[object, ...]:
    return (
        point["gpus"],
        point["policy"],
        point["regions"],
        f"{point['place_s']:.2f} s",
        f"{point['gap_s']:g} s",
        f"{point['mbit_per_s']:g}",
        f"{point['mean_latency_s']:.2f} s",
        f"{point['latency_p90_s']:.2f} s",
        f"{point['mean_first_token_s']:.2f} s",
        f"{point['mean_waiting_s']:.2f} s",
        f"{point['remote_share']:.1%}",
        f"{point['predicted_remote_share']:.1%}",
        f"{point['messages_per_token']:.1f}",
        f"{point['link_busy_share']:.0%}",
        f"{point['events']:,}",
        f"{point['events_per_s']:,}",
    )


def _draw(points: list[dict[str, Any]], out: Path) -> None:
    from moesaic_lab.pictures.edge import draw

    try:
        draw(points, out)
    except (OSError, ValueError) as error:
        raise CommandError(f"--out {out}: {error}", Exit.USAGE) from error
    say(f"picture: {out}")
